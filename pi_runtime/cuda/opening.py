"""Opens an artifact on a GPU: the budget, the plan that fits it, and the executor."""

import contextlib
import traceback
from collections.abc import Callable

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Plan
from pi_runtime.console import size
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.memory.devices import Cuda, Device
from pi_runtime.cuda.plan_layout import needed_bytes
from pi_runtime.errors import DoesNotFitError
from pi_runtime.execution.plan_choice import no_placement
from pi_runtime.kernels.codegen.threads import SPIN_BESIDE_GPU, start_threads


def open_on_gpu(
    artifact: Artifact,
    mode: str,
    context: int,
    threads: int,
    *,
    index: int,
    vram_budget: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> CudaExecutor:
    """Make an executor on GPU `index` within the budget, or within what the card has free if that is less.

    Raises DoesNotFitError if no stored plan fits.
    """
    start_threads(SPIN_BESIDE_GPU)
    device: Device = Cuda(index)
    free = device.free_bytes()
    budget = free if vram_budget is None else min(vram_budget, free)
    plan = fitting_plan(artifact, context, budget, free)
    try:
        executor = CudaExecutor(artifact, mode, context, threads, plan, device, budget, progress)
    except BaseException as error:
        _clear_frames(error)
        with contextlib.suppress(RuntimeError):
            device.limit(None)
        raise
    if vram_budget is not None and free < vram_budget:
        executor.notice = f"{device.name} has {size(free)} free, less than --vram-budget {size(vram_budget)}"
    return executor


def _clear_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: a model's tensors, whose GPU memory others may want."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def fitting_plan(artifact: Artifact, context: int, budget: int, free: int) -> Plan:
    """The stored plan that uses most of the budget with a cache of this context.

    Raises DoesNotFitError, which says what the smallest plan needs.
    """
    plans = artifact.manifest.plans
    if not plans:
        raise no_placement(str(artifact.path))
    needs = {n: needed_bytes(artifact.manifest, plan, context, 1) for n, plan in enumerate(plans)}
    fitting = [n for n, nbytes in needs.items() if nbytes <= budget]
    if not fitting:
        least = min(needs.values())
        raise DoesNotFitError(
            f"{artifact.path}: no stored placement fits the GPU",
            expected=f"at least {least} bytes with a context of {context}",
            found=f"{budget} bytes" + (f", the card has {free} free for it" if free <= budget else ""),
            remedy="--device cpu, a smaller --ctx-size, or "
            + (f"--vram-budget {least}" if least <= free else "add the budget to [place] vram_gib and build again"),
        )
    return plans[max(fitting, key=lambda n: (needs[n], plans[n].vram_bytes))]
