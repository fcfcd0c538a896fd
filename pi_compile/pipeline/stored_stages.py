"""Results of a recipe's stages: stored ones, or made and stored, with their progress shown."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pi_compile.checkpoint import Checkpoint
from pi_compile.corpus import Streams
from pi_compile.errors import ProfileError
from pi_compile.pipeline.division import Tokens, divide
from pi_compile.pipeline.packed import divide_settings
from pi_compile.pipeline.store import Store, code_digest, key_of, token_digest
from pi_compile.recipe import Recipe
from pi_compile.results import ActivationProfile, Division, PredictorSet, QuantisedWeights
from pi_compile.workers import Worker, WorkFolder
from pi_runtime.console import Progress

Result = TypeVar("Result", Streams, ActivationProfile, PredictorSet, Division, QuantisedWeights)


@dataclass(frozen=True)
class StoredStages:
    """The store of one recipe, and who makes what it lacks."""

    store: Store
    worker: Worker
    notice: Callable[[str], None]
    progress: Callable[..., AbstractContextManager[Progress]]
    ran: list[str]
    """Names of the stages that had to run."""

    def shown(self, title: str, unit: str, stage: Callable[..., Result], key: str) -> Callable[[WorkFolder], Result]:
        """A stage that shows its progress, and records the key of its inputs."""

        def make(work: WorkFolder) -> Result:
            with self.progress(title, unit) as bar:

                def progress(done: int, total: int) -> None:
                    bar(done, total)
                    self.worker.progress(done, total)

                return stage(scratch=work, inputs=key, notice=self.notice, progress=progress)

        return make

    def formats(self, checkpoint: Checkpoint, recipe: Recipe, fit: Callable[[], Tokens]) -> Mapping[str, str]:
        """Number formats: of each part as the recipe says, or of each matrix where it has a budget of bits.

        `fit` reads the text that says what an error costs.
        """
        if not recipe.bits.tokens:
            return recipe.pack.model_dump()
        settings, tokens = divide_settings(recipe), fit()[: recipe.bits.tokens]
        digest, code = checkpoint.digest(), code_digest("pi_compile.pipeline.division")
        key = key_of(checkpoint=digest, text=token_digest(tokens), settings=settings, code=code)

        def make(_work: WorkFolder) -> Division:
            with self.progress("dividing the bits", "steps") as bar:
                return divide(checkpoint, tokens, **settings, inputs=key, progress=bar)

        found = self.get("divide", key, Division, make, alone=True)
        return {**found.formats, "predictor": recipe.pack.predictor}

    def get(
        self, name: str, key: str, kind: type[Result], make: Callable[[WorkFolder], Result], *, alone: bool = False
    ) -> Result:
        """The stored result of a stage; made and stored where there is none."""
        result, made = self.store.result(
            name,
            key,
            make=make,
            save=lambda result, path: result.save(path),
            load=lambda path: _fresh(kind.load(path), key, path),
            alone=alone,
        )
        if made:
            self.ran.append(name)
        return result


def _fresh(result: Result, key: str, path: Path) -> Result:
    """The stored result, checked to be made from the current inputs: somebody may have copied it."""
    found = key if isinstance(result, Streams) else result.inputs
    if found != key:
        raise ProfileError(
            f"{path}: stale, or of another model",
            expected=f"made from inputs {key[:16]}…",
            found=f"{found[:16]}…",
            remedy="delete it, and it is made again",
        )
    return result
