"""Products of queries with the keys of a page, which lie column by column: a register holds a column of positions.

    score_s = Σ_j q_j k_js

Each score is summed in the order of the columns, however many queries share a call, so a token gets the same bits alone
and in any company. No lanes are added up, as rows of keys would need it.
"""

# The definition takes the scratch memory of its compiled twin.
# ruff: noqa: ARG001

from functools import partial
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils

from pi_runtime.artifact.footprint import POSITIONS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import F16, F32, multiply_add, pointer_of
from pi_runtime.kernels.data.weight_formats import FLOAT_FORMATS, FloatFormat, float_weight

_TILES = (8, 4, 2, 1) if ISA.lanes == 16 else (2, 1)
"""Queries of a tile: as many as there are registers for their scores, and fewer for those that are left."""


def _emit_tiles(
    f: FloatFormat,
    b: Any,
    keys: Any,
    values: Any,
    later: Any,
    columns: Any,
    queries: Any,
    index: Any,
    count: Any,
    out: Any,
) -> None:
    """Emit the loops over queries and columns for one format."""
    nbytes = POSITIONS * f.nbytes
    kind, done = v.vec(v.F32, POSITIONS), v.offset(0)
    zeros = v.const(v.F32, POSITIONS, 0.0)
    for size in _TILES:
        tiles = b.udiv(b.sub(count, done), v.offset(size))
        with cgutils.for_range(b, tiles) as loop:
            first = b.add(done, b.mul(loop.index, v.offset(size)))
            places = [b.add(first, v.offset(k)) for k in range(size)]
            numbers = [v.load(b, v.pointer(b, index), b.mul(place, v.offset(8)), v.I64) for place in places]
            rows = [v.pointer(b, b.add(queries, b.mul(n, b.mul(columns, v.offset(4))))) for n in numbers]
            sums = [cgutils.alloca_once(b, kind) for _ in range(size)]
            for total in sums:
                b.store(zeros, total)
            with cgutils.for_range(b, columns) as column:
                key = f.load(b, v.pointer(b, keys), b.mul(column.index, v.offset(POSITIONS)), POSITIONS)
                for line in range(0, nbytes if size <= _FEW else 0, v.LINE):
                    for place in (values, later):
                        at = b.add(b.mul(column.index, v.offset(nbytes)), v.offset(line))
                        v.prefetch(b, v.pointer(b, place), at)
                for row, total in zip(rows, sums, strict=True):
                    q = v.splat(b, v.load(b, row, b.mul(column.index, v.offset(4)), v.F32), POSITIONS)
                    b.store(v.fma(b, key, q, b.load(total)), total)
            for place, total in zip(places, sums, strict=True):
                v.store(b, b.load(total), v.pointer(b, out), b.mul(place, v.offset(4 * POSITIONS)))
        done = b.add(done, b.mul(tiles, v.offset(size)))


_FEW = 4
"""Queries for which the memory is the limit."""


@emits(types.void(types.intp, types.UniTuple(types.intp, 8)))
def _emit_key_products(b: Any, fmt: Any, call: Any) -> Any:
    """Emit `key_products`; `call` is a tuple of its other values, in order."""
    values = cgutils.unpack_tuple(b, call)
    v.switch(b, fmt, {code: partial(_emit_tiles, FLOAT_FORMATS[code], b, *values) for code in (F32, F16)})


@public
def vector_key_products(
    fmt: int, keys: int, values: int, later: int, columns: int, queries: int, index: int, count: int, out: int
) -> None:
    """`key_products` by vector instructions."""
    _emit_key_products(fmt, (keys, values, later, columns, queries, index, count, out))


@public
def portable_key_products(
    fmt: int, keys: int, values: int, later: int, columns: int, queries: int, index: int, count: int, out: int
) -> None:
    """The definition of `key_products` in plain loops."""
    index_N = carray(pointer_of(index), (count,), np.int64)
    for n in range(count):
        q_J = carray(pointer_of(queries + 4 * columns * index_N[n]), (columns,), np.float32)
        score_S = carray(pointer_of(out + 4 * POSITIONS * n), (POSITIONS,), np.float32)
        score_S[:] = np.float32(0)
        for j in range(columns):
            for s in range(POSITIONS):
                score_S[s] = multiply_add(q_J[j], float_weight(fmt, keys, j * POSITIONS + s), score_S[s])


_key_products = by_address(vector_key_products if ISA.lanes else portable_key_products)


@device
def key_products(
    fmt: int, keys: int, values: int, later: int, columns: int, queries: int, index: int, count: int, out: int
) -> None:
    """out[n, s] ← query index[n] · key s, for `count` queries and all positions of a page. All places are addresses.

    Keys are float32 or float16. Queries lie one after the other. Where these are few the memory is what takes time:
    so the page's values, and the keys that come later, are prefetched meanwhile.
    """
    _key_products(fmt, keys, values, later, columns, queries, index, count, out)
