"""Stored rows as float32, and where the integers of a row of blocks lie (see `artifact.formats`).

Shape letters: D columns, B blocks, J columns of one block or vector, Q groups of four bytes.
"""

from functools import partial
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    MatrixView,
    address_of,
    half_to_float,
    is_quantised,
    pointer_of,
    values_of_row,
)
from pi_runtime.kernels.data.weight_formats import (
    BLOCK_FORMATS,
    GROUP_COLUMNS,
    BlockFormat,
    beside_block,
    block_weight,
    float_weight,
    integer_weight,
)

_HAS_VECTORS = ISA.lanes > 0


@public
def stored_index(column: int, blocks: int) -> int:
    """Index of a column among the stored integers of a row of `blocks` blocks (see `artifact.formats`)."""
    if column // GROUP_COLUMNS >= blocks // 8:
        return column
    inside = column % GROUP_COLUMNS
    return column - inside + inside % 32 // 4 * 32 + inside // 32 * 4 + inside % 4


@public
def load_row(m: MatrixView, row: int, first: int, out_D: Floats) -> None:
    """out ← the columns of one row from `first` on, as float32; `first` is a multiple of 256."""
    values = values_of_row(m, row)
    if is_quantised(m.fmt):
        _load_blocks(m, values, row, first // BLOCK, out_D)
    else:
        for j in range(out_D.shape[0]):
            out_D[j] = float_weight(m.fmt, values, first + j)


@device
def scale_of(m: MatrixView, row: int, block: int) -> np.float32:
    """The scale of a block."""
    return half_to_float(carray(pointer_of(m.scales + row * m.scales_stride + 2 * block), (1,), np.uint16)[0])


@device
def offset_of(m: MatrixView, row: int, block: int) -> np.float32:
    """The minimum or the zero of a block; 0 where it has none."""
    if m.offsets == 0:
        return np.float32(0)
    at = m.scales + row * m.scales_stride + m.offsets + 2 * block
    return half_to_float(carray(pointer_of(at), (1,), np.uint16)[0])


@device
def _load_blocks(m: MatrixView, values: int, row: int, start: int, out_D: Floats) -> None:
    """Load blocks from block `start` on, which begins a group."""
    n, blocks, done = out_D.shape[0], (m.columns + BLOCK - 1) // BLOCK, 0
    scales = m.scales + row * m.scales_stride
    if _HAS_VECTORS:
        # The loop below takes a group that is wanted only in part.
        groups = min(n // GROUP_COLUMNS, blocks // 8 - start // 8)
        _load_groups(m.fmt, values, scales, m.offsets, start // 8, groups, address_of(out_D))
        done = GROUP_COLUMNS * groups
    for j in range(done, n):
        column = start * BLOCK + j
        q = np.float32(integer_weight(m.fmt, values, stored_index(column, blocks), blocks))
        scale, offset, first_half, second_half = beside_block(m.fmt, scales, m.offsets, column // BLOCK)
        q *= first_half if column % BLOCK < BLOCK // 2 else second_half  # exact
        out_D[j] = block_weight(m.fmt, q, scale, offset)


def _emit_groups(
    f: BlockFormat, b: Any, row: Any, scales: Any, offsets: Any, first: Any, groups: Any, out: Any
) -> None:
    """Emit the loop over groups for one format."""
    row, scales, out = (v.pointer(b, address) for address in (row, scales, out))
    with cgutils.for_range(b, groups) as loop:
        group, at = b.add(first, loop.index), b.mul(loop.index, v.offset(4 * GROUP_COLUMNS))
        run = f.group(b, row, group)
        read = [f.signed(b, run, k, 32) for k in range(0, GROUP_COLUMNS // f.per_byte, 32)]
        parts = zip(*read, strict=True)  # all of the first part come before all of the second
        fours = v.transpose(b, [b.bitcast(w_J, v.vec(v.I32, 8)) for part in parts for w_J in part])
        beside = f.beside(b, [scales], offsets, b.mul(group, v.offset(8)), 8)
        for block, w_Q in enumerate(fours):
            scale, offset, *halves = [v.shuffle(b, s_B, s_B, [block] * 8) for s_B in (*beside[:2], *beside.halves)]
            w_J = b.bitcast(w_Q, v.vec(v.I8, 32))
            for k in range(0, BLOCK, 8):
                eight = b.sext(v.shuffle(b, w_J, w_J, range(k, k + 8)), v.vec(v.I32, 8))
                q = b.sitofp(eight, v.vec(v.F32, 8))
                q = b.fmul(q, halves[k * len(halves) // BLOCK]) if halves else q
                value = f.value(b, q, scale, offset)
                v.store(b, value, out, b.add(at, v.offset(4 * (block * BLOCK + k))))


@emits(types.void(*[types.intp] * 7))
def _load_groups(b: Any, fmt: Any, row: Any, scales: Any, offsets: Any, first: Any, groups: Any, out: Any) -> Any:
    """Load whole groups from group `first` on as float32, in the order of their columns."""
    values = row, scales, offsets, first, groups, out
    v.switch(b, fmt, {code: partial(_emit_groups, f, b, *values) for code, f in BLOCK_FORMATS.items()})


def single_block(f: BlockFormat, b: Any, row: Any, block: Any, scale: Any, offset: Any) -> Any:
    """The columns of a block outside the groups of a row, one after the other, as float32."""
    # Groups have an even number of blocks, so that blocks share bytes in the same way here.
    which = b.urem(block, v.offset(f.per_byte))
    parts = f.signed(b, f.single(b, row, b.sub(block, which)), 0, BLOCK)
    q_J = parts[0]
    for k, part in enumerate(parts[1:], 1):
        q_J = b.select(b.icmp_signed("==", which, v.offset(k)), part, q_J)
    floats = b.sitofp(b.sext(q_J, v.vec(v.I32, BLOCK)), v.vec(v.F32, BLOCK))
    return f.value(b, floats, v.splat(b, scale, BLOCK), v.splat(b, offset, BLOCK))
