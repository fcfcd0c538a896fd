"""A recipe's stages in their order, each made once: corpus → profile → train → place → pack.

The one place where stages and store meet. The key of a stage is a digest of everything it reads: checkpoint and text,
its section of the recipe, the results before it, and its own code. So a change runs exactly what depends on it again.

Every worker of a build goes through all stages. Where a stage has tasks they share them, and what one has made the
others read; a single worker takes the same way.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from pi_compile.calibration import profiling, quantising
from pi_compile.checkpoint import Checkpoint
from pi_compile.checkpoint.eagle3 import PublishedHead, read_head
from pi_compile.checkpoint.tokenizer_files import TOKENIZER
from pi_compile.corpus import Streams, source_files
from pi_compile.errors import ProfileError
from pi_compile.files import file_digest
from pi_compile.machine import Machine, find_machine
from pi_compile.packing import PackSpec, part_formats
from pi_compile.pipeline import stages
from pi_compile.pipeline.division import divide
from pi_compile.pipeline.packed import PackRecord, divide_settings
from pi_compile.pipeline.recipe_checkpoint import recipe_checkpoint
from pi_compile.pipeline.rounding_check import RoundingCheck
from pi_compile.pipeline.store import WORKERS, Store, code_digest, key_of, token_digest
from pi_compile.pipeline.summary import forecast_line, pack_report
from pi_compile.placement import SECONDS, Placement
from pi_compile.planning import profile_of_dense
from pi_compile.recipe import OWN_HEAD, Recipe, read_recipe
from pi_compile.results import ActivationProfile, Division, PredictorSet, QuantisedWeights
from pi_compile.results.predictor_set import store_folder
from pi_compile.training import TrainingWork, TrainSpec
from pi_compile.training.candidates import searches_for
from pi_compile.workers import HEARTBEAT, LONE, Rank, Worker, WorkFolder
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.rungs import DENSE
from pi_runtime.artifact.schema import Plan
from pi_runtime.artifact.sizes import WHOLE
from pi_runtime.console import Progress

Result = TypeVar("Result", Streams, ActivationProfile, PredictorSet, Division, QuantisedWeights)


@dataclass
class Pipeline:
    """The stages of one recipe, to be used `with` its `worker`. `ran` names those that had to run."""

    recipe_path: Path
    device: str
    notice: Callable[[str], None]
    progress: Callable[..., AbstractContextManager[Progress]]
    rank: Rank = LONE
    heartbeat: float = HEARTBEAT
    output: Path | None = None
    """Where the artifact goes, if one is to be made."""
    ran: list[str] = field(default_factory=list)

    @cached_property
    def recipe(self) -> Recipe:
        return read_recipe(self.recipe_path)

    @property
    def folder(self) -> Path:
        return self.recipe_path.resolve().parent

    @cached_property
    def store(self) -> Store:
        return Store(store_folder(self.recipe_path), self.worker)

    @cached_property
    def worker(self) -> Worker:
        """This process among those that work on the recipe."""
        folder = store_folder(self.recipe_path) / WORKERS
        return Worker(folder, self.rank, build=self.build, heartbeat=self.heartbeat, notice=self.notice)

    @cached_property
    def build(self) -> str:
        """Digest of everything that the key of a stage depends on: workers of one build have the same keys."""
        machine = self.folder / self.recipe.place.machine
        return key_of(
            recipe=self.recipe.model_dump(),
            checkpoint=self.checkpoint.digest(),
            text=self._text_digests,
            machine=file_digest(machine) if machine.is_file() else "",
            output=str(self.output.resolve()) if self.output else "",
            device=self._kind,
            python=sys.version_info[:3],
            code=code_digest("pi_compile.pipeline.pipeline"),
        )

    def _shown(self, title: str, unit: str, stage: Callable[..., Result], key: str) -> Callable[[WorkFolder], Result]:
        """A stage that shows its progress, and records the key of its inputs."""

        def make(work: WorkFolder) -> Result:
            with self.progress(title, unit) as bar:

                def progress(done: int, total: int) -> None:
                    bar(done, total)
                    self.worker.progress(done, total)

                return stage(scratch=work, inputs=key, notice=self.notice, progress=progress)

        return make

    def _stored(
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

    @cached_property
    def _text_digests(self) -> list[tuple[str, str]]:
        """Names and digests of the text files of the corpus."""
        files = source_files([*self.recipe.corpus.text, *self.recipe.corpus.report], self.folder)
        return [(f.name, file_digest(f)) for f in files]

    @property
    def _kind(self) -> str:
        """The kind of device. Which one of several computes changes no result."""
        return self.device.partition(":")[0]

    @cached_property
    def checkpoint(self) -> Checkpoint:
        checkpoint = recipe_checkpoint(self.recipe, self.folder)
        for line in checkpoint.notices:
            self.notice(line)
        whole = checkpoint.in_layout(WHOLE) if _is_dense(self.recipe, checkpoint.decoder) else checkpoint
        return whole if whole is checkpoint or _in_memory(self, whole, self.recipe.pack.model_dump()) else checkpoint

    @cached_property
    def streams(self) -> Streams:
        """Token streams of the corpus."""
        section, decoder = self.recipe.corpus, self.checkpoint.decoder
        text = self.checkpoint.text_files
        settings = {**section.model_dump(), "window": self.recipe.profile.window}
        key = key_of(
            settings=settings,
            files=self._text_digests,
            # `python` is the documentation of the Python that runs.
            python=sys.version_info[:3],
            context=decoder.context_length,
            tokenizer=hashlib.sha256(text.files[TOKENIZER]).hexdigest(),
            code=code_digest("pi_compile.corpus.streams"),
        )

        def make(_work: WorkFolder) -> Streams:
            return stages.read_corpus(self.checkpoint, folder=self.folder, **settings, notice=self.notice)

        return self._stored("corpus", key, Streams, make, alone=True)

    @cached_property
    def profile(self) -> ActivationProfile:
        """Counts and order of the neurons."""
        settings = self.recipe.profile.model_dump()
        fit = self.streams.fit
        key = key_of(
            checkpoint=self.checkpoint.digest(),
            text=token_digest(fit),
            settings={**settings, "device": self._kind},
            code=code_digest("pi_compile.calibration.profiling"),
        )
        counting = partial(stages.profile, self.checkpoint, fit, **settings, device=self.device)
        return self._stored("profile", key, ActivationProfile, self._shown("profiling", "shards", counting, key))

    @cached_property
    def trained(self) -> PredictorSet:
        """Predictors and the rung of each layer."""
        tokens, streams = self.recipe.train.tokens, self.streams
        key = key_of(
            profile=self.profile.digest(),
            checkpoint=self.checkpoint.digest(),
            texts=[token_digest(t) for t in (streams.fit[:tokens], streams.tune, streams.report)],
            spec=asdict(self._train_spec),
            code=code_digest("pi_compile.training.stage"),
        )
        training = partial(
            stages.train,
            self.checkpoint,
            self.profile,
            streams,
            self.allowed_machine,
            **train_settings(self.recipe),
            tokens=tokens,
            device=self.device,
        )
        return self._stored("train", key, PredictorSet, self._shown("training", "steps", training, key))

    @property
    def _train_spec(self) -> TrainSpec:
        settings = train_settings(self.recipe)
        return stages.train_spec(self.checkpoint, self.allowed_machine, **settings, device=self._kind)

    @property
    def allowed_machine(self) -> Machine:
        """The machine with the RAM that the recipe allows."""
        cpu = self.machine.cpu
        cpu = cpu.model_copy(update={"ram_gib": self.recipe.place.ram_gib or cpu.ram_gib})
        return self.machine.model_copy(update={"cpu": cpu})

    @cached_property
    def divided(self) -> Division | None:
        """How a budget of bits is divided; None where the recipe has none."""
        recipe = self.recipe
        if not recipe.bits.tokens:
            return None
        settings, tokens = divide_settings(recipe), self.streams.fit[: recipe.bits.tokens]
        digest, code = self.checkpoint.digest(), code_digest("pi_compile.pipeline.division")
        told = {**settings, "layout": self.checkpoint.layout}
        key = key_of(checkpoint=digest, text=token_digest(tokens), settings=told, code=code)

        def make(_work: WorkFolder) -> Division:
            with self.progress("dividing the bits", "steps") as bar:
                return divide(self.checkpoint, tokens, **settings, inputs=key, progress=bar)

        return self._stored("divide", key, Division, make, alone=True)

    @property
    def formats(self) -> Mapping[str, str]:
        """Number formats: of each part as the recipe says, or of each matrix where it has a budget of bits."""
        pack, divided = self.recipe.pack.model_dump(), self.divided
        return pack if divided is None else {**divided.formats, "predictor": pack["predictor"]}

    @cached_property
    def quantised(self) -> QuantisedWeights | None:
        """Matrices that are rounded on text; None where the recipe rounds to nearest."""
        amount, formats = self.recipe.quantise.tokens, self.formats
        if not amount:
            return None
        tokens = self.streams.fit[:amount]
        settings = self.recipe.profile.model_dump(include={"window", "batch", "threads"})
        key = key_of(
            checkpoint=self.checkpoint.digest(),
            text=token_digest(tokens),
            settings={**settings, "formats": formats, "layout": self.checkpoint.layout, "device": self._kind},
            code=code_digest("pi_compile.calibration.quantising.stage"),
        )
        rounding = partial(stages.quantise, self.checkpoint, tokens, **settings, formats=formats, device=self.device)
        shown = self._shown("quantising", "steps", rounding, key)
        return self._stored("quantise", key, QuantisedWeights, shown)

    @cached_property
    def guess(self) -> PublishedHead | None:
        """The published head that the recipe names; None without one, and for the checkpoint's own layer."""
        head = self.recipe.guess.head
        return None if head in ("", OWN_HEAD) else read_head(self.folder / head, self.checkpoint.decoder)

    @property
    def memory_bytes(self) -> int:
        """About the memory of one worker in the stage that takes most."""
        return worker_memory(self.recipe, self.checkpoint.decoder, self._train_spec)

    @property
    def refined(self) -> ActivationProfile:
        """The profile with what training chose."""
        return stages.refined(self.profile, self.trained)

    @property
    def machine(self) -> Machine:
        """The machine that the recipe places for."""
        return find_machine(self.recipe.place.machine, self.folder)

    @cached_property
    def only_dense(self) -> bool:
        """Whether no layer can be anything but dense, whatever profiling and training would find; says so if it is."""
        if found := _is_dense(self.recipe, self.checkpoint.decoder):
            self.notice(
                f"profile and train are left out: with {self.checkpoint.decoder.activation} no neuron is ever exactly "
                "zero, so every layer is dense"
            )
        return found

    @property
    def skips_nothing(self) -> bool:
        """Whether every layer is dense, of itself or by choice."""
        return self.only_dense or all(row.kind.dense for row in self.trained.rows)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Placements for all GPU budgets. They are not stored: solving takes seconds and reads no model."""
        return self.place()

    def place(self, solver: str = "exact", seconds: float = SECONDS) -> tuple[Placement, ...]:
        """Placements for all GPU budgets by a solver."""
        section = self.recipe.place.model_dump(exclude={"machine", "activations"})
        section |= {"formats": self.formats, "solver": solver, "seconds": seconds}
        return stages.place(
            self.checkpoint,
            profile_of_dense(self.checkpoint.decoder) if self.only_dense else self.profile,
            None if self.only_dense else self.trained,
            self.machine,
            **section,
        )

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The placements as an artifact stores them."""
        return tuple(placement.plan for placement in self.placements)

    def pack(self, output: Path) -> dict[str, Any]:
        """Write the artifact, unless the file is up to date, and report on it."""
        profile, trained = (None, None) if self.only_dense else (self.profile, self.trained)
        mixed = has_matrices(self)
        recipe, quantised, guess = self.recipe.model_dump(), self.quantised, self.guess
        record = PackRecord(self.store, _pack_key(self, output))
        if (known := record.up_to_date(output)) is not None:
            return known

        def write() -> None:
            weighed = replace(self.checkpoint, importance=self.divided.importance if self.divided else {})
            kept = mixed and self.skips_nothing and not self.checkpoint.decoder.sparse
            check = RoundingCheck(
                weighed.in_layout(WHOLE) if kept else weighed, self.recipe, self.formats, self.notice, self.progress
            )
            loss = check.report(lambda: self.streams.report, quantised)
            with self.progress("packing") as progress:
                result = stages.pack(
                    weighed,
                    output,
                    profile=profile,
                    predictors=trained,
                    quantised=quantised,
                    guess=guess,
                    placements=() if mixed else self.placements,
                    formats=self.formats,
                    mixed=mixed,
                    recipe=recipe,
                    progress=progress,
                )
            for line in result.notices:
                self.notice(line)
            record.write(pack_report(result) | loss)

        self.ran.append("pack")
        return record.made_by(write, self.worker)


