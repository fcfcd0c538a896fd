"""The gathered sum: rows at scattered indices, each times its factor, for one token:  y ← y + Σ_k h_k row(i_k).

f32, f16 and bf16 rows are added four at a time in float32. Rows of block formats are summed in integers, up to
`GROUP_ROWS` at a time: with s_k,b the scale of row k's block b,

    c_k,b = h_k s_k,b      g_b = max_k |c_k,b| / 32767      n_k,b = round(c_k,b / g_b)
    y_j += g_b Σ_k n_k,b q_k,j                              j in block b, two rows a multiplication

So no weight is converted by itself. The rounding to 16 bits is off by at most half of 1 / 32767 of the largest term.

Shape letters: K rows, P padded columns, B blocks, J columns of one block, L lanes.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.footprint import GROUP_ROWS
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import (
    BF16,
    F16,
    Floats,
    Ints,
    MatrixView,
    address_of,
    half_to_float,
    is_quantised,
    pointer_of,
)
from pi_runtime.kernels.data.quantised_input import padded_columns
from pi_runtime.kernels.data.row_loading import GROUP_COLUMNS, load_row, load_single_block
from pi_runtime.kernels.ops.gathered_sum_blocks import sum_groups
from pi_runtime.kernels.ops.row_dot import prefetch

FLOAT_ROWS = 8
"""Rows of float formats that are added together; also how many rows ahead `up` is prefetched."""
_HAS_VECTORS = ISA.lanes > 0
_TINY = np.float32(2.0**-126)


@device
def rows_at_once(fmt: int) -> int:
    """Rows that `add_gathered` adds together; callers pass so many at once."""
    return GROUP_ROWS if is_quantised(fmt) else FLOAT_ROWS


@public
def add_gathered(m: MatrixView, index_K: Ints, h_K: Floats, prefetch_K: Ints, y_P: Floats, workspace: int) -> None:
    """y ← y + Σ h_k row(index_k); meanwhile the rows `prefetch_K` are fetched into the second-level cache.

    y has room for `padded_columns(columns)`; `workspace` is the address of `footprint.gather_floats` numbers.
    """
    count = index_K.shape[0]
    if not _HAS_VECTORS:
        row_P = carray(pointer_of(workspace), (m.columns,), np.float32)
        for k in range(count):
            load_row(m, index_K[k], 0, row_P)
            for j in range(m.columns):
                y_P[j] += h_K[k] * row_P[j]
    elif is_quantised(m.fmt):
        for start in range(0, count, GROUP_ROWS):
            last = min(count, start + GROUP_ROWS)
            later = index_K[last : last + GROUP_ROWS] if last < count else prefetch_K
            _add_group(m, index_K[start:last], h_K[start:last], later, y_P, workspace)
    else:
        for k in range(0, count, 4):
            _add_four(m, index_K[k : k + 4], h_K[k : k + 4], index_K[k + 4 :] if k + 4 < count else prefetch_K, y_P)


@device
def _add_four(m: MatrixView, index_K: Ints, h_K: Floats, prefetch_K: Ints, y_P: Floats) -> None:
    """Add up to four rows of a float format; a missing one is the last again, times zero."""
    count, y = index_K.shape[0], address_of(y_P)
    r0, r1 = m.values + index_K[0] * m.stride, m.values + index_K[min(1, count - 1)] * m.stride
    r2, r3 = m.values + index_K[min(2, count - 1)] * m.stride, m.values + index_K[min(3, count - 1)] * m.stride
    h1, h2 = h_K[1] if count > 1 else np.float32(0), h_K[2] if count > 2 else np.float32(0)
    h3, last = h_K[3] if count > 3 else np.float32(0), prefetch_K.shape[0] - 1
    n0, n1, n2, n3 = r0, r0, r0, r0
    if last >= 0:
        n0, n1 = m.values + prefetch_K[0] * m.stride, m.values + prefetch_K[min(1, last)] * m.stride
        n2, n3 = m.values + prefetch_K[min(2, last)] * m.stride, m.values + prefetch_K[min(3, last)] * m.stride
    if m.fmt == F16:
        _four_f16(r0, r1, r2, r3, h_K[0], h1, h2, h3, n0, n1, n2, n3, m.columns, y)
    elif m.fmt == BF16:
        _four_bf16(r0, r1, r2, r3, h_K[0], h1, h2, h3, n0, n1, n2, n3, m.columns, y)
    else:
        _four_f32(r0, r1, r2, r3, h_K[0], h1, h2, h3, n0, n1, n2, n3, m.columns, y)


def _four(fmt: str, stored_per_line: int) -> Any:
    @intrinsic
    def add(
        typing_context: Any, r0: Any, r1: Any, r2: Any, r3: Any, h0: Any, h1: Any, h2: Any, h3: Any,
        n0: Any, n1: Any, n2: Any, n3: Any, columns: Any, y: Any,
    ) -> Any:  # fmt: skip
        """y += Σ h_k r_k, padding of the rows included; the rows n_k are prefetched."""

        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            lanes = ISA.lanes
            rows = [v.pointer(b, a) for a in arguments[:4]]
            h = [v.splat(b, a, lanes) for a in arguments[4:8]]
            later = [v.pointer(b, a) for a in arguments[8:12]]
            columns, y = arguments[12], v.pointer(b, arguments[13])
            lines = b.udiv(b.add(columns, v.offset(stored_per_line - 1)), v.offset(stored_per_line))
            with cgutils.for_range(b, lines) as loop:
                for row in later:
                    v.prefetch(b, row, b.mul(loop.index, v.offset(v.LINE)))
                for part in range(0, stored_per_line, lanes):
                    column = b.add(b.mul(loop.index, v.offset(stored_per_line)), v.offset(part))
                    at = b.mul(column, v.offset(4))
                    total = v.load(b, y, at, v.vec(v.F32, lanes))
                    for row, h_L in zip(rows, h, strict=True):
                        total = v.fma(b, v.floats_of(b, fmt, row, column, lanes), h_L, total)
                    v.store(b, total, y, at)
            return context.get_dummy_value()

        kinds = [types.intp] * 4 + [types.float32] * 4 + [types.intp] * 6
        return types.void(*kinds), generate

    return add


_four_f32, _four_f16, _four_bf16 = _four("f32", 16), _four("f16", 32), _four("bf16", 32)


class _GroupWorkspace(NamedTuple):
    """Addresses in the workspace for a group of rows with B = `blocks` blocks each."""

    blocks: int
    c_KB: int
    n_PB: int
    g_B: int
    inverse_B: int
    sum_B: int
    rows_K: int
    prefetch_K: int


@device
def _group_workspace(columns: int, workspace: int) -> _GroupWorkspace:
    blocks = padded_columns(columns) // BLOCK
    n = workspace + 4 * GROUP_ROWS * blocks
    g = n + 2 * GROUP_ROWS * blocks
    rows = g + 12 * blocks
    return _GroupWorkspace(blocks, workspace, n, g, g + 4 * blocks, g + 8 * blocks, rows, rows + 8 * (GROUP_ROWS + 1))


@device
def _add_group(m: MatrixView, index_K: Ints, h_K: Floats, prefetch_K: Ints, y_P: Floats, workspace: int) -> None:
    """Add up to `GROUP_ROWS` rows of a block format."""
    a, count = _group_workspace(m.columns, workspace), index_K.shape[0]
    _quantise_factors(m, index_K, h_K, a)
    _write_addresses(m, index_K, prefetch_K, a)
    groups, pairs, y = (m.columns + BLOCK - 1) // GROUP_COLUMNS, (count + 1) // 2, address_of(y_P)
    sum_groups(m.fmt, a.rows_K, pairs, a.n_PB, a.g_B, a.sum_B, a.blocks, groups, y, a.prefetch_K)
    # Blocks outside the groups, at most seven a row, are added in float32; c is no longer needed.
    out_J = carray(pointer_of(a.c_KB), (BLOCK,), np.float32)
    for block in range(8 * groups, (m.columns + BLOCK - 1) // BLOCK):
        y_J = y_P[block * BLOCK : (block + 1) * BLOCK]
        for k in range(count):
            scale = carray(pointer_of(m.scales + index_K[k] * m.scales_stride + 2 * block), (1,), np.uint16)[0]
            load_single_block(m.fmt, m.values + index_K[k] * m.stride, block, half_to_float(scale), out_J)
            for j in range(BLOCK):
                y_J[j] += h_K[k] * out_J[j]


@device
def _quantise_factors(m: MatrixView, index_K: Ints, h_K: Floats, a: _GroupWorkspace) -> None:
    """Compute c, g, n and −8 Σ n of a group."""
    count, blocks = index_K.shape[0], a.blocks
    c_KB = carray(pointer_of(a.c_KB), (GROUP_ROWS, blocks), np.float32)
    n_PB = carray(pointer_of(a.n_PB), (GROUP_ROWS // 2, blocks), np.int32)
    g_B, inverse_B = (
        carray(pointer_of(a.g_B), (blocks,), np.float32),
        carray(pointer_of(a.inverse_B), (blocks,), np.float32),
    )
    sum_B = carray(pointer_of(a.sum_B), (blocks,), np.int32)
    g_B[:] = np.float32(0)
    sum_B[:] = np.int32(0)
    wrong = np.float32(0)
    for k in range(count):
        wrong += np.float32(0) * h_K[k]  # NaN where h is infinite or NaN, which integers cannot express
        s_B = carray(pointer_of(m.scales + index_K[k] * m.scales_stride), (blocks,), np.uint16)
        for block in range(blocks):
            c_KB[k, block] = h_K[k] * half_to_float(s_B[block])
            g_B[block] = max(g_B[block], abs(c_KB[k, block]))
    for block in range(blocks):
        g = g_B[block] / np.float32(32767)
        g_B[block] = (g if g >= _TINY else np.float32(0)) + wrong
        inverse_B[block] = np.float32(1) / g if g >= _TINY else np.float32(0)
    if count % 2:
        c_KB[count, :] = np.float32(0)
    for pair in range((count + 1) // 2):
        for block in range(blocks):
            one = np.int32(np.rint(c_KB[2 * pair, block] * inverse_B[block]))
            other = np.int32(np.rint(c_KB[2 * pair + 1, block] * inverse_B[block]))
            n_PB[pair, block] = (other << np.int32(16)) | (one & np.int32(0xFFFF))
            sum_B[block] -= np.int32(8) * (one + other)


@device
def _write_addresses(m: MatrixView, index_K: Ints, prefetch_K: Ints, a: _GroupWorkspace) -> None:
    """Write the addresses of the rows, and of those to prefetch; a last row without a partner is paired with itself,
    times zero."""
    count, later = index_K.shape[0], prefetch_K.shape[0]
    rows_K = carray(pointer_of(a.rows_K), (GROUP_ROWS + 1,), np.int64)
    fetch_K = carray(pointer_of(a.prefetch_K), (GROUP_ROWS + 1,), np.int64)
    for k in range(count + count % 2):
        row = index_K[min(k, count - 1)]
        next_row = prefetch_K[min(k, later - 1)] if later > 0 else row
        rows_K[k], fetch_K[k] = m.values + row * m.stride, m.values + next_row * m.stride
        prefetch(m.scales + next_row * m.scales_stride, m.scales_stride)
