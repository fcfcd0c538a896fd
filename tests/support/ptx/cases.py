"""One launch of each kernel, in each format it has, with its result by definition and the least bytes it must move."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.cuda.kernels import attention, dequantise, ffn_neurons, moe, residual, row_dot
from pi_runtime.cuda.kernels.compaction import NeuronList, compact
from pi_runtime.cuda.kernels.ffn_neurons import CODES
from pi_runtime.cuda.kernels.gathered_sum import gathered_sums
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.execution.pages import PAGE_POSITIONS
from pi_runtime.execution.plan_layout import Cuts
from support.gpu_kernels import Stored, integers, normal
from support.stored import ROW_FORMATS

CPU = torch.device("cpu")
TILING = Tiling()
SMALL_DOTS = Tiling(dot_width=512, row_words=32)
"""Tiles of rows of 300 columns for rows of any length: the same compiled kernels then go through several of them."""
SMALL_SUMS = Tiling(splits=2, word_rows=16, sum_words=32)
"""The same for sums, each split of several steps."""
ROWS, LISTED = 200, 150
GARBAGE = -7
"""What results hold before; it stays where a kernel writes nothing."""


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
    least: int = 0
    """0: bytes are not counted."""
    exact: tuple[tuple[torch.Tensor, np.ndarray], ...] = ()
    """Further results, and what they must be."""

    def check(self) -> None:
        found = self.found.float().numpy()
        if found.ndim > self.wanted.ndim:  # parts of a sum
            found = found.sum(1)
        assert found.shape == self.wanted.shape
        np.testing.assert_array_equal(np.isnan(found), np.isnan(self.wanted))
        distance, most = np.nan_to_num(np.abs(found - self.wanted)), np.nanmax(np.abs(self.wanted))
        assert np.all(distance <= self.error * (1 + most)), (self.kernel, self.format, distance.max())
        for tensor, wanted in self.exact:
            np.testing.assert_array_equal(tensor.numpy(), wanted, f"{self.kernel} {self.format}")


def put(a: np.ndarray) -> torch.Tensor:
    """A copy in torch's memory, which starts at a multiple of 64 bytes."""
    return torch.from_numpy(np.ascontiguousarray(a)).clone()


