"""Recurrences: a head's state goes from token to token, for single tokens as for pieces of prompts.

    gated_delta   S ← eᵍ S,   S ← S + k (b (v − Sᵀk))ᵀ,   y = Sᵀq / √K
    mamba2        S ← e^(−decay · t) S + k (t v)ᵀ,   y = Sᵀq + skip · v
    short_conv    y = c · the convolution of b · v                                 (see `artifact.decoder`)

One thread takes a head of a sequence through all tokens of a step, in order, so its state stays in the second-level
cache, and no token's bits depend on how a prompt was cut, on threads or on company.

A page (`buffers.state_page`) holds states after some position, and the inputs of the convolution before and behind it.
Tokens that may be taken back leave the states as they are: heads go on in a copy of their own. Those that have stayed
are computed once more by the next step, from these inputs, which moves the states on.

Shape letters: T tokens of this step, R runs of them (see `forward.Positions`), H heads, K numbers of a key, V of a
value, C channels of the convolution, G gates.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import carray, prange, types
from numba.core import cgutils

from pi_runtime.artifact.decoder import LENGTH_EPS, RECURRENCES
from pi_runtime.artifact.footprint import CHUNKS, KEPT, STATE_HEADER
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data.matrix_view import F32, Floats, Ints, address_of, integers, pointer_of, row_stride, vector
from pi_runtime.kernels.data.weight_table import SILU
from pi_runtime.kernels.ops.activations import activate
from pi_runtime.kernels.ops.attention import COUNT, FIRST, START, TABLE
from pi_runtime.kernels.ops.reductions import squares

GATED_DELTA, MAMBA2, SHORT_CONV = range(1, 1 + len(RECURRENCES))
"""Codes of recurrences (see `weight_table.CODES`)."""
STRIP = 32
"""Columns of a state that are summed at once."""
STRIP_TYPE = v.vec(v.F32, STRIP)


class States(NamedTuple):
    """A layer's heads, its weights, and where pages hold its states."""

    recurrence: int
    """Its code."""
    heads: int
    key_heads: int
    tiled: int
    """1: head h shares the h mod key_heads -th head of keys; 0: consecutive heads share one."""
    key_dim: int
    value_dim: int
    columns: int
    """Positions of the convolution."""
    gates: int
    """Numbers of a token beside the convolution's, of all heads."""
    layer: int
    """Number of the layer among those of its class."""
    kind: int
    classes: int
    conv: int
    """Addresses of weights: of the convolution, each head's decay, bias and skip, and the norm of the sums; 0 for none.
    """
    conv_bias: int
    decay: int
    decay_bias: int
    skip: int
    norm: int
    eps: np.float32
    least_step: np.float32


class Made(NamedTuple):
    """What a layer's matrices made of the tokens of a step."""

    channels_TC: Floats
    gates_TG: Floats
    z_TQ: Floats


def _sums_of_rows(b: Any, rows: Any, columns: Any, row_of: Any, weights: Any, out: Any) -> None:
    """Emit out ← Σ weight_r · row_r; `row_of(bytes before it, columns)` gives a strip of a row."""

    def strip(at: Any, left: Any) -> None:
        zeros = v.const(v.F32, STRIP, 0.0)
        total = cgutils.alloca_once_value(b, zeros)
        b.store(zeros, total)
        with cgutils.for_range(b, rows) as loop:
            four = b.mul(loop.index, v.offset(4))
            row = row_of(loop.index, b.add(b.mul(four, columns), at), at, left)
            weight = v.splat(b, v.load(b, weights, four, v.F32), STRIP)
            b.store(v.fma(b, row, weight, b.load(total)), total)
        v.store_strip(b, b.load(total), out, at, left)

    v.by_strips(b, columns, STRIP, strip)


@emits(types.none(types.intp, types.intp, types.intp, types.intp, types.intp))
def _recall(b: Any, state: Any, key: Any, rows: Any, columns: Any, out: Any) -> None:
    """Emit out ← Sᵀ k; all are addresses and sizes."""
    state, key, out = (v.pointer(b, address) for address in (state, key, out))
    _sums_of_rows(
        b, rows, columns, lambda _row, place, _at, left: v.load_strip(b, state, place, left, STRIP_TYPE), key, out
    )


@emits(types.none(types.intp, types.float32, types.intp, types.intp, types.intp, types.intp, types.intp, types.intp))
def _go_on(b: Any, state: Any, kept: Any, key: Any, change: Any, query: Any, rows: Any, columns: Any, out: Any) -> None:
    """Emit S ← kept · S + k changeᵀ, and out ← Sᵀ q."""
    state, key, change, query, out = (v.pointer(b, address) for address in (state, key, change, query, out))
    kept_S = v.splat(b, kept, STRIP)

    def moved_on(row: Any, place: Any, at: Any, left: Any) -> Any:
        weight = v.splat(b, v.load(b, key, b.mul(row, v.offset(4)), v.F32), STRIP)
        found = b.fmul(v.load_strip(b, state, place, left, STRIP_TYPE), kept_S)
        found = v.fma(b, v.load_strip(b, change, at, left, STRIP_TYPE), weight, found)
        v.store_strip(b, found, state, place, left)
        return found

    _sums_of_rows(b, rows, columns, moved_on, query, out)


