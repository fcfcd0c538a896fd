"""The stages as functions with plain arguments: what `pi_compile` hands out, and what a recipe runs.

Arguments are named like the keys of a recipe (`docs/reference/recipe.md`) and have the defaults of `pi-compile init`,
so the same settings give the same bytes either way. A stage reads nothing but its arguments. Examples go on from each
other: `docs/examples/python_api.py` has them in one piece.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from pi_compile import packing, training
from pi_compile.calibration import profiling, quantising
from pi_compile.calibration.profiling import ProfileSpec
from pi_compile.calibration.quantising import QuantiseSpec
from pi_compile.checkpoint import Checkpoint
from pi_compile.checkpoint.eagle3 import PublishedHead
from pi_compile.checkpoint.part_formats import AUTO, KEEP, PREDICTOR_FORMATS
from pi_compile.checkpoint.tokenizer_files import TOKENIZER
from pi_compile.corpus import CorpusSpec, Streams, read_streams
from pi_compile.cost_model import CPU, Workload, processors_of
from pi_compile.machine import Machine, find_machine, to_units
from pi_compile.packing import PackResult, PackSpec, part_formats, specs_of
from pi_compile.pipeline.recipe_placement import place_budgets
from pi_compile.placement import SECONDS, Placement
from pi_compile.recipe import check_settings
from pi_compile.results import ActivationProfile, PredictorSet, QuantisedWeights
from pi_compile.training import Texts, TrainSpec
from pi_compile.workers import WorkFolder, work_folder
from pi_runtime.artifact.layout import place_arrays
from pi_runtime.artifact.rows import PROCESS_NBYTES
from pi_runtime.artifact.sizes import PARTS, WHOLE
from pi_runtime.console import Progress

KEPT: Mapping[str, str] = {}
"""Every part in the checkpoint's own number format."""


def read_corpus(
    checkpoint: Checkpoint,
    text: Sequence[str | Path],
    *,
    report: Sequence[str | Path] = (),
    field: str = "text",
    fit_tokens: int = 1_000_000,
    tune_tokens: int = 16_384,
    report_tokens: int = 16_384,
    window: int = 512,
    folder: Path | None = None,
    notice: Callable[[str], None] = lambda _line: None,
) -> Streams:
    """Read text as three disjoint streams of token ids, by the checkpoint's own tokenizer.

    `text` has files, folders or patterns (text, JSON, JSON lines, Parquet), relative to `folder` or to the working
    folder; `python`, the documentation of the Python that runs; or `hub:OWNER/NAME@REVISION`. `field` is the column
    with the text where data has columns. Passages are shuffled, always in the same way.

    Returns int32 arrays `fit` (to count and train on), `tune` and `report`, each of at most as many tokens as asked
    for and at least one `window`. Without `report` texts, that stream is a stretch of `text` used for nothing else.
    What is held out is so by content: the same words are in one stream alone, though they stand in `text` twice or in
    `report` too. Of more text than is wanted a sample is read. `notice` gets lines that say what is read and left out.

    Raises CorpusError for text that is missing, unreadable, too short, or both in `text` and in `report`.

    >>> corpus = read_corpus(checkpoint, ["docs/**/*.md"], fit_tokens=2048, tune_tokens=512, report_tokens=512)
    >>> corpus.fit.shape, corpus.report.shape
    ((2048,), (512,))
    """
    amounts = {"fit_tokens": fit_tokens, "tune_tokens": tune_tokens, "report_tokens": report_tokens}
    check_settings(corpus=amounts, profile={"window": window})
    spec = CorpusSpec(text=tuple(map(str, text)), report=tuple(map(str, report)), field=field, **amounts)
    tokenizer = tokenizers.Tokenizer.from_buffer(checkpoint.text_files.files[TOKENIZER])
    tokenizer.no_truncation()
    return read_streams(spec, folder or Path(), tokenizer, checkpoint.decoder.within_context(window), notice)


