"""One launch of each kernel, in each format it has, with its result by definition and the least bytes it must move."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.cuda.kernels import attention, dequantise, ffn_neurons, moe, residual, row_dot, sign_selection
from pi_runtime.cuda.kernels.activations import CODES
from pi_runtime.cuda.kernels.compaction import NeuronList, compact
from pi_runtime.cuda.kernels.gathered_sum import gathered_sums
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.execution.pages import PAGE_POSITIONS
from pi_runtime.execution.plan_layout import Cuts
from support.gpu_kernels import Stored, integers, normal
from support.stored import WEIGHT_FORMATS, packed_signs

CPU = torch.device("cpu")
TILING = Tiling()
ROWS = 96


class Case(NamedTuple):
    """What to launch, what must come out, and the bytes that must be read and written at least."""

    kernel: str
    """Or the first of two."""
    format: str
    launch: Callable[[], object]
    found: torch.Tensor
    wanted: np.ndarray
    error: float
    """Relative to the largest number; 0: the very bits."""
    least: int

    def check(self) -> None:
        found = self.found.float().numpy()
        if found.ndim > self.wanted.ndim:  # parts of a sum
            found = found.sum(1)
        distance = np.abs(found - self.wanted)
        assert np.all(distance <= self.error * (1 + np.abs(self.wanted).max())), (
            self.kernel,
            self.format,
            distance.max(),
        )


def _put(a: np.ndarray) -> torch.Tensor:
    """A copy in torch's memory, which starts at a multiple of 64 bytes."""
    return torch.from_numpy(np.ascontiguousarray(a)).clone()


def _size(*tensors: torch.Tensor | np.ndarray) -> int:
    return sum(int(t.nbytes) for t in tensors)


