"""Cases at the edges of what kernels take: several tokens, lists that end early, equal numbers, large ones, far rows.

Results hold garbage before, and what is behind a list is no row. Bytes are not counted.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from pi_runtime.cuda.kernels import attention, ffn_neurons, moe, residual, row_dot
from pi_runtime.cuda.kernels.compaction import NeuronList, compact
from pi_runtime.cuda.kernels.ffn_neurons import CODES
from pi_runtime.execution.pages import PAGE_POSITIONS
from pi_runtime.execution.plan_layout import Cuts
from pi_runtime.kernels import reference
from support.gpu_kernels import Stored, integers, normal
from support.ptx.cases import (
    CPU,
    GARBAGE,
    SMALL_DOTS,
    TILING,
    Case,
    counts_of,
    of_rows,
    padded,
    put,
    room,
    rotated,
    softmax,
)
from support.ptx.row_edges import of_far_rows, of_numbers
from support.synthetic import small_decoder

NOWHERE = 1 << 24
"""No row, no expert and no page."""
Rng = np.random.Generator


def _listed(rows: list[np.ndarray], room_: int) -> NeuronList:
    """Lists with no rows behind them."""
    index = np.full((len(rows), room_), NOWHERE, np.int32)
    for index_F, r in zip(index, rows, strict=True):
        index_F[: len(r)] = r
    return NeuronList.of(put(index), integers(CPU, [len(r) for r in rows]))


def _empty(tokens: int, room_: int) -> NeuronList:
    return NeuronList.of(room(tokens, room_, torch.int32), room(1, tokens, torch.int32)[0])


def _of_expert_products() -> Iterator[Case]:
    """Two tokens, whose experts are not in ascending order; tiles have rows of two experts."""
    rng, each, columns, d_ff = np.random.default_rng(0), 33, 70, 40
    expert = np.array([[3, 2], [0, 2]], np.int32)
    m, x, y = Stored(CPU, "f16", normal(rng, 4 * each, columns)), normal(rng, 2, columns), room(2, 2 * each)
    products = (x @ m.values.T).reshape(2, 4, each)
    wanted = np.stack([products[token, taken].ravel() for token, taken in enumerate(expert)])
    x_MD, expert_MK = put(x), put(expert)
    yield Case(
        "_linear", "experts", lambda: row_dot.linear(m.matrix, None, x_MD, y, SMALL_DOTS, expert_MK=expert_MK), y,
        wanted, 2e-5,
    )  # fmt: skip
    up, r, bias = Stored(CPU, "f16", normal(rng, 4 * d_ff, each)), normal(rng, 2, 2, each), normal(rng, 4 * d_ff)
    rows = [
        np.concatenate([e * d_ff + np.sort(rng.permutation(d_ff)[:count]) for e in es])
        for es, count in zip(expert, (11, 6), strict=True)
    ]
    scores = [
        np.array([up.values[row] @ r_KR[list(es).index(row // d_ff)] + bias[row] for row in own])
        for own, r_KR, es in zip(rows, r, expert, strict=True)
    ]
    marks, counts, listed = room(2, 30), room(2, 30, torch.int32), _listed(rows, 30)
    bias_F, r_MR = put(bias), put(r.reshape(2, -1))
    yield Case(
        "_predict", "experts",
        lambda: ffn_neurons.predict(
            up.matrix, bias_F, r_MR, marks, counts, SMALL_DOTS, listed, expert_MK=expert_MK, d_ff=d_ff
        ),
        marks, padded([(s > 0).astype(np.float32) for s in scores], 30), 0, 0,
        ((counts, counts_of([s > 0 for s in scores], SMALL_DOTS.dots(up.matrix)[0], 30)),),
    )  # fmt: skip


def _of_routing() -> Iterator[Case]:
    """Equal values, values whose exponentials no float holds, and values that are all negative."""
    values = np.array([[1, 5, 5, -2, 5, 0], [95, 200, 199, 0, 198, -300], [-3, -1, -2, -9, -8, -100]], np.float32)
    order = np.argsort(-values, axis=1, kind="stable")[:, :3]
    routing = moe.Routing(torch.full((3, 3), GARBAGE, dtype=torch.int32), torch.full((3, 3), np.nan))
    router, wanted = put(values), np.stack([softmax(v[o]) for v, o in zip(values, order, strict=True)])
    yield Case(
        "_route", "equal and large", lambda: moe.route(router, routing), routing.route_weight_MK, wanted, 1e-6, 0,
        ((routing.expert_MK, order),),
    )  # fmt: skip


def _of_expert_lists() -> Iterator[Case]:
    """Neighbouring experts in descending order, one with no neurons here, and lists longer than a block."""
    rng, width = np.random.default_rng(1), 700
    cuts = Cuts.of([600, 0, 37, 512, 5], width, 2)
    on_device = moe.DeviceCuts.of(cuts, width, torch.zeros(2, 5, dtype=torch.int32))
    taken, weights = np.array([[3, 2], [4, 0], [1, 2]], np.int32), rng.random((3, 2), np.float32)
    routing = moe.Routing(put(taken), put(weights))
    hot = [np.concatenate([cuts.base_X[e] + np.arange(cuts.cut_X[e]) for e in es]) for es in taken]
    whole = [np.concatenate([e * width + np.arange(cuts.cut_X[e]) for e in es]) for es in taken]
    cold = [np.concatenate([e * width + np.arange(cuts.cut_X[e], width) for e in es]) for es in taken]
    found, rows = _empty(3, cuts.hot), room(3, cuts.hot, torch.int32)
    yield Case(
        "_list_expert_neurons", "hot", lambda: moe.list_expert_neurons(routing, on_device, found, rows, cold=False),
        found.index_MF, padded(hot, cuts.hot), 0, 0,
        ((rows, padded(whole, cuts.hot)), (found.length_M, np.array([len(h) for h in hot]))),
    )  # fmt: skip
    few = _empty(3, 800)  # less than there are
    yield Case(
        "_list_expert_neurons", "cold", lambda: moe.list_expert_neurons(routing, on_device, few, None, cold=True),
        few.index_MF, padded([c[:800] for c in cold], 800), 0, 0,
        ((few.length_M, np.array([min(800, len(c)) for c in cold])),),
    )  # fmt: skip
    listed, h = _listed(hot, cuts.hot), normal(rng, 3, cuts.hot)
    h_MF, wanted = room(3, cuts.hot), h.copy()
    h_MF.copy_(torch.from_numpy(h))
    for wanted_F, es, ws in zip(wanted, taken, weights, strict=True):
        factors = np.repeat(ws, [cuts.cut_X[e] for e in es])
        wanted_F[: len(factors)] *= factors
    yield Case(
        "_apply_route_weights", "", lambda: moe.apply_route_weights(listed, h_MF, routing, on_device), h_MF, wanted, 0
    )


def _of_compaction() -> Iterator[Case]:
    """Lists shorter than the numbers, behind which marks are left over; a token without any."""
    rng, numbers = np.random.default_rng(2), 1100
    marks = np.where(rng.random((3, numbers)) < 0.4, normal(rng, 3, numbers), 0).astype(np.float32)
    lengths = (700, 1030, 0)
    where = [np.flatnonzero(m[:length]) for m, length in zip(marks, lengths, strict=True)]
    within = [np.sort(rng.permutation(9000)[:length]) for length in lengths]
    marks_MN, tiles = room(3, numbers), numbers // 4
    marks_MN.copy_(torch.from_numpy(marks))
    counts = room(3, tiles, torch.int32)
    for token, length in enumerate(lengths):
        own = np.where(np.arange(numbers) < length, marks[token], 0)
        counts[token] = torch.from_numpy((own.reshape(-1, 4) != 0).sum(1))
    # Kept marks are not as far apart as marks are.
    found, kept, listed = _empty(3, numbers), room(3, numbers + 20)[:, :numbers], _listed(within, numbers)
    yield Case(
        "_compact", "of a list", lambda: compact(marks_MN, counts, 4, found, kept, low=7, within=listed),
        found.index_MF, padded([own[w] for own, w in zip(within, where, strict=True)], numbers), 0, 0,
        ((kept, padded([m[w] for m, w in zip(marks, where, strict=True)], numbers)),
         (found.length_M, np.array([len(w) for w in where]))),
    )  # fmt: skip
    every, by_16 = [np.flatnonzero(m) for m in marks], room(3, 69, torch.int32)
    by_16.copy_(torch.from_numpy((np.pad(marks, ((0, 0), (0, 4))).reshape(3, -1, 16) != 0).sum(2)))
    others = _empty(3, numbers)
    yield Case(
        "_compact", "tiles of 16", lambda: compact(marks_MN, by_16, 16, others, low=7), others.index_MF,
        padded([w + 7 for w in every], numbers), 0, 0, ((others.length_M, np.array([len(w) for w in every])),),
    )  # fmt: skip


def _of_activation(name: str) -> Iterator[Case]:
    """Integers, so that sums are exact: some are just at the limit, or 0. What is no number stays none."""
    rng, columns, count = np.random.default_rng(4), 40, 50
    gated, limit = name != "relu", 2.0
    first, rest = rng.integers(-2, 3, (count, columns)), rng.integers(-2, 3, ((1 + gated) * count, columns))
    x, bias, up_bias = rng.integers(-2, 3, (2, columns)), rng.integers(-3, 4, count), rng.integers(-3, 4, count)
    m, other = (Stored(CPU, "f16", a.astype(np.float32)) for a in (first, rest))
    bias_F = bias.astype(np.float32)
    bias_F[7] = np.nan
    first_bias, second_bias = put(bias_F), put(up_bias.astype(np.float32)) if gated else None
    n = ffn_neurons.Neurons(m.matrix, first_bias, other.matrix, second_bias, CODES[name], limit)
    h = reference.activate(small_decoder(activation=name), (x @ first.T + bias_F).astype(np.float32), limit)
    assert limit != 2.0 or name == "relu2" or (np.abs(x @ first.T + bias) == limit).any()
    if gated:
        up = (x @ rest[::2].T + up_bias).astype(np.float32)
        h = np.where(h == 0, 0, h * (np.maximum(up, 0) if name == "drelu" else up))
    h_MF, counts, x_MD = room(2, count), room(2, count, torch.int32), put(x.astype(np.float32))
    yield Case(
        "_neuron_activations", name,
        lambda: ffn_neurons.neuron_activations(n, x_MD, None, h_MF, counts, SMALL_DOTS), h_MF, h, 2e-6, 0,
        ((counts, counts_of(list(h != 0), SMALL_DOTS.dots(m.matrix)[0], count)),),
    )  # fmt: skip


def _of_sums() -> Iterator[Case]:
    """A norm without a mean; and sums whose order is fixed, so that their bits are."""
    rng = np.random.default_rng(5)
    x, w, y = normal(rng, 3, 100), normal(rng, 100), torch.full((3, 100), np.nan)
    wanted = x / np.sqrt((x * x).mean(1, keepdims=True) + 0.3) * w
    yield Case("_norm", "rms", partial(residual.norm, put(x), put(w), None, 0.3, y), y, wanted, 2e-6)
    x, sums, other, bias = normal(rng, 2, 200), normal(rng, 2, 5, 200), normal(rng, 2, 200), normal(rng, 200)
    x_TD, total = put(x), np.zeros_like(x)
    for split in range(5):
        total += sums[:, split]
    merge = partial(residual.merge, x_TD, put(sums), put(other), put(bias))
    yield Case("_merge", "in order", merge, x_TD, x + total + other + bias, 0)


def _in_pages(rng: Rng, cache_M2GSE: np.ndarray, free: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches in pages in any order, among others that hold `free`; tables that name no page at their ends."""
    tokens, _, groups, positions, width = cache_M2GSE.shape
    pages = positions // PAGE_POSITIONS
    table = rng.permutation(tokens * pages + 3)[: tokens * pages].reshape(tokens, pages)
    paged = np.full((tokens * pages + 3, 2, groups, PAGE_POSITIONS, width), free, cache_M2GSE.dtype)
    paged[table] = cache_M2GSE.reshape(tokens, 2, groups, pages, PAGE_POSITIONS, width).transpose(0, 3, 1, 2, 4, 5)
    return put(paged), put(np.pad(table, ((0, 0), (0, 1)), constant_values=NOWHERE))


