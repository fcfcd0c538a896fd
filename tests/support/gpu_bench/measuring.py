"""Rates of a GPU, the CPU and their link in this run, and the model of time with them.

token  =  Σ_l [ attention + predictor + max(T_gpu, T_cpu) + handover ]  +  head
part   =  kernels · launch  +  bytes ÷ rate         rates are those of memory: what is read is larger than any cache

The model is that of `pi_compile.cost_model.token_time`.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pi_runtime.artifact.buffers import kv_bytes
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.kernels import ffn_neurons, residual, row_dot
from pi_runtime.cuda.kernels.compaction import NeuronList, compact
from pi_runtime.cuda.kernels.gathered_sum import gathered_sums
from pi_runtime.cuda.kernels.matrix import DTYPES, DeviceMatrix
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.kernels import benchmarks
from pi_runtime.kernels.benchmarks import gather_bandwidth, launch_seconds, product_bandwidth, timed_matrix
from pi_runtime.kernels.split_ffn import NeuronLists, cold_sum
from support.gpu_bench.model import Curve, row_bytes

KERNELS = {"attention": 7, "predictor": 3, "ffn": 5, "merge": 1, "head": 2}
"""Kernels that a part starts on the GPU."""
OPERATORS = {"attention": 3, "predictor": 2, "head": 1}
"""Operators that a part starts on the CPU's threads."""
PICKED = 10
"""Where rows are picked, one row in so many is read."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second for one format, and seconds."""

    format: str
    gpu: float
    """Copies within the GPU, bytes read and written."""
    gpu_stream: float
    """Our matrix–vector product."""
    gpu_picked: float
    """Picked rows of an FFN."""
    cpu_stream: float
    cpu_picked: float
    launch: float
    """A kernel in a graph that has next to nothing to do."""
    cpu_launch: float
    """An operator on the CPU's threads that has next to nothing to do."""
    cold: float
    """The cold part of a layer without cold neurons: its operators, and adding up the threads' sums."""
    handover: float
    """Copying a residual to pinned memory, waiting for it, and copying it back."""


@dataclass(frozen=True)
class Predicted:
    """Seconds of one token."""

    token: float
    gpu: float
    """The GPU's neurons."""
    cpu: float
    """The CPU's neurons."""
    gpu_bytes: float
    cpu_bytes: float
    """Read for one token."""


