"""Opens an artifact on a GPU: the plan that fits its budget, and the executor."""

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import replace

from pi_runtime.artifact.features import lacking_on_gpu
from pi_runtime.artifact.gpu_buffers import host_bytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Manifest
from pi_runtime.console import size
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.memory.devices import Cuda, Device
from pi_runtime.cuda.memory.pinned_staging import STAGING_NBYTES
from pi_runtime.errors import DoesNotFitError, Setting
from pi_runtime.execution.plan_choice import Allocation, choose_plan
from pi_runtime.execution.rows import MemoryRows
from pi_runtime.kernels.codegen.threads import SPIN_BESIDE_GPU, start_threads


def check_features(manifest: Manifest) -> None:
    """Raise DoesNotFitError for a model that does what the GPU tier lacks, by name."""
    lacking = lacking_on_gpu(manifest.decoder)
    if lacking:
        raise DoesNotFitError(
            "the GPU tier does not compute what this model does",
            found=", ".join(lacking),
            remedy=("run it on the CPU: ", Setting("device", "cpu"), ", without ", Setting("vram_budget")),
        )


def open_on_gpu(
    artifact: Artifact,
    mode: str,
    context: int,
    threads: int,
    *,
    index: int,
    vram_budget: int | None,
    ram_budget: int | None = None,
    kv_budget: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CudaExecutor:
    """Make an executor on GPU `index` within the budget, or within what the card has free if that is less.

    With a budget of RAM the CPU's part is kept within it, and rows come from disk (see `ram_budget`).
    Raises DoesNotFitError if no stored plan fits, or if the GPU tier lacks what the model does.
    """
    check_features(artifact.manifest)
    start_threads(SPIN_BESIDE_GPU)
    device: Device = Cuda(index)
    free = device.free_bytes()
    allocation = choose_plan(artifact, context, free if vram_budget is None else vram_budget, free)
    rows = None
    if ram_budget is not None:
        allocation = replace(allocation, streamed=0)
        rows = cold_rows(artifact, mode, threads, allocation, ram_budget, kv_budget)
    try:
        executor = CudaExecutor(artifact, mode, threads, allocation, device, progress, rows=rows)
    except BaseException as error:
        if rows is not None:
            rows.host.close()
        _clear_frames(error)
        with contextlib.suppress(RuntimeError):
            device.limit(None)
        raise
    if vram_budget is not None and free < vram_budget:
        executor.notice = f"{device.name} has {size(free)} free, less than the budget of {size(vram_budget)}"
    return executor


def cold_rows(
    artifact: Artifact, mode: str, threads: int, taken: Allocation, ram_budget: int, kv_budget: int | None
) -> MemoryRows:
    """The CPU's part of a run on a GPU within a budget of RAM, of which the GPU's buffers there are a part.

    Raises DoesNotFitError naming the smallest budget that fits.
    """
    from pi_runtime.execution.ram_budget import rows_within  # noqa: PLC0415  few runs need it

    own = host_bytes(artifact.manifest.decoder, taken.context, taken.batch_tokens, taken.block_tokens)
    beside = own + STAGING_NBYTES
    return rows_within(artifact, mode, taken.context, threads, "auto", ram_budget, kv_budget, taken, beside)


def _clear_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: a model's tensors, whose GPU memory others may want."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
