"""The input of matrix products: a vector as float32 and as quantised bytes, side by side in memory.

x has D columns, padded with zeros to P = 128 ⌈D / 128⌉, in blocks of 32 with the scale s = max |x| / 127 each:

    float32 x [P]   int8 q [P]   float32 s [P/32]   int32 −Σ q of each block [P/32], and of its first half   int8 q [P]

q = round(x / s), half to even, so that x ≈ s q. It stands there twice: in the order of stored rows (see
`artifact.formats`) for products, and in the order of the columns, from which that is made, and which becomes tiles
where AMX multiplies them (see `ops.tile_packing`). The sums turn products with unsigned bytes into products with signed
weights: Σ (u − 8) q = Σ u q − 8 Σ q for q4, and 128 instead of 8 for q8.

Shape letters: D columns, P padded columns, B blocks, J columns of one block, Q fours of bytes.
"""

import numpy as np
from numba import carray

from pi_runtime.artifact.footprint import INPUT, PAD
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen.intrinsics import padded_width
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Bytes, Floats, is_quantised, pointer_of
from pi_runtime.kernels.data.weight_formats import GROUP_COLUMNS

_TINY = np.float32(2.0**-126)
"""Below the smallest normal scale 1/s would overflow: such a block counts as zeros."""


@public
def row_order_at(input_at: int, p: int) -> int:
    """Address of the bytes in the order of stored rows, for products with rows."""
    return input_at + p // PAD * INPUT.row_order


@public
def scales_at(input_at: int, p: int) -> int:
    """Address of the blocks' scales."""
    return input_at + p // PAD * INPUT.scales


@public
def block_sums_at(input_at: int, p: int) -> int:
    """Address of the blocks' negative sums."""
    return input_at + p // PAD * INPUT.block_sums


@public
def half_sums_at(input_at: int, p: int) -> int:
    """Address of the negative sums of the blocks' first halves."""
    return input_at + p // PAD * INPUT.half_sums


@public
def column_order_at(input_at: int, p: int) -> int:
    """Address of the bytes in the order of the columns."""
    return input_at + p // PAD * INPUT.column_order


@public
def prepare_input(fmt: int, x_D: Floats, input_at: int) -> None:
    """Write x as the input of products with a matrix of format `fmt`: the floats, and for block formats the bytes."""
    columns = x_D.shape[0]
    p = padded_width(columns)
    x_P = carray(pointer_of(input_at), (p,), np.float32)
    for j in range(columns):
        x_P[j] = x_D[j]
    for j in range(columns, p):
        x_P[j] = np.float32(0)
    if is_quantised(fmt):
        _quantise(p, input_at)
        _interleave((columns + BLOCK - 1) // BLOCK * BLOCK // GROUP_COLUMNS, p, input_at)


@device
def _quantise(p: int, input_at: int) -> None:
    x_P = carray(pointer_of(input_at), (p,), np.float32)
    bits_P = carray(pointer_of(input_at), (p,), np.int32)
    q_P = carray(pointer_of(column_order_at(input_at, p)), (p,), np.int8)
    s_B = carray(pointer_of(scales_at(input_at, p)), (p // BLOCK,), np.float32)
    sum_B = carray(pointer_of(block_sums_at(input_at, p)), (p // BLOCK,), np.int32)
    half_B = carray(pointer_of(half_sums_at(input_at, p)), (p // BLOCK,), np.int32)
    for block in range(p // BLOCK):
        x_J, bits_J = x_P[block * BLOCK : (block + 1) * BLOCK], bits_P[block * BLOCK : (block + 1) * BLOCK]
        q_J = q_P[block * BLOCK : (block + 1) * BLOCK]
        # Magnitudes are ordered like their bits, NaN above all: so an infinite or NaN input reaches the scale.
        largest = np.int32(0)
        for j in range(BLOCK):
            largest = max(largest, bits_J[j] & np.int32(0x7FFFFFFF))
        scale = np.int32(largest).view(np.float32) / np.float32(127)
        usable = scale >= _TINY
        inverse = np.float32(1) / scale if usable else np.float32(0)
        s_B[block] = np.float32(0) if scale < _TINY else scale
        half_B[block] = _rounded(x_J[: BLOCK // 2], inverse, q_J[: BLOCK // 2])
        sum_B[block] = half_B[block] + _rounded(x_J[BLOCK // 2 :], inverse, q_J[BLOCK // 2 :])


@device
def _rounded(x_J: Floats, inverse: np.float32, q_J: Bytes) -> np.int32:
    """q ← round(x / s) for half a block; returns −Σ q."""
    total = np.int32(0)
    for j in range(BLOCK // 2):
        q = np.int32(np.rint(x_J[j] * inverse))
        q_J[j] = np.int8(q)
        total -= q
    return total


@device
def _interleave(groups: int, p: int, input_at: int) -> None:
    """Copy the bytes into the order of stored rows: in each group of eight blocks, fours are transposed."""
    from_Q = carray(pointer_of(column_order_at(input_at, p)), (p // 4,), np.int32)
    to_Q = carray(pointer_of(row_order_at(input_at, p)), (p // 4,), np.int32)
    for group in range(groups):
        from_64, to_64 = from_Q[group * 64 : group * 64 + 64], to_Q[group * 64 : group * 64 + 64]
        for k in range(8):
            for b in range(8):
                to_64[8 * k + b] = from_64[8 * b + k]
    for n in range(groups * 64, p // 4):
        to_Q[n] = from_Q[n]
