"""The artifact as the last result of a recipe: what was packed last, and packing without a pipeline."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.files import file_digest, write_text
from pi_compile.packing import ALL_KEPT, PackSpec, pack, part_formats, rounded_parts
from pi_compile.pipeline.recipe_checkpoint import proposed_recipe, recipe_checkpoint, with_own_head
from pi_compile.pipeline.store import Store
from pi_compile.pipeline.summary import pack_report
from pi_compile.recipe import Recipe, default_recipe, read_recipe
from pi_compile.results import Division, QuantisedWeights
from pi_compile.workers import Worker
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.sizes import BY_NEURON, WHOLE
from pi_runtime.console import Progress
from pi_runtime.errors import UsageError, install

if TYPE_CHECKING:
    from pi_compile.corpus import Streams


@dataclass(frozen=True)
class PackRecord:
    """The record of one artifact beside the stored results: the key of its inputs, and the report on it."""

    store: Store
    key: str

    @property
    def path(self) -> Path:
        return self.store.folder / f"packed-{self.key[:16]}.json"

    @property
    def report(self) -> dict[str, Any] | None:
        """The report; None where the record cannot be read or is another's, so that it is packed again."""
        try:
            record = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None
        return dict(record["report"]) if isinstance(record, dict) and record.get("key") == self.key else None

    def up_to_date(self, output: Path) -> dict[str, Any] | None:
        """The report, if the file is still what was packed; else the record is forgotten."""
        found = self.report
        if found is None:
            return None
        if output.exists() and file_digest(output) == found["sha256"]:
            self.store.clear("pack", self.key)  # a kill after writing left it
            return found
        self.path.unlink(missing_ok=True)
        return None

    def write(self, report: dict[str, Any]) -> None:
        """Keep the report."""
        write_text(self.path, json.dumps({"key": self.key, "report": report}))

    def made_by(self, write: Callable[[], None], worker: Worker) -> dict[str, Any]:
        """The report, once this worker or another one has packed."""
        self.store.share("pack", self.key, lambda work: work.run({"artifact": write}), lambda: self.report is not None)
        if not worker.strangers():
            self.forget_older()
        assert self.report is not None
        return self.report

    def forget_older(self) -> None:
        """Remove the records of what the recipe was packed to before."""
        for older in self.store.folder.glob("packed*.json"):
            if older != self.path:
                older.unlink(missing_ok=True)


