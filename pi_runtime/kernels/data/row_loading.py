"""Stored rows as float32, and where the integers of a q8 or q4 row lie (see `artifact.formats`)."""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import inner, leaf
from pi_runtime.kernels.data.matrix_view import (
    BF16,
    F16,
    F32,
    Q8,
    Floats,
    Matrix,
    address_of,
    bfloat_to_float,
    half_to_float,
    pointer_of,
)

GROUP_COLUMNS = 256
"""Columns of a group of eight blocks, whose fours are interleaved."""
_VECTORS = ISA.lanes > 0


@leaf
def place_of(column: int, blocks: int) -> int:
    """Where a column of a row of `blocks` blocks lies among its bytes, or nibbles (see `artifact.formats`)."""
    if column // GROUP_COLUMNS >= blocks // 8:
        return column
    inside = column % GROUP_COLUMNS
    return column - inside + inside % 32 // 4 * 32 + inside // 32 * 4 + inside % 4


@inner
def weight_of(fmt: int, row: int, place: int, blocks: int) -> np.int32:
    """The signed integer of q8 or q4 at a place of a row."""
    if fmt == Q8:
        return np.int32(carray(pointer_of(row + place), (1,), np.int8)[0])
    apart = GROUP_COLUMNS // 2 if place // GROUP_COLUMNS < blocks // 8 else BLOCK
    at = place // (2 * apart) * apart + place % apart
    both = np.int32(carray(pointer_of(row + at), (1,), np.uint8)[0])
    return (both >> (4 * (place // apart % 2))) % 16 - np.int32(8)


@leaf
def load_row(m: Matrix, row: int, first: int, out_D: Floats) -> None:
    """out ← columns first… of one row, as float32; `first` is a multiple of 256."""
    n, address = out_D.shape[0], m.values + row * m.stride
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


@inner
def _load_blocks(m: Matrix, address: int, scales: int, start: int, out_D: Floats) -> None:
    """Blocks of q8 or q4 from block `start`, a whole number of groups into the row."""
    n, blocks = out_D.shape[0], (m.columns + BLOCK - 1) // BLOCK
    count = (n + BLOCK - 1) // BLOCK
    scale_B = carray(pointer_of(scales + 2 * start), (count,), np.uint16)
    done = 0
    if _VECTORS:
        # A group that is wanted only in part is left to the loop below.
        groups = min(n // GROUP_COLUMNS, blocks // 8 - start // 8)
        if m.fmt == Q8:
            _load_groups_q8(address + start * BLOCK, scales + 2 * start, groups, address_of(out_D))
        else:
            _load_groups_q4(address + start * BLOCK // 2, scales + 2 * start, groups, address_of(out_D))
        done = 8 * groups
    for b in range(done, count):
        out_J, scale = out_D[b * BLOCK : (b + 1) * BLOCK], half_to_float(scale_B[b])
        if (start + b) // 8 == blocks // 8:
            load_single(m.fmt, address, start + b, scale, out_J)
            continue
        for j in range(out_J.shape[0]):
            out_J[j] = scale * np.float32(weight_of(m.fmt, address, place_of((start + b) * BLOCK + j, blocks), blocks))


@inner
def load_single(fmt: int, address: int, block: int, scale: np.float32, out_J: Floats) -> None:
    """A block outside the groups of a row: its columns lie one after the other."""
    if fmt == Q8:
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
        """Whole groups as float32, in the order of their columns."""

        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            row, scales, out = (v.pointer(b, arguments[k]) for k in (0, 1, 3))
            with cgutils.for_range(b, arguments[2]) as loop:
                stored = b.mul(loop.index, v.offset(GROUP_COLUMNS * bits // 8))
                places = [v.load(b, row, b.add(stored, v.offset(32 * k)), v.vec(v.I8, 32)) for k in range(bits)]
                if bits == 4:
                    low = [b.and_(w_J, v.const(v.I8, 32, 15)) for w_J in places]
                    high = [b.lshr(w_J, v.const(v.I8, 32, 4)) for w_J in places]
                    places = [b.sub(w_J, v.const(v.I8, 32, 8)) for w_J in low + high]
                fours = v.transpose(b, [b.bitcast(w_J, v.vec(v.I32, 8)) for w_J in places])
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