def _pack_key(pipeline: Pipeline, output: Path) -> str:
    """What an artifact depends on."""
    profile, trained = (None, None) if pipeline.only_dense else (pipeline.profile, pipeline.trained)
    return key_of(
        checkpoint=pipeline.checkpoint.digest(),
        profile=profile and profile.digest(),
        trained=trained and trained.digest(),
        quantised=None if pipeline.quantised is None else pipeline.quantised.inputs,
        guess=pipeline.guess and pipeline.guess.digest,
        plans=[asdict(p) for p in pipeline.plans],
        formats=dict(pipeline.formats),
        divided=pipeline.divided and pipeline.divided.inputs,
        mixed=has_matrices(pipeline),
        recipe=pipeline.recipe.model_dump(),
        output=str(output.resolve()),
        code=code_digest("pi_compile.packing"),
    )


def _is_dense(recipe: Recipe, d: Decoder) -> bool:
    """Whether no layer can be anything but dense.

    Experts are profiled in any case: how often each one is taken decides where it is placed.
    """
    rungs = recipe.train.rungs
    return not d.sparse and d.n_experts == 1 and DENSE in rungs and not searches_for(rungs, d)


def _in_memory(pipeline: Pipeline, checkpoint: Checkpoint, formats: Mapping[str, str]) -> bool:
    """Whether the machine has no GPU, and its RAM, or what the recipe allows of it, holds all."""
    formats = part_formats(checkpoint, PackSpec(formats=formats))
    return stages.in_memory(checkpoint, formats, pipeline.allowed_machine)