def profile(
    checkpoint: Checkpoint,
    tokens: npt.NDArray[np.integer],
    *,
    window: int = 512,
    batch: int = 8,
    layers_at_once: int = 0,
    cofiring_tokens: int = 4096,
    threads: int = 1,
    device: str = "cpu",
    scratch: WorkFolder | Path | None = None,
    inputs: str = "",
    notice: Callable[[str], None] = lambda _line: None,
    progress: Progress = lambda _done, _total: None,
) -> ActivationProfile:
    """Count for how many tokens each neuron fires, and order the neurons by that.

    `tokens` are ids (T,); they go through the model in sequences of `window`, `batch` at a time, and a rest shorter
    than a window is left out. `layers_at_once` layers are in memory together, 0 for all; 1 profiles a model larger
    than memory. `cofiring_tokens` are sampled to see which neurons fire together. `threads` is how many a task computes
    with, whatever the number of workers: the same number gives the same bytes. `device` is cpu or cuda:N.

    `scratch` is a folder for unfinished work, from which a killed run with the same arguments goes on; by default a
    temporary one. Processes that are given the same folder and the same arguments share the work. `inputs` is recorded
    in the result. `notice` gets a line with the expected time, memory and disk; `progress` is called with (done,
    total).

    Returns counts (layers, neurons) in the checkpoint's order, and the order (layers, neurons) in which an artifact
    stores the neurons. The counts repeat on the same processor; on another the sign of a near-zero may differ.

    Raises CorpusError for fewer tokens than one window, CheckpointError for weights that are not finite.

    >>> counts = profile(checkpoint, corpus.fit)
    >>> counts.tokens, counts.counts.shape
    (2048, (4, 1024))
    """
    settings = {"window": window, "batch": batch, "cofiring_tokens": cofiring_tokens, "threads": threads}
    check_settings(profile={**settings, "layers_at_once": layers_at_once})
    shard = batch * max(1, ProfileSpec.shard // batch)
    spec = ProfileSpec(**settings, layers_at_once=layers_at_once or None, shard=shard, device=device)
    estimate = profiling.estimate(checkpoint.decoder, len(tokens), spec)
    notice(estimate.announced("profiling", len(tokens), _workers(scratch), "[corpus] fit_tokens"))
    leads = not isinstance(scratch, WorkFolder) or scratch.worker.rank.leads
    if leads and estimate.seconds > profiling.SAMPLED_FROM_S:
        notice(profiling.sampled_density(checkpoint, tokens, spec, estimate.seconds))
    with work_folder(scratch) as work:
        return profiling.profile(checkpoint, tokens, spec, work=work, inputs=inputs, progress=progress)


def train(
    checkpoint: Checkpoint,
    profile: ActivationProfile,
    corpus: Streams,
    machine: Machine | str | Path = "pc-low",
    *,
    tokens: int = 65_536,
    steps: int = 300,
    rungs: Sequence[str] = ("dense", "gate", "predicted"),
    seed: int = 0,
    perplexity_increase: float = 0.001,
    window: int = 512,
    formats: Mapping[str, str] = KEPT,
    threads: int = 1,
    device: str = "cpu",
    scratch: WorkFolder | Path | None = None,
    inputs: str = "",
    notice: Callable[[str], None] = lambda _line: None,
    progress: Progress = lambda _done, _total: None,
) -> PredictorSet:
    """Train predictors, and give each layer the rung that is quickest within one quality budget.

    Of `corpus.fit` the first `tokens` train; ranks and thresholds are found on `corpus.tune`, and what is reported is
    measured on `corpus.report`. Each candidate takes `steps` optimiser steps, 0 for the warm start alone. A layer may
    take one of `rungs`; all layers together may cost `perplexity_increase`, relative to dense. Times are those of the
    CPU of `machine`: a profile, its name in `profiles/machines`, or its path. `formats` has number formats of parts
    of the artifact, which else keep the checkpoint's; for predictors also `auto`, the quickest. The rest is as for
    `profile`.

    Returns for each layer its rung, what it reads (bytes per token) and loses, and its predictor: float32 arrays down
    (rank, width), up (neurons, rank) and bias (neurons,), neurons in the checkpoint's order.

    Raises NotMetError where the rungs allowed cannot keep the budget.

    >>> predictors = train(checkpoint, counts, corpus, "stand-in", tokens=512, steps=0)
    >>> len(predictors.rows), predictors.perplexity["increase"] <= 0.001
    (4, True)
    """
    check_settings(
        train={"tokens": tokens, "steps": steps, "rungs": list(rungs), "seed": seed},
        quality={"perplexity_increase": perplexity_increase},
        profile={"window": window, "threads": threads},
    )
    spec = train_spec(
        checkpoint, machine, steps=steps, rungs=rungs, seed=seed, perplexity_increase=perplexity_increase,
        window=window, formats=formats, threads=threads, device=device,
    )  # fmt: skip
    texts = Texts(fit=corpus.fit[:tokens], tune=corpus.tune, report=corpus.report)
    work = training.training_work(checkpoint, profile, texts, spec)
    notice(work.estimate(device).announced("training", len(texts.fit), _workers(scratch), "[train] tokens"))
    with work_folder(scratch) as folder:
        found = training.train_predictors(
            checkpoint, profile, texts, spec, work=folder, inputs=inputs, progress=progress
        )
        # Who has a folder with workers saves the result there; else the folder may be gone.
        return found if folder is scratch else found.in_memory()


def train_spec(
    checkpoint: Checkpoint, machine: Machine | str | Path, *, formats: Mapping[str, str], **settings: Any
) -> TrainSpec:
    """The spec of a training; `settings` are fields of its own."""
    resolved, of = _formats(checkpoint, formats), _machine(machine)
    matrices = checkpoint.decoder.n_experts == 1 and in_memory(checkpoint, resolved, of)
    processor = processors_of(of, matrices)[CPU]
    if processor.matrices and checkpoint.keeps_whole:
        whole, fmt = checkpoint.in_layout(WHOLE), resolved["ffn"]
        nbytes = _ffn_nbytes(checkpoint, resolved), _ffn_nbytes(whole, _formats(whole, formats))
        rate = processor.rate(fmt, "dense") * nbytes[0] // nbytes[1]  # a dense layer keeps its blocks, in fewer bytes
        processor = replace(processor, access_per_s={**processor.access_per_s, "dense": {fmt: rate}})
    return TrainSpec(
        predictor_formats=PREDICTOR_FORMATS if formats.get("predictor") == AUTO else (resolved["predictor"],),
        ffn_format=resolved["ffn"],
        processor=processor,
        **{**settings, "rungs": tuple(settings["rungs"])},
    )


def _ffn_nbytes(checkpoint: Checkpoint, formats: Mapping[str, str]) -> int:
    return sum(spec.nbytes for name, spec in specs_of(checkpoint, formats).items() if "/ffn/" in name)


def in_memory(checkpoint: Checkpoint, formats: Mapping[str, str], machine: Machine) -> bool:
    """Whether a machine has no GPU, and its RAM holds all of a model whose parts have these formats."""
    nbytes = place_arrays(specs_of(checkpoint, formats))[1] + PROCESS_NBYTES
    return machine.gpu is None and nbytes <= to_units(machine.cpu.ram_gib, 2**30)


def place(
    checkpoint: Checkpoint,
    profile: ActivationProfile,
    predictors: PredictorSet | None,
    machine: Machine | str | Path = "pc-low",
    *,
    objective: str = "time",
    context: int = 2048,
    vram_gib: Sequence[float] = (),
    ram_gib: float = 0.0,
    formats: Mapping[str, str] = KEPT,
    solver: str = "exact",
    seconds: float = SECONDS,
) -> tuple[Placement, ...]:
    """Decide which parts belong on the GPU of a machine, in RAM and on disk, for a ladder of budgets.

    Without `predictors`, rungs and ranks are by rule. `objective` is `time` (least predicted time of a token) or
    `hot-mass` (most activations on the GPU, as PowerInfer has it). The cache holds `context` positions, at most the
    model's. Solved are the budgets of 10, 25, 50, 75 and 100 % of the GPU memory that takes everything, and those of
    `vram_gib`; `ram_gib` is the budget of RAM, 0 for all that the machine has. `solver` is `exact`, `highs` (an
    independent proof, within `seconds` a budget) or `greedy` (a heuristic). `machine` and `formats` are as for `train`.

    Returns a placement for each GPU budget, by rising budget, with its predicted time and its bytes by part; none where
    the machine has no GPU. Where it has a disk and the model does not fit in memory, placements on the CPU for a ladder
    of RAM budgets come before them. The same arguments give the same placements on every machine.

    Raises DoesNotFitError where no placement keeps both budgets, NotMetError where `seconds` are too few.

    >>> placements = place(checkpoint, counts, predictors, "stand-in")
    >>> [p.plan.vram_bytes for p in placements] == sorted(p.plan.vram_bytes for p in placements)
    True
    >>> placements[-1].activations_on_gpu
    1.0
    """
    check_settings(
        place={"objective": objective, "context": context, "vram_gib": list(vram_gib), "ram_gib": float(ram_gib)}
    )
    return place_budgets(
        Workload.of(refined(profile, predictors), _formats(checkpoint, formats, predictors), context),
        _machine(machine),
        objective=objective,
        vram_gib=vram_gib,
        ram_gib=ram_gib,
        solver=solver,
        seconds=seconds,
    )


def quantise(
    checkpoint: Checkpoint,
    tokens: npt.NDArray[np.integer],
    *,
    formats: Mapping[str, str],
    window: int = 512,
    batch: int = 8,
    threads: int = 1,
    device: str = "cpu",
    scratch: WorkFolder | Path | None = None,
    inputs: str = "",
    notice: Callable[[str], None] = lambda _line: None,
    progress: Progress = lambda _done, _total: None,
) -> QuantisedWeights:
    """Round the matrices of attention and FFN that go to q4, so that the model's outputs change least (GPTQ).

    `tokens` are ids (T,) of a text; 65,536 suffice. They go through the layers one after the other, each with the
    layers before it rounded. What one weight loses is made good by those that are rounded after it. `formats` are as
    for `train`, and the rest as for `profile`.

    Returns the stored form of each matrix, for `pack`; nothing where neither attention nor FFN is in q4. The same
    settings give the same bytes on the same processor, whatever the number of workers.

    Raises CorpusError for fewer tokens than one window, CheckpointError for weights that are not finite.

    >>> rounded = quantise(checkpoint, corpus.fit, formats={"ffn": "q4"})
    >>> sorted(rounded)[:2]
    ['layers/0/ffn/first', 'layers/0/ffn/rest']
    """
    check_settings(profile={"window": window, "batch": batch, "threads": threads})
    resolved = _formats(checkpoint, formats)
    spec = QuantiseSpec(formats=resolved, window=window, batch=batch, threads=threads, device=device)
    if spec.rounds:
        needs = quantising.estimate(checkpoint.decoder, len(tokens), spec)
        notice(needs.announced("quantising", len(tokens), _workers(scratch), "[quantise] tokens"))
    else:
        notice("nothing is rounded on text: neither attention nor FFN goes to q4")
    with work_folder(scratch) as work:
        found = quantising.quantise_weights(checkpoint, tokens, spec, work=work, inputs=inputs, progress=progress)
        # Who has a folder with workers saves the result there; else the folder may be gone.
        return found if work is scratch else found.in_memory()


def pack(
    checkpoint: Checkpoint,
    output: Path | str,
    *,
    profile: ActivationProfile | None = None,
    predictors: PredictorSet | None = None,
    placements: Sequence[Placement] = (),
    quantised: QuantisedWeights | None = None,
    guess: PublishedHead | None = None,
    formats: Mapping[str, str] = KEPT,
    mixed: bool = False,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress = lambda _done, _total: None,
) -> PackResult:
    """Write the artifact of a checkpoint, which `pi_runtime.load` and `pi-run` run.

    `profile` orders the neurons, `predictors` give rungs and predictors, `placements` are stored as plans, `quantised`
    has matrices that are rounded already, `guess` is a head that drafts tokens. Each may be left out: the checkpoint
    alone gives an artifact that skips nothing but what is exactly zero, and whose weights are rounded to nearest.
    `formats` are as for `train`; predictors have the format that training chose. `mixed` stores the FFNs of dense
    layers as matrices, which is quicker, and runs on a CPU in memory alone. `recipe` is stored as it is. `progress` is
    called with the bytes done and their total.

    Returns the path, the size in bytes, the sha256 and the rounding errors of parts that are quantised. The file is
    written whole or not at all, and the same arguments give the same bytes on every machine.

    Raises CheckpointError for values that a format cannot hold, ProfileError for a profile of another model.

    >>> packed = pack(checkpoint, "demo.pi", profile=counts, predictors=predictors, placements=placements)
    >>> packed.path.stat().st_size == packed.nbytes
    True
    """
    return packing.pack(
        checkpoint,
        PackSpec(formats=_formats(checkpoint, formats, predictors), guess=guess, mixed=mixed),
        Path(output),
        recipe=recipe or {},
        profile=None if profile is None else refined(profile, predictors),
        predictor_set=predictors,
        quantised=quantised,
        plans=[p.plan for p in placements if p.assignment.uses_gpu or not p.rows],
        row_plans=[p.row_plan for p in placements if p.rows and not p.assignment.uses_gpu],
        progress=progress,
    )


def refined(profile: ActivationProfile, predictors: PredictorSet | None) -> ActivationProfile:
    """The profile with the rungs that training chose, and counts above their thresholds; without training, as it is."""
    return profile if predictors is None else predictors.refine(profile)


def _formats(
    checkpoint: Checkpoint, formats: Mapping[str, str], predictors: PredictorSet | None = None
) -> dict[str, str]:
    """Number format of each part of the artifact."""
    check_settings(pack={name: fmt for name, fmt in formats.items() if not name.startswith("layers/")})
    resolved = part_formats(checkpoint, PackSpec(formats={**dict.fromkeys(PARTS, KEEP), **formats}))
    return resolved if predictors is None else {**resolved, "predictor": predictors.predictor_format}


def _machine(machine: Machine | str | Path) -> Machine:
    return machine if isinstance(machine, Machine) else find_machine(str(machine), Path())


def _workers(scratch: WorkFolder | Path | None) -> int:
    """How many workers were started together."""
    return scratch.worker.rank.world if isinstance(scratch, WorkFolder) else 1