@device
def _channels(s: States) -> int:
    return 2 * s.key_heads * s.key_dim + s.heads * s.value_dim


@device
def _row_floats(s: States) -> int:
    """Numbers of a position's inputs: of the convolution, and gates."""
    return _channels(s) + s.gates


@device
def _place(s: States, run_4: Ints) -> int:
    """Where a sequence's page holds a layer's states."""
    own = STATE_HEADER + (s.columns - 1 + KEPT) * _row_floats(s) + s.heads * s.key_dim * s.value_dim
    return carray(pointer_of(run_4[TABLE]), (s.classes,), np.int64)[s.kind] + 4 * own * s.layer


@device
def _inputs(s: States, made: Made, run_4: Ints, place: int, position: int) -> int:
    """Where the inputs of the convolution at a position are: in the page, or made by this step."""
    if position < run_4[START]:
        row = position - integers(place, 1)[0] + s.columns - 1
        return place + 4 * (STATE_HEADER + row * _row_floats(s))
    return address_of(made.channels_TC) + 4 * (run_4[FIRST] + position - run_4[START]) * _channels(s)


@device
def _gates(s: States, made: Made, run_4: Ints, place: int, position: int) -> int:
    """Where the gates of a position are."""
    if position < run_4[START]:
        return _inputs(s, made, run_4, place, position) + 4 * _channels(s)
    return address_of(made.gates_TG) + 4 * (run_4[FIRST] + position - run_4[START]) * s.gates


@device
def _convolve(s: States, made: Made, run_4: Ints, place: int, position: int, first: int, out_N: Floats) -> None:
    """out ← the convolution at a position, of some channels from `first` on; but for `short_conv` SiLU of it."""
    count = out_N.shape[0]
    out_N[:] = np.float32(0)
    if s.conv_bias != 0:
        out_N[:] = vector(s.conv_bias + 4 * first, count)
    for j in range(s.columns):
        x_N = vector(_inputs(s, made, run_4, place, position - s.columns + 1 + j) + 4 * first, count)
        w_N = vector(s.conv + j * row_stride(F32, _channels(s)) + 4 * first, count)
        for n in range(count):
            out_N[n] += w_N[n] * x_N[n]
    if s.recurrence != SHORT_CONV:
        activate(SILU, np.float32(0), out_N)


@device
def _unit(x_K: Floats, factor: np.float32) -> None:
    """x ← factor · x / √(Σ x² + 1e-6)."""
    scale = factor / np.sqrt(squares(x_K, np.float32(0)) + np.float32(LENGTH_EPS))
    for j in range(x_K.shape[0]):
        x_K[j] *= scale


