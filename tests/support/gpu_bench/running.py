"""Times decoding and prompts of one placement, and how much of the work of GPU and CPU overlaps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.decode.schedule import Call
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.plan_choice import allocation
from support.gpu_bench.model import MemoryArtifact
from support.steps import step


@dataclass(frozen=True)
class Measurement:
    """Figures of one placement."""

    decode: float
    """Tokens a second."""
    prefill: float
    overlap: float | None
    """Time during which GPU and CPU are both busy ÷ the longer one's time; None where no layer is split."""
    handover: float | None
    """Seconds for each split layer, beside the work of GPU and CPU."""
    gpu: float
    """Seconds a token of the GPU's work, alone."""
    cpu: float
    """Seconds a token of the CPU's work, alone."""
    active_on_gpu: float
    """Fraction of the kept neurons that the GPU has."""
    logits: np.ndarray


def measure(
    artifact: MemoryArtifact, mode: str, plan: Plan, device: Device, budget: int, threads: int, prompt: int, tokens: int
) -> Measurement:
    """Open an executor, decode `tokens` tokens after a prompt, and time its parts."""
    d = artifact.manifest.decoder
    taken = allocation(artifact.manifest, plan, plan.context, budget)
    executor = CudaExecutor(artifact, mode, threads, taken, device)  # type: ignore[arg-type]
    try:
        ids = token_ids(d.vocab_size)
        prefill = _prefill(executor, ids[:prompt])
        cache = executor.new_cache()
        read = compared(prompt)
        for start in range(0, read, 16):
            step(executor, ids[start : min(start + 16, read)], cache, select=False)
        logits = [step(executor, [token], cache, select=True).logits_TV[0] for token in ids[read : read + 4]]
        began = time.perf_counter()
        for token in ids[read + 4 : read + 4 + tokens]:
            last = step(executor, [token], cache, select=True)
        decode = tokens / (time.perf_counter() - began)
        assert last.rows_L2 is not None
        kept, on_device = (
            int(last.rows_L2[:, 1].sum()),
            int((executor._device_rows_ML2[0] + executor._implied_L2)[:, 1].sum()),
        )
        overlap, handover, gpu, cpu = _parts(executor)
        return Measurement(decode, prefill, overlap, handover, gpu, cpu, on_device / max(kept, 1), np.stack(logits))
    finally:
        executor.close()


def token_ids(vocabulary: int) -> np.ndarray:
    """Token ids that every placement reads."""
    return np.random.default_rng(0).integers(0, vocabulary, 1024)


def compared(prompt: int) -> int:
    """Tokens that every placement reads first, whose next four have logits that are compared; fewer in a short run."""
    return min(32, prompt)


def _prefill(executor: CudaExecutor, ids: np.ndarray) -> float:
    """Tokens a second of the second of two readings; of the first, where that is slow."""
    taken = 0.0
    for _ in range(2):
        if taken > 2:
            break
        cache, began = executor.new_cache(), time.perf_counter()
        for start in range(0, len(ids), executor.block_tokens):
            step(executor, ids[start : start + executor.block_tokens], cache, select=False)
        taken = time.perf_counter() - began
    return len(ids) / taken


def _parts(executor: CudaExecutor) -> tuple[float | None, float | None, float, float]:
    """(Overlap, handover of a split layer, the GPU's work, the CPU's), from a token's calls that run in parts.

    Lists and inputs stay as the last token left them, so the parts compute stale numbers but as many as before.
    """
    calls, device = executor.calls, executor.device
    cold = [call for call in calls if call.kind == "cold"]
    # Between the two is the wait for the handover, or the record of the sum.
    pairs = [(calls[n - 2], call) for n, call in enumerate(calls) if call.kind == "cold" and calls[n - 2].kind == "gpu"]
    hot, beside = [first for first, _ in pairs], [second for _, second in pairs]
    with device.stream():
        gpu_s = _seconds(device, [call for call in calls if call.kind == "gpu"])
        cpu_s = _seconds(device, [call for call in calls if call.kind in ("cold", "cpu")])
        if not cold:
            return None, None, gpu_s, cpu_s
        waiting_s = _seconds(device, [call for call in calls if call.kind not in ("cold", "cpu")])
        handover = max(0.0, waiting_s - gpu_s) / len(cold)
        if not pairs:
            return None, handover, gpu_s, cpu_s
        hot_s, beside_s = _seconds(device, hot), _seconds(device, beside)
        both_s = _seconds(device, [call for pair in pairs for call in pair])
    overlap = (hot_s + beside_s - both_s) / max(hot_s, beside_s)
    return max(0.0, min(1.0, overlap)), handover, gpu_s, cpu_s


def _seconds(device: Device, calls: Sequence[Call], repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats if device.device.type == "cuda" else 1):
        device.synchronize()
        began = time.perf_counter()
        for call in calls:
            call.run()
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return best if calls else 0.0
