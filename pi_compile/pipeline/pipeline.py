"""A recipe's stages in their order, each made once: corpus → profile → train → place → pack.

The one place where stages and store meet. The key of a stage is a digest of everything it reads: checkpoint and text,
its section of the recipe, the results before it, and its own code. So a change runs exactly what depends on it again.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.tokenizer_files import TOKENIZER, read_text_files
from pi_compile.corpus import Streams, read_streams, source_files
from pi_compile.cost_model import Workload
from pi_compile.errors import ProfileError, RecipeError
from pi_compile.files import write_text
from pi_compile.machine import find_machine
from pi_compile.packing import PackSpec, pack, part_formats
from pi_compile.pipeline.recipe_placement import Solving, place_section
from pi_compile.pipeline.stage_specs import corpus_spec, profile_spec, train_spec
from pi_compile.pipeline.store import Store, code_digest, file_digest, key_of, token_digest
from pi_compile.pipeline.summary import pack_report
from pi_compile.placement import Placement
from pi_compile.profiling import estimate, profile
from pi_compile.recipe import Recipe, read_recipe
from pi_compile.results import ActivationProfile, PredictorSet
from pi_compile.torch_model import Estimate
from pi_compile.training import Texts, train_predictors, training_work
from pi_runtime.artifact.schema import Plan
from pi_runtime.console import Progress, size

Result = TypeVar("Result")
Dated = TypeVar("Dated", ActivationProfile, PredictorSet)

STORE = ".pi-build"
"""Folder beside the recipe that holds every recipe's intermediate results."""


@dataclass
class Pipeline:
    """The stages of one recipe. `ran` names those that had to run."""

    recipe_path: Path
    device: str
    notice: Callable[[str], None]
    progress: Callable[..., AbstractContextManager[Progress]]
    ran: list[str] = field(default_factory=list)

    @cached_property
    def recipe(self) -> Recipe:
        return read_recipe(self.recipe_path)

    @property
    def folder(self) -> Path:
        return self.recipe_path.resolve().parent

    @cached_property
    def store(self) -> Store:
        return Store(self.folder / STORE / self.recipe_path.stem)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        checkpoint = recipe_checkpoint(self.recipe, self.folder)
        for line in checkpoint.notices:
            self.notice(line)
        return checkpoint

    @cached_property
    def checkpoint_formats(self) -> dict[str, str]:
        """Number format of each part before training, which may choose that of predictors."""
        return part_formats(self.checkpoint, PackSpec(formats=self.recipe.pack.model_dump()))

    @property
    def formats(self) -> dict[str, str]:
        """Number format of each part after training."""
        return {**self.checkpoint_formats, "predictor": self.trained.predictor_format}

    @cached_property
    def streams(self) -> Streams:
        """Token streams of the corpus."""
        spec = corpus_spec(self.recipe)
        files = source_files([*spec.text, *spec.report], self.folder)
        text = read_text_files(self.checkpoint.location, self.checkpoint.decoder.vocab_size)
        window = min(self.recipe.profile.window, self.checkpoint.decoder.context_length)
        key = key_of(
            spec=asdict(spec),
            window=window,
            files=[(f.name, file_digest(f)) for f in files],
            # `python` is the documentation of the Python that runs.
            python=sys.version_info[:3],
            tokenizer=hashlib.sha256(text.files[TOKENIZER]).hexdigest(),
            code=code_digest("pi_compile.corpus.streams"),
        )
        tokenizer = tokenizers.Tokenizer.from_buffer(text.files[TOKENIZER])
        tokenizer.no_truncation()
        return self._stage(
            "corpus",
            key,
            lambda _scratch: read_streams(spec, self.folder, tokenizer, window),
            lambda streams, path: streams.save(path),
            Streams.load,
        )

    @cached_property
    def profile(self) -> ActivationProfile:
        """Counts and order of the neurons."""
        spec = profile_spec(self.recipe, self.device)
        fit = self.streams.fit
        key = key_of(
            checkpoint=self.checkpoint.digest(),
            text=token_digest(fit),
            spec=asdict(spec),
            code=code_digest("pi_compile.profiling"),
        )

        def make(scratch: Path) -> ActivationProfile:
            self.checkpoint.check_values()
            e = estimate(self.checkpoint.decoder, len(fit), spec)
            self.notice(_announced("profiling", len(fit), e))
            with self.progress("profiling", "shards") as progress:
                return profile(self.checkpoint, fit, spec, scratch=scratch, inputs=key, progress=progress)

        return self._stage(
            "profile",
            key,
            make,
            lambda p, path: p.save(path),
            lambda path: _fresh(ActivationProfile.load(path), key, path),
        )

    @cached_property
    def trained(self) -> PredictorSet:
        """Predictors and the rung of each layer."""
        machine = find_machine(self.recipe.place.machine, self.folder)
        spec = train_spec(self.recipe, self.checkpoint_formats, machine, self.device)
        streams = self.streams
        texts = Texts(fit=streams.fit[: self.recipe.train.tokens], tune=streams.tune, report=streams.report)
        key = key_of(
            profile=self.profile.digest(),
            checkpoint=self.checkpoint.digest(),
            texts=[token_digest(t) for t in (texts.fit, texts.tune, texts.report)],
            spec=asdict(spec),
            code=code_digest("pi_compile.training.stage"),
        )

        def make(scratch: Path) -> PredictorSet:
            e = training_work(self.checkpoint, self.profile, texts, spec).estimate(self.device)
            self.notice(_announced("training", len(texts.fit), e))
            with self.progress("training", "steps") as progress:
                return train_predictors(
                    self.checkpoint, self.profile, texts, spec, scratch=scratch, inputs=key, progress=progress
                )

        return self._stage(
            "train", key, make, lambda t, path: t.save(path), lambda path: _fresh(PredictorSet.load(path), key, path)
        )

    @property
    def refined(self) -> ActivationProfile:
        """The profile with the rungs that training chose, and counts above their thresholds."""
        return self.trained.refine(self.profile)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Placements for all GPU budgets. They are not stored: solving takes seconds and reads no model."""
        return self.place(Solving())

    def place(self, how: Solving) -> tuple[Placement, ...]:
        """Placements for all GPU budgets by a solver."""
        section = self.recipe.place
        work = Workload.of(self.refined, self.formats, section.context)
        return place_section(work, find_machine(section.machine, self.folder), section, how)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The placements as an artifact stores them."""
        return tuple(placement.plan for placement in self.placements)

    def pack(self, output: Path) -> dict[str, Any]:
        """Write the artifact, unless the file is already what would be written; a report of it."""
        recipe = self.recipe.model_dump()
        key = key_of(
            checkpoint=self.checkpoint.digest(),
            profile=self.profile.digest(),
            trained=self.trained.digest(),
            plans=[asdict(p) for p in self.plans],
            recipe=recipe,
            output=str(output.resolve()),
            code=code_digest("pi_compile.packing"),
        )
        record = self.store.folder / "packed.json"
        known = _record(record)
        if known.get("key") == key and output.exists() and file_digest(output) == known["report"]["sha256"]:
            return dict(known["report"])
        with self.progress("packing") as progress:
            result = pack(
                self.checkpoint,
                PackSpec(formats=self.formats),
                output,
                recipe=recipe,
                profile=self.refined,
                predictor_set=self.trained,
                plans=self.plans,
                progress=progress,
            )
        for line in result.notices:
            self.notice(line)
        report = pack_report(result)
        write_text(record, json.dumps({"key": key, "report": report}))
        self.ran.append("pack")
        return report

    def _stage(
        self,
        name: str,
        key: str,
        make: Callable[[Path], Result],
        save: Callable[[Result, Path], None],
        load: Callable[[Path], Result],
    ) -> Result:
        result, made = self.store.result(name, key, make=make, save=save, load=load)
        if made:
            self.ran.append(name)
        return result