@device
def _move(
    s: States, made: Made, run_4: Ints, place: int, head: int, position: int, state: int, scratch_X: Floats, y_V: Floats
) -> None:
    """Take a head's state over a token; y ← what it gives."""
    if s.recurrence == SHORT_CONV:
        _convolve(s, made, run_4, place, position, head * s.value_dim, y_V)
        return
    size, width, keys = s.key_dim, s.value_dim, s.key_heads * s.key_dim
    q_K, k_K = scratch_X[:size], scratch_X[size : 2 * size]
    v_V, change_V = scratch_X[2 * size : 2 * size + width], scratch_X[2 * size + width : 2 * (size + width)]
    shared = (head % s.key_heads if s.tiled != 0 else head // (s.heads // s.key_heads)) * size
    values = s.heads * width if s.recurrence == MAMBA2 else 0  # which come first there
    _convolve(s, made, run_4, place, position, shared + (values + keys if values else 0), q_K)
    _convolve(s, made, run_4, place, position, shared + (values if values else keys), k_K)
    _convolve(s, made, run_4, place, position, head * width + (0 if values else 2 * keys), v_V)
    gates_G = vector(_gates(s, made, run_4, place, position), s.gates)
    z = gates_G[s.gates - s.heads + head] + vector(s.decay_bias, s.heads)[head]
    grown = max(z, np.float32(0)) + np.log1p(np.exp(-abs(z)))
    if s.recurrence == MAMBA2:
        grown = max(grown, s.least_step)
    kept = np.exp(-vector(s.decay, s.heads)[head] * grown)
    if s.recurrence == GATED_DELTA:
        _unit(q_K, np.float32(1 / np.sqrt(size)))
        _unit(k_K, np.float32(1))
        share = np.float32(1) / (np.float32(1) + np.exp(-gates_G[head]))
        _recall(state, address_of(k_K), size, width, address_of(change_V))
        for j in range(width):
            change_V[j] = share * (v_V[j] - kept * change_V[j])
    else:
        for j in range(width):
            change_V[j] = grown * v_V[j]
    _go_on(state, kept, address_of(k_K), address_of(change_V), address_of(q_K), size, width, address_of(y_V))
    if s.skip != 0:
        for j in range(width):
            y_V[j] += vector(s.skip, s.heads)[head] * v_V[j]


@device
def _factor(s: States, y_N: Floats) -> np.float32:
    """1 / √(mean y² + eps)."""
    return np.float32(1) / np.sqrt(squares(y_N, np.float32(0)) / np.float32(y_N.shape[0]) + s.eps)


@device
def _finish(s: States, z_V: Floats, y_V: Floats) -> None:
    """y ← the sums of a head, those of the delta rule normed, times SiLU(z), which is overwritten; or times z."""
    if s.recurrence != SHORT_CONV:
        activate(SILU, np.float32(0), z_V)
    if s.recurrence == GATED_DELTA:
        scale, norm_V = _factor(s, y_V), vector(s.norm, s.value_dim)
        for j in range(s.value_dim):
            y_V[j] *= scale * norm_V[j] * z_V[j]
    else:
        for j in range(s.value_dim):
            y_V[j] *= z_V[j]


@loop_body
def _run_part(s: States, made: Made, run_R4: Ints, part: int, scratch_X: Floats, mixed_TQ: Floats) -> None:
    """One of `CHUNKS` parts of the heads of all runs."""
    tasks, floats, width = run_R4.shape[0] * s.heads, s.key_dim * s.value_dim, s.value_dim
    first_z = s.heads * width if s.recurrence == SHORT_CONV else 0  # behind the factors of the convolution's inputs
    for task in range(part * tasks // CHUNKS, (part + 1) * tasks // CHUNKS):
        run_4, head = run_R4[task // s.heads], task % s.heads
        place = _place(s, run_4)
        at, is_held = integers(place, 2)
        state = place + 4 * (STATE_HEADER + (s.columns - 1 + KEPT) * _row_floats(s) + head * floats)
        y_TV = mixed_TQ[:, head * width : (head + 1) * width]
        if s.recurrence == SHORT_CONV:
            for n in range(run_4[FIRST], run_4[FIRST] + run_4[COUNT]):
                for j in range(head * width, (head + 1) * width):
                    made.channels_TC[n, j] *= made.z_TQ[n, j]
        for position in range(at, run_4[START]):
            _move(s, made, run_4, place, head, position, state, scratch_X[floats:], y_TV[run_4[FIRST]])
        if is_held != 0:
            scratch_X[:floats] = vector(state, floats)
            state = address_of(scratch_X)
        for n in range(run_4[FIRST], run_4[FIRST] + run_4[COUNT]):
            y_V, z_V = y_TV[n], made.z_TQ[n, first_z + head * width : first_z + (head + 1) * width]
            _move(s, made, run_4, place, head, run_4[START] + n - run_4[FIRST], state, scratch_X[floats:], y_V)
            _finish(s, z_V, y_V)


@parallel(_run_part)
def _run(s: States, made: Made, run_R4: Ints, scratch_CX: Floats, mixed_TQ: Floats) -> None:
    for part in prange(CHUNKS):
        _run_part(s, made, run_R4, part, scratch_CX[part], mixed_TQ)


@loop_body
def _norm_group(s: States, task: int, mixed_TQ: Floats) -> None:
    """Norm the sums of the heads that share a query, of one token."""
    width = s.heads // s.key_heads * s.value_dim
    first = task % s.key_heads * width
    y_N, weight_N = mixed_TQ[task // s.key_heads, first : first + width], vector(s.norm + 4 * first, width)
    scale = _factor(s, y_N)
    for j in range(width):
        y_N[j] *= scale * weight_N[j]


@parallel(_norm_group)
def _norm_groups(s: States, mixed_TQ: Floats) -> None:
    for task in prange(mixed_TQ.shape[0] * s.key_heads):
        _norm_group(s, task, mixed_TQ)


@loop_body
def _keep_inputs(s: States, made: Made, run_4: Ints) -> None:
    """Keep the inputs that later tokens need, and note which position the states are of now."""
    place, channels = _place(s, run_4), _channels(s)
    is_held = integers(place, 2)[1]
    end = run_4[START] + run_4[COUNT]
    now = run_4[START] if is_held != 0 else end
    for position in range(now - s.columns + 1, end):
        row = position - now + s.columns - 1
        kept_C = vector(place + 4 * (STATE_HEADER + row * _row_floats(s)), _row_floats(s))
        kept_C[:channels] = vector(_inputs(s, made, run_4, place, position), channels)
        if position >= run_4[START]:
            kept_C[channels:] = vector(_gates(s, made, run_4, place, position), s.gates)
    integers(place, 1)[0] = now


@parallel(_keep_inputs)
def _keep(s: States, made: Made, run_R4: Ints) -> None:
    for r in prange(run_R4.shape[0]):
        _keep_inputs(s, made, run_R4[r])


@public
def mix_states(s: States, made: Made, run_R4: Ints, scratch_CX: Floats, mixed_TQ: Floats) -> None:
    """mixed ← what the states of all heads give for the tokens of a step, normed, and times SiLU(z); moves them on.

    `scratch_CX`: `footprint.attention_floats` numbers for each part of the work. z is overwritten.
    """
    _run(s, made, run_R4, scratch_CX, mixed_TQ)
    if s.recurrence == MAMBA2:
        _norm_groups(s, mixed_TQ)
    _keep(s, made, run_R4)