def _of_storing() -> Iterator[Case]:
    """Two runs of three tokens, one across two pages; a norm with a large eps; values beyond f16; unrotated columns."""
    rng, heads, groups, width, half, eps = np.random.default_rng(6), 4, 2, 80, 20, 0.5
    qkv, at = normal(rng, 6, heads + 2 * groups, width), np.array([30, 5])
    qkv[0, heads + groups :, 3], qkv[5, heads + groups :, 4] = 1e6, -1e6
    cos, sin, weights = normal(rng, 64, half), normal(rng, 64, half), normal(rng, 2, width)
    before = normal(rng, 2, 2, groups, 64, width).astype(np.float16)
    paged, table = _in_pages(rng, before, 0.0)
    qkv_TQ, put_ = put(qkv.reshape(6, -1)), [put(a) for a in (cos, sin, *weights)]
    places = attention.Places.of(torch.from_numpy(at), table)
    turned, cache = qkv.copy(), paged.numpy().copy()
    for token, x in enumerate(turned):
        run, place = token // 3, at[token // 3] + token % 3
        x[: heads + groups] /= np.sqrt((x[: heads + groups] ** 2).mean(1, keepdims=True) + eps)
        x[:heads] *= weights[0]
        x[heads : heads + groups] *= weights[1]
        x[: heads + groups, : 2 * half] = rotated(x[: heads + groups, : 2 * half], cos[place], sin[place])
        kv = np.clip(x[heads:], -65504, 65504).reshape(2, groups, width)
        cache[int(table[run, place // PAGE_POSITIONS]), :, :, place % PAGE_POSITIONS] = kv
    kv_begin = heads * width
    yield Case(
        "_store_kv", "runs",
        lambda: attention.store_kv(qkv_TQ, places, put_[0], put_[1], paged, (put_[2], put_[3]), eps),
        paged[:, 0], cache[:, 0].astype(np.float32), 1e-3, 0,
        ((paged[:, 1], cache[:, 1]), (qkv_TQ[:, kv_begin:], qkv.reshape(6, -1)[:, kv_begin:])),
    )  # fmt: skip
    queries = turned[:, :heads].reshape(6, -1)
    yield Case("_store_kv", "queries", lambda: None, qkv_TQ[:, :kv_begin], queries, 2e-6)


def _keys(rng: Rng, q_E: np.ndarray, positions: int) -> np.ndarray:
    """Keys whose scores with q grow by 12, around what no exponential of a float32 holds."""
    width = len(q_E)
    score_S = 100 + 12 * np.arange(positions) / positions
    found: np.ndarray = 0.3 * normal(rng, positions, width) + np.outer(score_S * np.sqrt(width) / (q_E @ q_E), q_E)
    return found.astype(np.float32)


def _attended(cache_2SE: np.ndarray, q_E: np.ndarray, length: int) -> np.ndarray:
    keys, values = cache_2SE[:, :length].astype(np.float64)
    return softmax(keys @ q_E.astype(np.float64) / np.sqrt(len(q_E))) @ values


def _of_long_attention() -> Iterator[Case]:
    """Parts of several steps whose largest score grows, parts of none, pages in any order, heads of 24 columns."""
    rng, heads, width, lengths = np.random.default_rng(7), 3, 24, (400, 6)
    q = normal(rng, 2, 1, width) + 0.02 * normal(rng, 2, heads, width)
    cache = normal(rng, 2, 2, 1, 416, width)
    for token in range(2):
        cache[token, 0, 0] = _keys(rng, q[token, 0], 416)
    paged, table = _in_pages(rng, cache, np.nan)
    table[1, 1:] = NOWHERE
    qkv = put(np.concatenate([q.reshape(2, -1), np.full((2, 2 * width), np.nan, np.float32)], 1))
    places = attention.Places.of(torch.tensor(lengths) - 1, table)
    partials = attention.AttentionPartials(*(torch.empty(2, heads, 3, *e) for e in ((width,), (), ())))
    out = torch.full((2, heads * width), np.nan)
    wanted = [_attended(cache[t, :, 0], q[t, h], lengths[t]) for t in range(2) for h in range(heads)]
    yield Case(
        "_attend", "growing", lambda: attention.attend(qkv, places, paged, partials, out), out,
        np.stack(wanted).reshape(2, -1), 2e-4,
    )  # fmt: skip
    tokens, start = 70, 45
    many = np.full((tokens, heads + 2, width), np.nan, np.float32)
    many[:, :heads] = q[0, 0] + 0.02 * normal(rng, tokens, heads, width)
    block, one, block_out = put(many.reshape(tokens, -1)), table[:1], torch.full((tokens, heads * width), np.nan)
    wanted = [_attended(cache[0, :, 0], many[t, h], start + t + 1) for t in range(tokens) for h in range(heads)]
    begin = attention.Places.of(torch.tensor([start]), one)
    yield Case(
        "_attend_block", "growing", lambda: attention.attend_block(block, begin, paged, block_out), block_out,
        np.stack(wanted).reshape(tokens, -1), 2e-4,
    )  # fmt: skip


EDGES: dict[str, Callable[[], Iterator[Case]]] = {
    "f16 × 750": partial(of_rows, "f16", 750, 2),
    "q8 × 660": partial(of_rows, "q8", 660, 2),
    "q8 × 250": partial(of_rows, "q8", 250, 2),
    "q4 × 660": partial(of_rows, "q4", 660, 3),
    "q4 × 750": partial(of_rows, "q4", 750, 2, TILING, TILING),  # tiles of words that a row does not fill
    "products of experts": _of_expert_products,
    "routing": _of_routing,
    "lists of experts": _of_expert_lists,
    "compaction": _of_compaction,
    **{name: partial(_of_activation, name) for name in CODES},
    "sums": _of_sums,
    "storing": _of_storing,
    "long attention": _of_long_attention,
    "numbers": of_numbers,
    "far rows": of_far_rows,
}