def recipe_checkpoint(recipe: Recipe, folder: Path) -> Checkpoint:
    """The checkpoint a recipe names; `folder` is the recipe's own."""
    section = recipe.model
    # A recipe pins a hub model by its revision; a folder has none.
    model = section.path if section.revision else folder / Path(section.path).expanduser()
    if not section.revision and not Path(model).exists():
        raise RecipeError(
            f"[model] path = {section.path!r}: no such folder or file",
            expected="a folder or a GGUF file, from the recipe's own on; or a hub name with its revision",
            found=f"no {model}",
            remedy="correct the path; for a hub name `pi-compile init` finds the revision",
        )
    return open_checkpoint(model, section.revision or None, section.ignore_config, in_recipe=True)


def pack_plain(recipe_path: Path, output: Path, *, progress: Progress, notice: Callable[[str], None]) -> dict[str, Any]:
    """Write an artifact without profile and predictors, which is exact and quick to make; a report of it."""
    recipe = read_recipe(recipe_path)
    checkpoint = recipe_checkpoint(recipe, recipe_path.resolve().parent)
    spec = PackSpec(formats=recipe.pack.model_dump())
    result = pack(checkpoint, spec, output, recipe=recipe.model_dump(), progress=progress)
    for line in (*checkpoint.notices, *result.notices):
        notice(line)
    return pack_report(result)


def _record(path: Path) -> dict[str, Any]:
    """The record of what was packed last; empty where it cannot be read, so that it is packed again."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _fresh(result: Dated, key: str, path: Path) -> Dated:
    """A stored result, refused if its recorded inputs differ from the current ones (somebody may have copied it)."""
    if result.inputs != key:
        raise ProfileError(
            f"{path}: stale, or of another model",
            expected=f"made from inputs {key[:16]}…",
            found=f"{result.inputs[:16]}…",
            remedy="delete it, and it is made again",
        )
    return result


def _announced(what: str, tokens: int, e: Estimate) -> str:
    memory, disk = size(e.memory_bytes), size(e.disk_bytes)
    return f"{what} on {tokens:,} tokens: about {e.seconds:,.0f} s, {memory} of memory, {disk} of disk"