def room(tokens: int, numbers: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A result for each token, which holds garbage; a token's is not right behind the one before it."""
    return torch.full((tokens, numbers + 9), GARBAGE, dtype=dtype)[:, :numbers]


def padded(rows: Sequence[np.ndarray], count: int) -> np.ndarray:
    """[M, count] numbers, and behind them what was there before."""
    return np.stack([np.pad(r, (0, count - len(r)), constant_values=GARBAGE) for r in rows])


def counts_of(fires: Sequence[np.ndarray], tile: int, count: int) -> np.ndarray:
    """[M, count] how many of each tile fire; behind the tiles of `count` numbers what was there before."""
    starts = range(0, count, tile)
    return padded([np.array([f[n : n + tile].sum() for n in starts], np.int32) for f in fires], count)


def _size(*tensors: torch.Tensor | np.ndarray) -> int:
    return sum(int(t.nbytes) for t in tensors)


def _row_bytes(m: Stored) -> int:
    """What a row holds, without padding."""
    f, blocks = FORMATS[m.matrix.format], -(-m.matrix.columns // 32)
    scales = 0 if m.matrix.scales is None else blocks * (4 if f.offset else 2)
    values = f.row_nbytes(m.matrix.columns) if f.bits in (5, 6) else m.matrix.width * m.matrix.values.itemsize
    return values + scales


def of_rows(
    fmt: str, columns: int, tokens: int = 1, dots: Tiling = SMALL_DOTS, sums: Tiling = SMALL_SUMS
) -> Iterator[Case]:
    """Kernels that read rows; bytes are counted of one token."""
    rng = np.random.default_rng(columns)
    m, rest = Stored(CPU, fmt, normal(rng, ROWS, columns)), Stored(CPU, fmt, normal(rng, 2 * ROWS, columns))
    name, row, alone = f"{fmt} × {columns}", _row_bytes(m), tokens == 1
    x, bias, y = normal(rng, tokens, columns), normal(rng, ROWS), normal(rng, tokens, ROWS)
    x_MD, bias_N, y_MN = put(x), put(bias), room(tokens, ROWS)
    y_MN.copy_(torch.from_numpy(y))
    yield Case(
        "_linear", name, lambda: row_dot.linear(m.matrix, bias_N, x_MD, y_MN, dots, add=True), y_MN,
        y + x @ m.values.T + bias, 2e-5, alone * (ROWS * row + _size(x, bias, y, y)),
    )  # fmt: skip
    # No tile ends where the lists do, and what is behind them is no row.
    picked = [np.sort(rng.permutation(ROWS)[: LISTED - 40 * n]).astype(np.int32) for n in range(tokens)]
    index, lengths = np.full((tokens, ROWS), 1 << 24, np.int32), [len(p) for p in picked]
    for index_F, p in zip(index, picked, strict=True):
        index_F[: len(p)] = p
    listed, tile = NeuronList.of(put(index), integers(CPU, lengths)), dots.dots(m.matrix)[0]
    marks, counts = room(tokens, ROWS), room(tokens, ROWS, torch.int32)
    score = [(m.values @ x_D + bias)[p] for x_D, p in zip(x, picked, strict=True)]
    yield Case(
        "_predict", name, lambda: ffn_neurons.predict(m.matrix, bias_N, x_MD, marks, counts, dots, listed),
        marks, padded([(s > 0).astype(np.float32) for s in score], ROWS), 0,
        alone * (LISTED * (row + 12) + _size(x) + -(-ROWS // tile) * 4),
        ((counts, counts_of([s > 0 for s in score], tile, ROWS)),),
    )  # fmt: skip
    h = [np.maximum(s, 0) * (rest.values[2 * p] @ x_D) for s, p, x_D in zip(score, picked, x, strict=True)]
    fires, h_MF, fired = int((h[0] != 0).sum()), room(tokens, ROWS), room(tokens, ROWS, torch.int32)
    neurons = ffn_neurons.Neurons(m.matrix, bias_N, rest.matrix, None, CODES["relu"])
    yield Case(
        "_neuron_activations", name,
        lambda: ffn_neurons.neuron_activations(neurons, x_MD, listed, h_MF, fired, dots),
        h_MF, padded(h, ROWS), 2e-5,
        alone * (LISTED * (row + 12) + fires * row + _size(x) + -(-ROWS // tile) * 4),
        ((fired, counts_of([h_F != 0 for h_F in h], tile, ROWS)),),
    )  # fmt: skip
    factors, sums_MSD = normal(rng, tokens, ROWS), torch.full((tokens, sums.splits, columns), np.nan)
    factors_MN, down = put(factors), m.matrix if alone else neurons.down
    values = m.values if alone else rest.values[1::2]
    total = [f[: len(p)] @ values[p] for f, p in zip(factors, picked, strict=True)]
    yield Case(
        "_gathered_axpy_words" if m.matrix.words else "_gathered_axpy", name,
        lambda: gathered_sums(down, listed, factors_MN, sums_MSD, sums), sums_MSD,
        np.stack(total), 2e-5, alone * (LISTED * (row + 8) + _size(sums_MSD)),
    )  # fmt: skip
    rows = rng.integers(0, ROWS, 70)
    out, rows_T = torch.ones(70, columns), put(rows)
    yield Case(
        "_dequantise_words" if m.matrix.words else "_dequantise", name,
        lambda: dequantise.dequantise_rows(m.matrix, rows_T, 0, out, add=True), out, 1 + m.values[rows],
        1e-6, alone * (len(np.unique(rows)) * row + _size(rows, out, out)),
    )  # fmt: skip


def _of_attention() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    heads, groups, width, at = 4, 2, 64, 200
    pages = -(-(at + 1) // PAGE_POSITIONS)
    cache = normal(rng, pages, 2, groups, PAGE_POSITIONS, width).astype(np.float16)
    qkv = normal(rng, 1, (heads + 2 * groups) * width)
    cache_N, qkv_TQ, table = put(cache), put(qkv), torch.arange(pages)[None]
    places = attention.Places.of(torch.tensor([at]), table)
    cos, sin = normal(rng, at + 1, width // 2), normal(rng, at + 1, width // 2)
    cos_SJ, sin_SJ = put(cos), put(sin)
    q, k, v = np.split(qkv.reshape(-1, width), [heads, heads + groups])
    page, place = divmod(at, PAGE_POSITIONS)
    yield Case(
        "_store_kv", "f16", lambda: attention.store_kv(qkv_TQ, places, cos_SJ, sin_SJ, cache_N),
        cache_N[page, :, :, place], np.stack([rotated(k, cos[at], sin[at]), v]), 1e-3,
        _size(qkv, q, cos[at], sin[at]) + 4 * groups * width + 16,
    )  # fmt: skip
    read_N, q_TQ = put(cache), put(qkv)
    partials = attention.AttentionPartials(*(torch.zeros(1, heads, 8, *e) for e in ((width,), (), ())))
    out = torch.zeros(1, heads * width)
    keys, values = cache.transpose(1, 2, 0, 3, 4).reshape(2, groups, -1, width)[:, :, : at + 1].astype(np.float32)
    wanted = [softmax(keys[n // 2] @ q[n] / 8) @ values[n // 2] for n in range(heads)]
    cached = 2 * groups * (at + 1) * width * 2 + pages * 8
    yield Case(
        "_attend", "f16", lambda: attention.attend(q_TQ, places, read_N, partials, out), out,
        np.concatenate(wanted)[None], 2e-5, cached + 8 + _size(q, out) + 2 * _size(*partials),
    )  # fmt: skip
    block, block_out = normal(rng, 40, (heads + 2 * groups) * width), torch.zeros(40, heads * width)
    block_TQ, start = put(block), attention.Places.of(torch.tensor([at - 39]), table)
    q_THE = block.reshape(40, -1, width)[:, :heads]
    seen = [
        (keys[n // 2, : at - 38 + t], values[n // 2, : at - 38 + t], q_THE[t, n])
        for t in range(40)
        for n in range(heads)
    ]
    wanted = [softmax(k_SE @ q_E / 8) @ v_SE for k_SE, v_SE, q_E in seen]
    yield Case(
        "_attend_block", "f16", lambda: attention.attend_block(block_TQ, start, read_N, block_out), block_out,
        np.stack(wanted).reshape(40, -1), 2e-5, cached + 8 + _size(q_THE, block_out),
    )  # fmt: skip


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, 1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    found: np.ndarray = p / p.sum()
    return found


def _of_lists() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    numbers, tile = 1500, 4
    marks = np.where(rng.random((1, numbers)) < 0.4, normal(rng, 1, numbers), 0).astype(np.float32)
    counts = (marks.reshape(-1, tile) != 0).sum(1, dtype=np.int32)[None]
    found = NeuronList.of(torch.zeros(1, numbers, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    marks_MN, counts_MT, kept = put(marks), put(counts), torch.zeros(1, numbers)
    where = np.flatnonzero(marks[0])
    yield Case(
        "_compact", "", lambda: compact(marks_MN, counts_MT, tile, found, kept), found.index_MF,
        np.pad(where, (0, numbers - len(where)))[None], 0, _size(marks, counts) + len(where) * 8 + 4,
    )  # fmt: skip


def _of_residual() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for width in (100, 4096):
        x, w, b, y = normal(rng, 3, width), normal(rng, width), normal(rng, width), torch.zeros(3, width)
        tensors = [put(a) for a in (x, w, b)]
        wanted = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 0.3) * w + b
        launch = partial(residual.norm, *tensors, 0.3, y)
        yield Case("_norm", f"× {width}", launch, y, wanted, 2e-5, _size(x, w, b, y))
    x, sums, other = normal(rng, 2, 1024), normal(rng, 2, 32, 1024), normal(rng, 2, 1024)
    x_TD, sums_TSD, other_TD = (put(a) for a in (x, sums, other))
    merge = partial(residual.merge, x_TD, sums_TSD, other_TD)
    yield Case("_merge", "", merge, x_TD, x + sums.sum(1) + other, 2e-5, _size(x, x, sums, other))


def _of_experts() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    experts, count, width = 8, 2, 700
    router = normal(rng, 1, experts)
    routing = moe.Routing(torch.zeros(1, count, dtype=torch.int32), torch.zeros(1, count))
    taken, router_MX = np.argsort(-router[0])[:count], put(router)
    yield Case(
        "_route", "", lambda: moe.route(router_MX, routing), routing.route_weight_MK, softmax(router[:, taken]), 1e-6,
        _size(router) + 8 * count,
    )  # fmt: skip
    cuts = Cuts.of([300] * experts, width, count)
    device_cuts = moe.DeviceCuts.of(cuts, width, torch.zeros(2, experts, dtype=torch.int32))
    fixed = moe.Routing(put(taken[None].astype(np.int32)), torch.tensor([[0.75, 0.25]]))
    hot = NeuronList.of(torch.zeros(1, cuts.hot, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    rows = np.concatenate([300 * e + np.arange(300) for e in taken])
    yield Case(
        "_list_expert_neurons", "",
        lambda: moe.list_expert_neurons(fixed, device_cuts, hot, None, cold=False), hot.index_MF, rows[None], 0,
        4 * count * 3 + 4 * len(rows) + 4,
    )  # fmt: skip
    listed = NeuronList.of(put(rows[None].astype(np.int32)), integers(CPU, [len(rows)]))
    h = normal(rng, 1, len(rows))
    h_MF = put(h)
    yield Case(
        "_apply_route_weights", "", lambda: moe.apply_route_weights(listed, h_MF, fixed, device_cuts), h_MF,
        h * np.repeat([0.75, 0.25], 300), 1e-6, _size(h, h) + 4 * len(rows) + 4 + 4 * count * 4,
    )  # fmt: skip


ODD, EVEN = 300, 1024
"""Columns of a matrix: no multiple of 16, nor whole groups of blocks; and both."""
GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    **{f"{fmt} × {ODD}": partial(of_rows, fmt, ODD) for fmt in ROW_FORMATS},
    **{f"{fmt} × {EVEN}": partial(of_rows, fmt, EVEN, 1, TILING, TILING) for fmt in ROW_FORMATS},
    "attention": _of_attention,
    "lists": _of_lists,
    "residual": _of_residual,
    "experts": _of_experts,
}


def cases(group: Callable[[], Iterator[Case]]) -> Iterator[Case]:
    """A group's cases, of the kernel that PI_TEST_KERNEL names where it names one."""
    chosen = os.environ.get("PI_TEST_KERNEL")
    return (c for c in group() if chosen in (None, c.kernel, SECOND.get(c.kernel)))


SECOND = {
    "_attend": "_combine",
    "_gathered_axpy_words": "_gathered_axpy",
    "_dequantise_words": "_dequantise",
}
"""The second kernel of a case."""


def case(group: str, kernel: str) -> Case:
    """One of them."""
    return next(c for c in GROUPS[group]() if c.kernel == kernel)