def _row_bytes(m: Stored) -> int:
    """What a row holds, without padding."""
    scales = 0 if m.matrix.scales is None else -(-m.matrix.columns // 32) * 2
    return m.matrix.width * m.matrix.values.itemsize + scales


def _of_rows(fmt: str, columns: int) -> Iterator[Case]:
    rng = np.random.default_rng(columns)
    m, rest = Stored(CPU, fmt, normal(rng, ROWS, columns)), Stored(CPU, fmt, normal(rng, 2 * ROWS, columns))
    name, row = f"{fmt} × {columns}", _row_bytes(m)
    x, bias, y = normal(rng, 1, columns), normal(rng, ROWS), normal(rng, 1, ROWS)
    x_MD, bias_N, y_MN = _put(x), _put(bias), _put(y)
    yield Case(
        "_linear", name, lambda: row_dot.linear(m.matrix, bias_N, x_MD, y_MN, TILING, add=True), y_MN,
        y + x @ m.values.T + bias, 2e-5, ROWS * row + _size(x, bias, y, y),
    )  # fmt: skip
    # No tile ends where the list does, and what is behind it is no row.
    picked = np.sort(rng.permutation(ROWS)[:45]).astype(np.int32)
    index = np.pad(picked, (0, ROWS - len(picked)), constant_values=1 << 24)
    listed = NeuronList.of(_put(index)[None], integers(CPU, [len(picked)]))
    marks, counts = torch.zeros(1, ROWS), torch.zeros(1, ROWS, dtype=torch.int32)
    score = (m.values @ x[0] + bias)[picked]
    yield Case(
        "_predict", name, lambda: ffn_neurons.predict(m.matrix, bias_N, x_MD, marks, counts, TILING, listed),
        marks, np.pad(score > 0, (0, ROWS - len(picked)))[None].astype(np.float32), 0,
        len(picked) * (row + 12) + _size(x) + -(-ROWS // TILING.dots(m.matrix)[0]) * 4,
    )  # fmt: skip
    h = np.maximum(score, 0) * (rest.values[2 * picked] @ x[0])
    fires, h_MF = int((h != 0).sum()), torch.zeros(1, ROWS)
    neurons = ffn_neurons.Neurons(m.matrix, bias_N, rest.matrix, None, CODES["relu"])
    yield Case(
        "_neuron_activations", name,
        lambda: ffn_neurons.neuron_activations(neurons, x_MD, listed, h_MF, counts, TILING),
        h_MF, np.pad(h, (0, ROWS - len(picked)))[None], 2e-5,
        len(picked) * (row + 12) + fires * row + _size(x) + -(-ROWS // TILING.dots(m.matrix)[0]) * 4,
    )  # fmt: skip
    factors, sums = normal(rng, 1, ROWS), torch.zeros(1, TILING.splits, columns)
    factors_MN, total = _put(factors), factors[:, : len(picked)] @ m.values[picked]
    yield Case(
        "_gathered_axpy_words" if m.matrix.words else "_gathered_axpy", name,
        lambda: gathered_sums(m.matrix, listed, factors_MN, sums, TILING), sums,
        total, 2e-5, len(picked) * (row + 8) + _size(sums),
    )  # fmt: skip
    rows = rng.integers(0, ROWS, 40)
    out, rows_T = torch.ones(40, columns), _put(rows)
    distinct = len(np.unique(rows))
    yield Case(
        "_dequantise_words" if m.matrix.words else "_dequantise", name,
        lambda: dequantise.dequantise_rows(m.matrix, rows_T, 0, out, add=True), out, 1 + m.values[rows],
        1e-6, distinct * row + _size(rows, out, out),
    )  # fmt: skip


def _of_attention() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    heads, groups, width, at = 4, 2, 64, 200
    pages = -(-(at + 1) // PAGE_POSITIONS)
    cache = normal(rng, pages, 2, groups, PAGE_POSITIONS, width).astype(np.float16)
    qkv = normal(rng, 1, (heads + 2 * groups) * width)
    cache_N, qkv_TQ, table = _put(cache), _put(qkv), torch.arange(pages)[None]
    places = attention.Places.of(torch.tensor([at]), table)
    cos, sin = normal(rng, at + 1, width // 2), normal(rng, at + 1, width // 2)
    cos_SJ, sin_SJ = _put(cos), _put(sin)
    q, k, v = np.split(qkv.reshape(-1, width), [heads, heads + groups])
    page, place = divmod(at, PAGE_POSITIONS)
    yield Case(
        "_store_kv", "f16", lambda: attention.store_kv(qkv_TQ, places, cos_SJ, sin_SJ, cache_N),
        cache_N[page, :, :, place], np.stack([_turned(k, cos[at], sin[at]), v]), 1e-3,
        _size(qkv, q, cos[at], sin[at]) + 4 * groups * width + 16,
    )  # fmt: skip
    read_N, q_TQ = _put(cache), _put(qkv)
    partials = attention.AttentionPartials(*(torch.zeros(1, heads, 8, *e) for e in ((width,), (), ())))
    out = torch.zeros(1, heads * width)
    keys, values = cache.transpose(1, 2, 0, 3, 4).reshape(2, groups, -1, width)[:, :, : at + 1].astype(np.float32)
    wanted = [_softmax(keys[n // 2] @ q[n] / 8) @ values[n // 2] for n in range(heads)]
    cached = 2 * groups * (at + 1) * width * 2 + pages * 8
    yield Case(
        "_attend", "f16", lambda: attention.attend(q_TQ, places, read_N, partials, out), out,
        np.concatenate(wanted)[None], 2e-5, cached + 8 + _size(q, out) + 2 * _size(*partials),
    )  # fmt: skip
    block, block_out = normal(rng, 40, (heads + 2 * groups) * width), torch.zeros(40, heads * width)
    block_TQ, start = _put(block), attention.Places.of(torch.tensor([at - 39]), table)
    q_THE = block.reshape(40, -1, width)[:, :heads]
    seen = [
        (keys[n // 2, : at - 38 + t], values[n // 2, : at - 38 + t], q_THE[t, n])
        for t in range(40)
        for n in range(heads)
    ]
    wanted = [_softmax(k_SE @ q_E / 8) @ v_SE for k_SE, v_SE, q_E in seen]
    yield Case(
        "_attend_block", "f16", lambda: attention.attend_block(block_TQ, start, read_N, block_out), block_out,
        np.stack(wanted).reshape(40, -1), 2e-5, cached + 8 + _size(q_THE, block_out),
    )  # fmt: skip


def _turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, 1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)


def _softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    found: np.ndarray = p / p.sum()
    return found


def _of_lists() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    numbers, tile = 1500, 4
    marks = np.where(rng.random((1, numbers)) < 0.4, normal(rng, 1, numbers), 0).astype(np.float32)
    counts = (marks.reshape(-1, tile) != 0).sum(1, dtype=np.int32)[None]
    found = NeuronList.of(torch.zeros(1, numbers, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    marks_MN, counts_MT, kept = _put(marks), _put(counts), torch.zeros(1, numbers)
    where = np.flatnonzero(marks[0])
    yield Case(
        "_compact", "", lambda: compact(marks_MN, counts_MT, tile, found, kept), found.index_MF,
        np.pad(where, (0, numbers - len(where)))[None], 0, _size(marks, counts) + len(where) * 8 + 4,
    )  # fmt: skip
    columns, x = 1000, normal(rng, 1, 1000)
    values = normal(rng, ROWS, columns)
    signs, x_MD = _put(FORMATS["u64"].encode(packed_signs(values)).view(np.int64)), _put(x)
    marked, counted = torch.zeros(1, ROWS), torch.zeros(1, ROWS, dtype=torch.int32)
    agree = columns - 2 * ((values < 0) != (x < 0)).sum(1)
    yield Case(
        "_select_by_signs", "", lambda: sign_selection.select_by_signs(signs, columns, 3, x_MD, marked, counted),
        marked, (agree > 3)[None].astype(np.float32), 0, ROWS * -(-columns // 64) * 8 + _size(x, marked) + 8,
    )  # fmt: skip


def _of_residual() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for width in (100, 4096):
        x, w, b, y = normal(rng, 3, width), normal(rng, width), normal(rng, width), torch.zeros(3, width)
        put = [_put(a) for a in (x, w, b)]
        wanted = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * w + b
        launch = partial(residual.norm, *put, 1e-5, y)
        yield Case("_norm", f"× {width}", launch, y, wanted, 2e-5, _size(x, w, b, y))
    x, sums, other = normal(rng, 2, 1024), normal(rng, 2, 32, 1024), normal(rng, 2, 1024)
    x_TD, sums_TSD, other_TD = (_put(a) for a in (x, sums, other))
    merge = partial(residual.merge, x_TD, sums_TSD, other_TD)
    yield Case("_merge", "", merge, x_TD, x + sums.sum(1) + other, 2e-5, _size(x, x, sums, other))


def _of_experts() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    experts, count, width = 8, 2, 700
    router = normal(rng, 1, experts)
    routing = moe.Routing(torch.zeros(1, count, dtype=torch.int32), torch.zeros(1, count))
    taken, router_MX = np.argsort(-router[0])[:count], _put(router)
    yield Case(
        "_route", "", lambda: moe.route(router_MX, routing), routing.route_weight_MK, _softmax(router[:, taken]), 1e-6,
        _size(router) + 8 * count,
    )  # fmt: skip
    cuts = Cuts.of([300] * experts, width, count)
    device_cuts = moe.DeviceCuts.of(cuts, width, torch.zeros(2, experts, dtype=torch.int32))
    fixed = moe.Routing(_put(taken[None].astype(np.int32)), torch.tensor([[0.75, 0.25]]))
    hot = NeuronList.of(torch.zeros(1, cuts.hot, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    rows = np.concatenate([300 * e + np.arange(300) for e in taken])
    yield Case(
        "_list_expert_neurons", "",
        lambda: moe.list_expert_neurons(fixed, device_cuts, hot, None, cold=False), hot.index_MF, rows[None], 0,
        4 * count * 3 + 4 * len(rows) + 4,
    )  # fmt: skip
    listed = NeuronList.of(_put(rows[None].astype(np.int32)), integers(CPU, [len(rows)]))
    h = normal(rng, 1, len(rows))
    h_MF = _put(h)
    yield Case(
        "_apply_route_weights", "", lambda: moe.apply_route_weights(listed, h_MF, fixed, device_cuts), h_MF,
        h * np.repeat([0.75, 0.25], 300), 1e-6, _size(h, h) + 4 * len(rows) + 4 + 4 * count * 4,
    )  # fmt: skip


ODD, EVEN = 300, 1024
"""Columns of a matrix: no multiple of 16, nor whole groups of blocks; and both."""
GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    **{f"{fmt} × {columns}": partial(_of_rows, fmt, columns) for columns in (ODD, EVEN) for fmt in WEIGHT_FORMATS},
    "attention": _of_attention,
    "lists": _of_lists,
    "residual": _of_residual,
    "experts": _of_experts,
}


def case(group: str, kernel: str) -> Case:
    """One of them."""
    return next(c for c in GROUPS[group]() if c.kernel == kernel)