def rates(device: Device, fmt: str, width: int, nbytes: int, threads: int) -> Rates:
    """Measure all rates, with matrices of this many bytes and columns."""
    cpu_weights = timed_matrix(fmt, max(nbytes, 1 << 22))
    with device.stream():
        rows = max(64, nbytes // row_bytes(fmt, width))
        m = _constant(fmt, rows, width, device.device)
        x_1D, y_1N = torch.ones(1, width, device=device.device), torch.zeros(1, rows, device=device.device)
        other = torch.empty_like(m.values)
        stream = seconds(device, lambda: row_dot.linear(m, None, x_1D, y_1N, device.tiling))
        return Rates(
            format=fmt,
            gpu=2 * m.values.nbytes / seconds(device, lambda: other.copy_(m.values)),
            gpu_stream=rows * row_bytes(fmt, width) / stream,
            gpu_picked=_picked(device, m, x_1D),
            cpu_stream=product_bandwidth(cpu_weights, threads, 3),
            cpu_picked=gather_bandwidth(cpu_weights, threads, 3),
            launch=_launch(device, m, x_1D),
            cpu_launch=launch_seconds(cpu_weights, threads, 3),
            cold=cold_seconds(cpu_weights, threads),
            handover=_handover(device, width),
        )


def _constant(fmt: str, rows: int, columns: int, device: torch.device) -> DeviceMatrix:
    """A matrix of one small number."""
    shape, scales = FORMATS[fmt].stored_shape((rows, columns)), None
    if FORMATS[fmt].quantised:
        blocks = FORMATS["scale"].stored_shape((rows, -(-columns // BLOCK)))
        scales = torch.full(blocks, 0.01, dtype=torch.float16, device=device)
    value = {"f16": 0.01, "q8": 1, "q4": 0x99}[fmt]
    return DeviceMatrix(fmt, torch.full(shape, value, dtype=DTYPES[fmt], device=device), scales, columns)


def seconds(device: Device, work: Callable[[], object], repeats: int = 10) -> float:
    """Best time of one run as a captured graph, by the host's clock, ten runs at a time."""
    replay = device.capture((work,))
    best = float("inf")
    for _ in range(repeats if device.device.type == "cuda" else 1):
        device.synchronize()
        began = time.perf_counter()
        for _ in range(10 if device.device.type == "cuda" else 1):
            replay()
        device.synchronize()
        best = min(best, (time.perf_counter() - began) / (10 if device.device.type == "cuda" else 1))
    return best


def _picked(device: Device, m: DeviceMatrix, x_1D: torch.Tensor) -> float:
    """Bytes a second of one neuron in ten of a gated FFN, read as decoding reads them."""
    count = m.rows // 3
    drawn = np.sort(np.random.default_rng(0).permutation(count)[: max(1, count // PICKED)])
    taken = seconds(device, _ffn(device, m, x_1D, count, drawn))
    return 3 * len(drawn) * row_bytes(m.format, m.columns) / taken


def _launch(device: Device, m: DeviceMatrix, x_1D: torch.Tensor) -> float:
    """Seconds of a kernel: an FFN without a listed neuron, its sums merged, and a norm are five kernels."""
    count = min(m.rows // 3, 4 * m.columns)
    ffn, y_1D, ones_D = _ffn(device, m, x_1D, count, np.zeros(0, np.int64)), torch.zeros_like(x_1D), x_1D[0]

    def work() -> None:
        sums_1SD = ffn()
        residual.merge(y_1D, sums_1SD)
        residual.norm(y_1D, ones_D, None, 1e-5, y_1D)

    return seconds(device, work) / 5


def _ffn(
    device: Device, m: DeviceMatrix, x_1D: torch.Tensor, count: int, drawn: np.ndarray
) -> Callable[[], torch.Tensor]:
    """An FFN of three kernels: `first` is the first `count` rows, `rest` the next 2 · `count`, `drawn` is the list."""
    n = ffn_neurons.Neurons(m[:count], None, m[count : 3 * count], None, 0)
    index_1F = torch.zeros(1, count, dtype=torch.int32, device=device.device)
    index_1F[0, : len(drawn)] = torch.from_numpy(drawn.astype(np.int32))
    listed = NeuronList.of(index_1F, torch.tensor([len(drawn)], dtype=torch.int32, device=device.device))
    h_1F, counts_1T = (
        torch.zeros(1, count, device=device.device),
        torch.zeros(1, count, dtype=torch.int32, device=device.device),
    )
    kept = NeuronList.of(torch.zeros_like(counts_1T), torch.zeros(1, dtype=torch.int32, device=device.device))
    kept_h_1F = torch.zeros_like(h_1F)
    sums_1SD = torch.zeros(1, device.tiling.splits, m.columns, device=device.device)

    def work() -> torch.Tensor:
        tile = ffn_neurons.neuron_activations(n, x_1D, listed, h_1F, counts_1T, device.tiling)
        compact(h_1F, counts_1T, tile, kept, kept_h_1F, within=listed)
        gathered_sums(n.down, kept, kept_h_1F, sums_1SD, device.tiling)
        return sums_1SD

    work()
    assert int(kept.length_M.item()) == len(drawn), "all of these fire"
    return work


def _handover(device: Device, width: int) -> float:
    on_device, pinned = torch.zeros(width, device=device.device), device.pinned(width, torch.float32)
    down = device.capture((lambda: pinned.copy_(on_device, non_blocking=True),))
    up = device.capture((lambda: on_device.copy_(pinned, non_blocking=True),))
    event, found = device.event(), []
    for _ in range(200 if device.device.type == "cuda" else 2):
        device.synchronize()
        began = time.perf_counter()
        down()
        event.record()
        event.synchronize()
        up()
        device.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def predict(d: Decoder, plan: Plan, curve: Curve, rank: int, context: int, r: Rates, mode: str = "auto") -> Predicted:
    """One token by the model of time; the predictor, which mode `auto` uses, names just the neurons that fire."""
    row, f = row_bytes(r.format, d.d_model), np.concatenate([[0], np.cumsum(curve.frequencies(d.d_ff))])
    attention = 4 * d.d_model * row + kv_bytes(d, "f16", context)
    predictor = rank * row + d.d_ff * row_bytes(r.format, rank) if mode == "auto" else 0
    head = d.vocab_size * row
    token, gpu_bytes, cpu_bytes = OPERATORS["head"] * r.cpu_launch + head / r.cpu_stream, 0.0, float(head)
    if plan.head == "gpu":
        token, gpu_bytes, cpu_bytes = KERNELS["head"] * r.launch + head / r.gpu_stream, float(head), 0.0
    gpu_s = cpu_s = 0.0
    before = plan.embedding
    parts = ("attention", "predictor") if mode == "auto" else ("attention",)
    for side, cut in zip(plan.attention, plan.cuts, strict=True):
        on_gpu, whole = side == "gpu", attention + predictor
        hot = _rows_read(mode, cut, f[cut], on_gpu=True)
        cold = _rows_read(mode, d.d_ff - cut, f[-1] - f[cut], on_gpu=False)
        if on_gpu:
            kernels = sum(KERNELS[part] for part in (*parts, "merge"))
            token += kernels * r.launch + whole / r.gpu_stream
        else:
            token += sum(OPERATORS[part] for part in parts) * r.cpu_launch + whole / r.cpu_stream
        t_gpu = KERNELS["ffn"] * r.launch + row * (hot[0] / r.gpu_stream + hot[1] / r.gpu_picked) if cut else 0.0
        t_cpu = r.cold + row * (cold[0] / r.cpu_stream + cold[1] / r.cpu_picked) if cut < d.d_ff else 0.0
        split = cut != (d.d_ff if on_gpu else 0)
        token += max(t_gpu, t_cpu) + (r.handover if split else 0.0) + (r.handover if side != before else 0.0)
        gpu_s, cpu_s, before = gpu_s + t_gpu, cpu_s + t_cpu, side
        gpu_bytes += row * sum(hot) + (whole if on_gpu else 0)
        cpu_bytes += row * sum(cold) + (0 if on_gpu else whole)
    return Predicted(token, gpu_s, cpu_s, gpu_bytes, cpu_bytes)


def _rows_read(mode: str, neurons: int, firing: float, *, on_gpu: bool) -> tuple[float, float]:
    """Rows of a layer's side that are read one after the other, and rows that are picked.

    Dense, a GPU's neurons that do not fire have no row of `up` read.
    """
    if mode == "dense":
        return 2 * neurons + firing if on_gpu else 3 * neurons, 0.0
    return (neurons, 2 * firing) if mode == "gate" else (0.0, 3 * firing)


def cold_seconds(w: benchmarks.TimedMatrix, threads: int, repeats: int = 5) -> float:
    """Seconds that the CPU takes for its part of a layer beside a GPU when none of its neurons is named.

    These are three parallel loops, the last of which adds up the threads' sums.
    """
    layer = benchmarks._TimedFfn(w, w, rank=1, neurons=len(w) // 3)
    expert_11, weight_11, cut_1 = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32), np.zeros(1, np.int64)
    none, call = NeuronLists(np.zeros(1, np.int32), np.zeros((1, 0), np.int32)), (expert_11, weight_11, cut_1)
    f, w_1, x_1D, tally_13, sum_1D = layer._ffn, layer._w_1, layer._x_TD, layer._tally_T3, layer._sum_TD
    return benchmarks._best(lambda: cold_sum(f, w_1, x_1D, *call, True, none, tally_13, sum_1D), threads, repeats)
