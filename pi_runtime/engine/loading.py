"""Opening an artifact for running: its device, its budgets, and what computes it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numba

from pi_runtime.artifact.buffers import CACHE_FORMATS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import BY_NEURON, MIXED
from pi_runtime.engine.model import Model
from pi_runtime.engine.options import ModelOptions
from pi_runtime.errors import DeviceError, DoesNotFitError, Setting, UsageError, spelled
from pi_runtime.execution.cut import check_divisible
from pi_runtime.execution.devices import ram_budget_for, resolve_device
from pi_runtime.execution.executor import Executor
from pi_runtime.execution.host_executor import HostExecutor, in_memory
from pi_runtime.execution.plan_choice import Allocation, choose_plan

MODES = ("auto", "dense", "gate", "predicted")
DEFAULT_CONTEXT = 4096
"""Positions held unless asked otherwise, where the model allows as many."""

BY_NEURON_REMEDY = "pack it anew: pi-compile pack MODEL --layout neurons"
NO_HEAD = "the guess head drafts nothing: it runs on the CPU alone, where all weights are in memory"


def load(
    path: str | Path,
    *,
    mode: str = "auto",
    context: int | None = None,
    threads: int | None = None,
    device: str = "auto",
    vram_budget: int | None = None,
    ram_budget: int | None = None,
    kv_budget: int | None = None,
    cache_format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Open an artifact for running.

    `mode`: `dense` computes every neuron; `gate` skips `rest` where a neuron does not fire, which changes nothing;
    `auto` runs each layer on the rung that its compiler chose; `predicted` does the same, but refuses an artifact
    whose rungs all leave out nothing.
    `device`: `cpu`; `cuda:N` runs by the best stored plan that fits `vram_budget` bytes and the card's free memory;
    `stand-in` runs the same plan with the CPU in the GPU's place; `auto` is the first GPU where there is one and a plan
    fits it, else `stand-in` where a budget is given, else `cpu`. `progress` is called with (done, total) bytes while
    weights go to a GPU.
    `ram_budget`: bytes of memory that the run may take, on the CPU, or beside a GPU or what stands in for one: rows of
    FFNs that have no room are read from the file when they are needed, which changes no text. None maps the whole file
    into memory where it fits, and else takes what is free. `kv_budget`: bytes of it for keys and values, of all caches
    and engines together; None: as many as one sequence takes.
    `context`: positions to hold, prompt and answer together. `cache_format`: how keys and values are held: `f32`,
    `f16`, `q8` or `q4`; `q8` takes about half as much as `f16`, `q4` 0.39 of it, and neither is exact; `auto` is
    float32 beside attention weights in float32, else `f16`. A GPU has `auto` alone. `threads`: CPU threads; results do
    not depend on it.

    Raises ArtifactError for a file that is not an artifact of this version, UsageError for an impossible argument,
    DeviceError for a device that is not there.

    >>> with load("artifact.pi", mode="dense", device="cpu") as model:
    ...     model.mode, model.device
    ('dense', 'cpu')
    """
    options = ModelOptions(
        mode=mode,
        context=context,
        threads=threads,
        device=device,
        vram_budget=vram_budget,
        ram_budget=ram_budget,
        kv_budget=kv_budget,
        cache_format=cache_format,
    )
    return open_model(path, options, progress)


def open_model(path: str | Path, options: ModelOptions, progress: Callable[[int, int], None] | None = None) -> Model:
    """Open an artifact for running, as `load` does with these options as keywords."""
    device, threads = device_of(options), _threads(options.threads)
    if options.mode not in MODES:
        raise UsageError("unknown mode", setting=Setting("mode", options.mode), expected=", ".join(MODES))
    if options.cache_format not in (formats := ("auto", *CACHE_FORMATS)):
        held = Setting("cache_format", options.cache_format)
        raise UsageError("unknown format", setting=held, expected=", ".join(formats))
    artifact = Artifact.open(Path(path))
    try:
        context = _context(artifact.manifest, options.context)
        _check_mode(artifact, options.mode)
        notice = None
        try:
            executor = _executor(artifact, replace(options, device=device), context, threads, progress)
        except (DoesNotFitError, DeviceError) as error:
            if options.device != "auto" or options.vram_budget is not None or options.ram_budget is not None:
                raise
            notice = f"the GPU is not used: {spelled(error.what)}"
            if error.expected is not None:
                notice += f" (expected: {spelled(error.expected)}; found: {error.found})"
            executor = in_memory(artifact, options.mode, context, threads, options.cache_format)
        if artifact.manifest.guess_states and executor.guess_head is None:
            notice = "; ".join(filter(None, (notice or executor.notice, NO_HEAD)))
        return Model(artifact, options.mode, executor, notice)
    except BaseException:
        artifact.close()
        raise


