"""What an artifact is made of, plans apart; and the stage that needs an artifact to begin with: a guess head's."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pi_compile.checkpoint import Checkpoint
from pi_compile.checkpoint.eagle3 import read_head
from pi_compile.corpus import Streams
from pi_compile.packing import PackResult
from pi_compile.pipeline import stages
from pi_compile.pipeline.store import code_digest, key_of, token_digest
from pi_compile.pipeline.worker_memory import guess_spec
from pi_compile.recipe import OWN_HEAD, Recipe
from pi_compile.results import ActivationProfile, GuessWeights, PredictorSet, QuantisedWeights
from pi_compile.training.guess import GuessSpec, announce, train_guess_head, untrained
from pi_compile.workers import WorkFolder
from pi_runtime.console import Progress


@dataclass(frozen=True)
class ModelParts:
    """A recipe's model, with what its stages have found."""

    checkpoint: Checkpoint
    recipe: Recipe
    profile: ActivationProfile | None
    predictors: PredictorSet | None
    quantised: QuantisedWeights | None
    formats: Mapping[str, str]
    """Number formats, as `stages.pack` takes them."""

    @property
    def inputs(self) -> dict[str, Any]:
        """Digests of all of them."""
        return {
            "checkpoint": self.checkpoint.digest(),
            "profile": self.profile and self.profile.digest(),
            "trained": self.predictors and self.predictors.digest(),
            "quantised": None if self.quantised is None else self.quantised.inputs,
        }

    def write(self, output: Path, **others: Any) -> PackResult:
        """Write the artifact, with `others` among the arguments of `stages.pack`."""
        return stages.pack(
            self.checkpoint,
            output,
            profile=self.profile,
            predictors=self.predictors,
            quantised=self.quantised,
            formats=self.formats,
            recipe=self.recipe.model_dump(),
            **others,
        )


def published_head(checkpoint: Checkpoint, path: str, folder: Path) -> GuessWeights | None:
    """A published guess head, for an artifact of its model; None without a path, which is relative to `folder`, and for
    the checkpoint's own layer."""
    if path in ("", OWN_HEAD):
        return None
    head, arrays, digest = read_head(folder / path, checkpoint.decoder, GuessSpec.format)
    return GuessWeights(head, arrays, inputs=digest)


@dataclass(frozen=True)
class GuessStage:
    """The training of a guess head, for a recipe that wants one."""

    parts: ModelParts
    streams: Streams
    workers: int

    @property
    def spec(self) -> GuessSpec:
        """How the recipe has it trained."""
        return guess_spec(self.parts.recipe, self.parts.checkpoint.decoder)

    @cached_property
    def key(self) -> str:
        """Digest of everything that it depends on."""
        return key_of(
            **self.parts.inputs,
            formats=dict(self.parts.formats),
            texts=[token_digest(text) for text in (self.streams.fit, self.streams.tune)],
            spec=asdict(self.spec),
            code=code_digest("pi_compile.training.guess.stage"),
        )

    def __call__(
        self, *, scratch: WorkFolder, inputs: str, notice: Callable[[str], None], progress: Progress
    ) -> GuessWeights:
        """Train it, with all workers that have the same folder."""
        checkpoint, texts = self.parts.checkpoint, (self.streams.fit, self.streams.tune)
        for line in announce(checkpoint.decoder, self.spec, self.workers):
            notice(line)
        pack = partial(self.parts.write, guess=untrained(checkpoint, self.spec))
        return train_guess_head(checkpoint, texts, self.spec, pack, work=scratch, inputs=inputs, progress=progress)