def has_matrices(pipeline: Pipeline) -> bool:
    """Whether the FFNs of dense layers are stored as matrices, without plans."""
    checkpoint = pipeline.checkpoint
    dense = pipeline.only_dense or any(row.kind.dense for row in pipeline.trained.rows)
    alone = checkpoint.layout == WHOLE or (checkpoint.decoder.n_experts == 1 and pipeline.quantised is None)
    return dense and alone and _in_memory(pipeline, checkpoint, pipeline.formats)


def forecast(pipeline: Pipeline, artifact: Path) -> str:
    """What a token takes by the recipe's machine, in a line.

    Empty where that has a GPU, or too little memory, and where nothing is skipped.
    """
    if pipeline.skips_nothing or not _in_memory(pipeline, pipeline.checkpoint, pipeline.formats):
        return ""
    return forecast_line(artifact, pipeline.refined, pipeline.recipe.place.context, pipeline.machine)


def train_settings(recipe: Recipe) -> dict[str, Any]:
    """Keywords of `stages.train_spec` that a recipe has."""
    return {
        **recipe.train.model_dump(exclude={"tokens"}),
        "perplexity_increase": recipe.quality.perplexity_increase,
        "window": recipe.profile.window,
        "threads": recipe.profile.threads,
        "formats": recipe.pack.model_dump(),
    }


def worker_memory(recipe: Recipe, d: Decoder, spec: TrainSpec) -> int:
    """About the memory of one worker in the stage that takes most."""
    profile, corpus = recipe.profile, recipe.corpus
    counting = profiling.ProfileSpec(
        window=profile.window, batch=profile.batch, layers_at_once=profile.layers_at_once or None
    )
    tokens = (recipe.train.tokens, corpus.tune_tokens, corpus.report_tokens)
    rounding = quantising.QuantiseSpec(window=profile.window, batch=profile.batch, formats={})
    return max(
        profiling.memory_bytes(d, counting),
        quantising.memory_bytes(d, rounding) if recipe.quantise.tokens else 0,
        TrainingWork.of(d, spec, 0.3, *tokens).memory_bytes,
    )


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