def _threads(wanted: int | None) -> int:
    """The threads that a run takes. Raises UsageError for more than there are."""
    available = int(numba.config.NUMBA_NUM_THREADS)
    if wanted is not None and not 1 <= wanted <= available:
        remedy = "NUMBA_NUM_THREADS sets the most"
        raise UsageError(setting=Setting("threads", wanted), expected=f"1 to {available}", remedy=remedy)
    return wanted or available


def device_of(options: ModelOptions) -> str:
    """The device that a run takes. Raises UsageError for budgets that do not go with it."""
    wanted, within_ram, on_gpu = options.device, options.ram_budget is not None, options.vram_budget is not None
    device = "cpu" if wanted == "auto" and within_ram and not on_gpu else resolve_device(wanted)
    if wanted == "auto" and device == "cpu" and on_gpu:
        return "stand-in"
    if device == "cpu" and on_gpu:
        remedy = (Setting("device", "stand-in"), ", or leave it out")
        raise UsageError((Setting("vram_budget"), " does not go with ", Setting("device", "cpu")), remedy=remedy)
    return device


def _executor(
    artifact: Artifact,
    options: ModelOptions,
    context: int,
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> Executor:
    """What computes the model: rows by the budget of RAM, sides by the device, which is one that is there."""
    device, held, kv, budget, notice = options.device, options.cache_format, options.kv_budget, options.ram_budget, None
    layout = artifact.manifest.ffn_layout
    if layout != BY_NEURON and (device != "cpu" or (layout == MIXED and budget is not None)):
        raise DeviceError(
            f"{artifact.path}: FFNs that are whole matrices run on the CPU, and beside others in memory",
            remedy=f"for a budget of RAM {BY_NEURON_REMEDY}; for a GPU: build it for a machine with one",
        )
    if device not in ("cpu", "stand-in"):
        if held != "auto":
            raise DeviceError(
                (Setting("cache_format", held), " does not go with a GPU"),
                remedy=(Setting("device", "cpu"), ", or leave the format out"),
            )
        from pi_runtime.cuda.executor import open_on_gpu  # noqa: PLC0415  needs torch

        return open_on_gpu(
            artifact, options.mode, context, threads, index=int(device.partition(":")[2]), progress=progress,
            vram_budget=options.vram_budget, ram_budget=budget, kv_budget=kv,
        )  # fmt: skip
    taken = _placement(artifact, context, options.vram_budget) if device == "stand-in" else None
    if budget is None and taken is None and (budget := ram_budget_for(artifact.nbytes)) is not None:
        notice = "the model is larger than the free memory: neurons come from disk"
        if layout == MIXED:
            budget = None
            notice = f"the model is larger than the free memory, and slow; to run from disk {BY_NEURON_REMEDY}"
    if budget is not None:
        from pi_runtime.execution.ram_budget import rows_within  # noqa: PLC0415  few runs need it

        try:
            rows = rows_within(artifact, options.mode, context, threads, held, budget, kv, taken)
            return HostExecutor(rows, taken, notice)
        except DoesNotFitError:
            if options.ram_budget is not None:
                raise
            notice = None  # so little may be free that mapping the file is no worse
    return in_memory(artifact, options.mode, context, threads, held, taken, notice)


def _placement(artifact: Artifact, context: int, vram_budget: int | None) -> Allocation:
    """The plan that a stand-in for the GPU follows."""
    check_divisible(artifact.manifest)
    return choose_plan(artifact, context, sys.maxsize if vram_budget is None else vram_budget)


def _check_mode(artifact: Artifact, mode: str) -> None:
    if mode == "predicted" and all(RUNGS[layer.rung].exact for layer in artifact.manifest.layers):
        raise UsageError(
            (f"{artifact.path}: ", Setting("mode", "predicted"), ", but the artifact has no predictors"),
            remedy=(Setting("mode", "auto"), ", or train predictors: pi-compile train RECIPE, then pack again"),
        )


def _context(manifest: Manifest, wanted: int | None) -> int:
    longest = manifest.decoder.context_length
    if wanted is None:
        return min(longest, DEFAULT_CONTEXT)
    if not 2 <= wanted <= longest:
        raise UsageError(
            setting=Setting("context", wanted), expected=f"2 to {longest}, the context this model was made for"
        )
    return wanted