@dataclass(frozen=True)
class PlainPacking:
    """An artifact of a recipe without profile and predictors, which is quick to make."""

    checkpoint: Checkpoint
    recipe: Recipe
    folder: Path
    """What the recipe's paths begin at."""
    progress: Callable[..., AbstractContextManager[Progress]]
    notice: Callable[[str], None]

    def write(self, output: Path) -> dict[str, Any]:
        """Write the artifact, and report on it."""
        recipe, checkpoint = self.recipe, self.checkpoint
        spec = PackSpec(formats=recipe.pack.model_dump())
        if recipe.bits.tokens:
            divided = self._divided(checkpoint)
            spec, checkpoint = PackSpec(formats=divided.formats), replace(checkpoint, importance=divided.importance)
        quantised = self._quantised(checkpoint, spec.formats) if recipe.quantise.tokens else None
        loss = self._rounding_loss(checkpoint, spec, quantised)
        with self.progress("packing") as bar:
            result = pack(checkpoint, spec, output, recipe=recipe.model_dump(), quantised=quantised, progress=bar)
        for line in (*checkpoint.notices, *result.notices):
            self.notice(line)
        return pack_report(result) | loss

    # Below is what alone needs torch.

    def _divided(self, checkpoint: Checkpoint) -> Division:
        """How the recipe's budget of bits is divided."""
        from pi_compile.pipeline.division import divide  # noqa: PLC0415

        tokens = self._corpus(self.recipe.bits.tokens).fit
        with self.progress("dividing the bits", "steps") as bar:
            return divide(checkpoint, tokens, **divide_settings(self.recipe), progress=bar)

    def _quantised(self, checkpoint: Checkpoint, formats: Mapping[str, str]) -> QuantisedWeights:
        """Matrices that are rounded on text."""
        from pi_compile.pipeline.stages import quantise  # noqa: PLC0415

        settings = self.recipe.profile.model_dump(include={"window", "batch", "threads"})
        tokens = self._corpus(self.recipe.quantise.tokens).fit
        with self.progress("quantising", "steps") as bar:
            return quantise(checkpoint, tokens, formats=formats, **settings, notice=self.notice, progress=bar)

    def _rounding_loss(
        self, checkpoint: Checkpoint, spec: PackSpec, quantised: QuantisedWeights | None
    ) -> dict[str, Any]:
        """What rounding costs. The extra `pack` alone does without, where no part goes below 8 bits."""
        parts = rounded_parts(checkpoint, part_formats(checkpoint, spec))
        if not parts:
            self.notice(ALL_KEPT)
        if not parts or self.recipe.quality.rounding_increase == 0:
            return {}
        names = sorted({name for names in parts.values() for name in names})
        if find_spec("torch") is None and all(FORMATS[name].bits >= 8 for name in names):
            lacks = f"for that needs torch: {install('compile')}"
            self.notice(f"what rounding to {', '.join(names)} costs is not measured, {lacks}")
            return {}
        from pi_compile.pipeline.rounding_check import RoundingCheck  # noqa: PLC0415

        check = RoundingCheck(checkpoint, self.recipe, spec.formats, self.notice, self.progress)
        return check.report(lambda: self._corpus().report, quantised)

    def _corpus(self, fit_tokens: int = 0) -> "Streams":
        from pi_compile.pipeline import stages  # noqa: PLC0415

        window = self.recipe.profile.window
        amounts = {"fit_tokens": max(fit_tokens, window), "tune_tokens": max(64, window)}
        settings = self.recipe.corpus.model_dump() | amounts
        return stages.read_corpus(self.checkpoint, **settings, window=window, folder=self.folder, notice=self.notice)


def _in_layout(checkpoint: Checkpoint, layout: str | None) -> Checkpoint:
    """The checkpoint in a layout (see `sizes.LAYOUTS`), or in the one that fits it best where none is named.

    FFNs of a model that is not sparse are stored as whole matrices, of which nothing can be skipped. With experts they
    are where that keeps blocks of `down` that lie across its neurons.
    """
    d = checkpoint.decoder
    whole = checkpoint.keeps_whole if d.n_experts > 1 else not d.sparse
    return checkpoint.in_layout(layout or (WHOLE if whole else BY_NEURON))


def pack_plain(recipe_path: Path, output: Path, *, layout: str | None = None, **shown: Any) -> dict[str, Any]:
    """Write the artifact of a recipe so; `shown` are `progress` and `notice`."""
    recipe, folder = read_recipe(recipe_path), recipe_path.resolve().parent
    checkpoint = _in_layout(recipe_checkpoint(recipe, folder), layout)
    return PlainPacking(checkpoint, recipe, folder, **shown).write(output)


def pack_model(model: str, output: Path, *, layout: str | None = None, **shown: Any) -> dict[str, Any]:
    """The same of a model without a recipe, with what `init` proposes. The artifact names it as it is called.

    Raises UsageError where its name is no text.
    """
    full = str(Path(model).absolute())
    text = os.fsencode(full).decode("utf-8", "replace")
    if text != full:
        raise UsageError(f"{text}: its name is no UTF-8, which manifests and tokenizers need", remedy="rename it")
    checkpoint = _in_layout(open_checkpoint(model), layout)  # which formats keep its values depends on the layout
    name = checkpoint.location.name if checkpoint.revision is None else model
    recipe = proposed_recipe(checkpoint, name, default_recipe, lambda _: None)  # no recipe to change is there
    return PlainPacking(with_own_head(checkpoint, recipe), recipe, checkpoint.folder, **shown).write(output)


def divide_settings(recipe: Recipe) -> dict[str, Any]:
    """Keywords of `divide` that a recipe has."""
    return {
        **recipe.bits.model_dump(exclude={"tokens"}),
        **recipe.profile.model_dump(include={"window", "threads"}),
        "formats": recipe.pack.model_dump(),
    }
