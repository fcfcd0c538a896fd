"""Inputs of row products: a vector as float32 and as quantised bytes, side by side in one record.

x of D columns, padded with zeros to P = 128 ⌈D / 128⌉, in blocks of 32 with s = max |x| / 127:

    float32 x [P]   int8 q [P]   float32 s [P/32]   int32 −Σ q of each block [P/32]   int8 q [P]

q = round(x / s), half to even, so that x ≈ s q: once in the order of stored rows (see `artifact.formats`), for products
with rows, and once in the order of the columns, for tiles. The sums turn products with unsigned bytes into ones with
signed weights: Σ (u − 8) q = Σ u q − 8 Σ q for q4, and 128 instead of 8 for q8.
"""

import numpy as np
from numba import carray

from pi_runtime.artifact.footprint import PAD
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen.jit import exact, inner, leaf
from pi_runtime.kernels.data.matrix_view import Floats, is_quantised, pointer_of
from pi_runtime.kernels.data.row_loading import GROUP_COLUMNS

_TINY = np.float32(2.0**-126)
"""Below the smallest normal scale 1/s would overflow: such a block counts as zeros."""


@leaf
def padded(columns: int) -> int:
    """P: the columns a record has room for."""
    return (columns + PAD - 1) // PAD * PAD


@leaf
def stride_of(columns: int) -> int:
    """Bytes from one record to the next: `footprint.record_nbytes`, for kernels."""
    return padded(columns) * 25 // 4


@inner
def bytes_at(record: int, p: int) -> int:
    return record + 4 * p


@leaf
def scales_at(record: int, p: int) -> int:
    return record + 5 * p


@leaf
def block_sums_at(record: int, p: int) -> int:
    return record + 5 * p + p // 8


@leaf
def columns_at(record: int, p: int) -> int:
    """The bytes in the order of the columns, for products in tiles."""
    return record + 5 * p + p // 4


@leaf
def prepare(fmt: int, x_D: Floats, record: int) -> None:
    """Write the record of x for a matrix of format `fmt`: the floats, and for q8 and q4 what integer products need."""
    columns = x_D.shape[0]
    p = padded(columns)
    x_P = carray(pointer_of(record), (p,), np.float32)
    for j in range(columns):
        x_P[j] = x_D[j]
    for j in range(columns, p):
        x_P[j] = np.float32(0)
    if is_quantised(fmt):
        _quantise(p, record)
        _interleave((columns + BLOCK - 1) // BLOCK * BLOCK // GROUP_COLUMNS, p, record)


@exact
def _quantise(p: int, record: int) -> None:
    x_P = carray(pointer_of(record), (p,), np.float32)
    bits_P = carray(pointer_of(record), (p,), np.int32)
    q_P = carray(pointer_of(columns_at(record, p)), (p,), np.int8)
    s_B = carray(pointer_of(scales_at(record, p)), (p // BLOCK,), np.float32)
    sum_B = carray(pointer_of(block_sums_at(record, p)), (p // BLOCK,), np.int32)
    for block in range(p // BLOCK):
        x_J, bits_J = x_P[block * BLOCK : (block + 1) * BLOCK], bits_P[block * BLOCK : (block + 1) * BLOCK]
        q_J = q_P[block * BLOCK : (block + 1) * BLOCK]
        # Magnitudes are ordered as their bits are, NaN above all: the largest tells what bytes cannot say.
        largest = np.int32(0)
        for j in range(BLOCK):
            largest = max(largest, bits_J[j] & np.int32(0x7FFFFFFF))
        scale = np.int32(largest).view(np.float32) / np.float32(127)
        usable = scale >= _TINY
        inverse = np.float32(1) / scale if usable else np.float32(0)
        s_B[block] = np.float32(0) if scale < _TINY else scale
        total = np.int32(0)
        for j in range(BLOCK):
            q = np.int32(np.rint(x_J[j] * inverse))
            q_J[j] = np.int8(q)
            total -= q
        sum_B[block] = total


@inner
def _interleave(groups: int, p: int, record: int) -> None:
    """The bytes in the order of stored rows: in each group of eight blocks, fours transposed."""
    from_Q = carray(pointer_of(columns_at(record, p)), (p // 4,), np.int32)
    to_Q = carray(pointer_of(bytes_at(record, p)), (p // 4,), np.int32)
    for group in range(groups):
        from_64, to_64 = from_Q[group * 64 : group * 64 + 64], to_Q[group * 64 : group * 64 + 64]
        for k in range(8):
            for b in range(8):
                to_64[8 * k + b] = from_64[8 * b + k]
    for n in range(groups * 64, p // 4):
        to_Q[n] = from_Q[n]
