"""Stored rows as float32, and where the integers of a row of blocks lie (see `artifact.formats`).

Shape letters: D columns, B blocks, J columns of one block or vector, Q groups of four bytes.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import (
    BF16,
    F16,
    F32,
    Floats,
    MatrixView,
    address_of,
    bfloat_to_float,
    half_to_float,
    pointer_of,
    values_of_row,
)

GROUP_COLUMNS = 256
"""Columns of a group: eight blocks, whose fours of columns are interleaved."""
_Q8 = FORMATS["q8"].code
_BITS = {f.code: f.bits for f in FORMATS.values() if f.quantised}
_HAS_VECTORS = ISA.lanes > 0


@public
def stored_index(column: int, blocks: int) -> int:
    """Index of a column among the stored bytes, or nibbles, of a row of `blocks` blocks (see `artifact.formats`)."""
    if column // GROUP_COLUMNS >= blocks // 8:
        return column
    inside = column % GROUP_COLUMNS
    return column - inside + inside % 32 // 4 * 32 + inside // 32 * 4 + inside % 4


@device
def integer_weight(fmt: int, row: int, index: int, blocks: int) -> np.int32:
    """The signed integer of a block format at a stored index of a row."""
    if fmt == _Q8:
        return np.int32(carray(pointer_of(row + index), (1,), np.int8)[0])
    apart = GROUP_COLUMNS // 2 if index // GROUP_COLUMNS < blocks // 8 else BLOCK
    at = index // (2 * apart) * apart + index % apart
    both = np.int32(carray(pointer_of(row + at), (1,), np.uint8)[0])
    return (both >> (4 * (index // apart % 2))) % 16 - np.int32(8)


@public
def load_row(m: MatrixView, row: int, first: int, out_D: Floats) -> None:
    """out ← the columns of one row from `first` on, as float32; `first` is a multiple of 256."""
    n, address = out_D.shape[0], values_of_row(m, row)
    if m.fmt == F32:
        full = carray(pointer_of(address + 4 * first), (n,), np.float32)
        for j in range(n):
            out_D[j] = full[j]
    elif m.fmt == F16:
        half = carray(pointer_of(address + 2 * first), (n,), np.uint16)
        for j in range(n):
            out_D[j] = half_to_float(half[j])
    elif m.fmt == BF16:
        brain = carray(pointer_of(address + 2 * first), (n,), np.uint16)
        for j in range(n):
            out_D[j] = bfloat_to_float(brain[j])
    else:
        _load_blocks(m, address, m.scales + row * m.scales_stride, first // BLOCK, out_D)


@device
def _load_blocks(m: MatrixView, address: int, scales: int, start: int, out_D: Floats) -> None:
    """Load blocks from block `start` on, which begins a group."""
    n, blocks = out_D.shape[0], (m.columns + BLOCK - 1) // BLOCK
    count = (n + BLOCK - 1) // BLOCK
    scale_B = carray(pointer_of(scales + 2 * start), (count,), np.uint16)
    done = 0
    if _HAS_VECTORS:
        # The loop below takes a group that is wanted only in part.
        groups = min(n // GROUP_COLUMNS, blocks // 8 - start // 8)
        if m.fmt == _Q8:
            _load_groups_q8(address + start * BLOCK, scales + 2 * start, groups, address_of(out_D))
        else:
            _load_groups_q4(address + start * BLOCK // 2, scales + 2 * start, groups, address_of(out_D))
        done = 8 * groups
    for b in range(done, count):
        out_J, scale = out_D[b * BLOCK : (b + 1) * BLOCK], half_to_float(scale_B[b])
        if (start + b) // 8 == blocks // 8:
            load_single_block(m.fmt, address, start + b, scale, out_J)
            continue
        for j in range(out_J.shape[0]):
            index = stored_index((start + b) * BLOCK + j, blocks)
            out_J[j] = scale * np.float32(integer_weight(m.fmt, address, index, blocks))


@device
def load_single_block(fmt: int, address: int, block: int, scale: np.float32, out_J: Floats) -> None:
    """Load a block outside the groups of a row: its columns lie one after the other."""
    if fmt == _Q8:
        byte_J = carray(pointer_of(address + block * BLOCK), (BLOCK,), np.int8)
        for j in range(out_J.shape[0]):
            out_J[j] = scale * np.float32(byte_J[j])
    else:
        # Groups have an even number of blocks, so that pairs of blocks share bytes here too.
        both_J = carray(pointer_of(address + block // 2 * BLOCK), (BLOCK,), np.uint8)
        shift = np.uint8(4 * (block % 2))
        for j in range(out_J.shape[0]):
            out_J[j] = scale * np.float32(np.int32((both_J[j] >> shift) & np.uint8(15)) - 8)


def _load_groups(bits: int) -> Any:
    @intrinsic
    def load(typing_context: Any, row: Any, scales: Any, groups: Any, out: Any) -> Any:
        """Load whole groups as float32, in the order of their columns."""

        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            row, scales, out = (v.pointer(b, arguments[k]) for k in (0, 1, 3))
            with cgutils.for_range(b, arguments[2]) as loop:
                stored = b.mul(loop.index, v.offset(GROUP_COLUMNS * bits // 8))
                read = [v.load(b, row, b.add(stored, v.offset(32 * k)), v.vec(v.I8, 32)) for k in range(bits)]
                if bits == 4:
                    low = [b.and_(w_J, v.const(v.I8, 32, 15)) for w_J in read]
                    high = [b.lshr(w_J, v.const(v.I8, 32, 4)) for w_J in read]
                    read = [b.sub(w_J, v.const(v.I8, 32, 8)) for w_J in low + high]
                fours = v.transpose(b, [b.bitcast(w_J, v.vec(v.I32, 8)) for w_J in read])
                s_B = v.load(b, scales, b.mul(loop.index, v.offset(16)), v.vec(v.HALF, 8))
                s_B = b.fpext(s_B, v.vec(v.F32, 8))
                for block, w_Q in enumerate(fours):
                    scale, w_J = v.shuffle(b, s_B, s_B, [block] * 8), b.bitcast(w_Q, v.vec(v.I8, 32))
                    for k in range(0, BLOCK, 8):
                        eight = b.sext(v.shuffle(b, w_J, w_J, range(k, k + 8)), v.vec(v.I32, 8))
                        at = b.mul(loop.index, v.offset(4 * GROUP_COLUMNS))
                        value = b.fmul(b.sitofp(eight, v.vec(v.F32, 8)), scale)
                        v.store(b, value, out, b.add(at, v.offset(4 * (block * BLOCK + k))))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return load


_load_groups_q8, _load_groups_q4 = _load_groups(8), _load_groups(4)
