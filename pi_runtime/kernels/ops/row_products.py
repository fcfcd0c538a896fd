"""Products of stored rows with vectors: rows in turn or from a list, times one vector or many.

    row · x = Σ_j w_j x_j                                    f32, f16, bf16: float32 throughout
    row · x = Σ_b s_b t_b Σ_{j in b} w_j q_j                 block formats: integer sums in blocks of 32, exact
    … + Σ_b m_b t_b Σ_{j in b} q_j                           where a block has a minimum m; a zero is part of w

A row times a vector is summed in one order, however many rows and vectors share a call: each of some lanes adds up its
columns from left to right, and the lanes are added in halves. There are 8 in the block formats and 16 in f32, on every
processor; f16 and bf16 have as many as a register. So a token gets the same bits alone and in any company. The vectors
are quantised inputs (see `quantised_input`): q their integers and t their scales. Rows and vectors are taken in tiles,
so that a weight that was read serves several vectors. While rows are read, later ones are prefetched. With AMX many
vectors go another way (`tile_products`), to the same bits.

Shape letters: D columns, P padded columns, B blocks, N rows of a call.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.intrinsics import HALF_IS_NATIVE, emits, padded_width
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.codegen.prefetch import AHEAD
from pi_runtime.kernels.data.matrix_view import (
    F32,
    Bytes,
    Floats,
    MatrixView,
    RowList,
    Vectors,
    integers,
    is_quantised,
    multiply_add,
    pointer_of,
    values_of_row,
    vector,
)
from pi_runtime.kernels.data.quantised_input import row_order_at, scales_at
from pi_runtime.kernels.data.row_loading import stored_index
from pi_runtime.kernels.data.weight_formats import (
    BLOCK_FORMATS,
    FLOAT_FORMATS,
    FLOAT_LANES,
    REGISTER,
    BlockFormat,
    beside_block,
    block_product,
    float_weight,
    integer_weight,
)
from pi_runtime.kernels.ops.product_tiles import LANES, BlockTile, Rows, beside_room, float_tile, write_beside
from pi_runtime.kernels.ops.tile_packing import TILE, TILED, tile_vectors
from pi_runtime.kernels.ops.tile_products import tile_row_products

ROWS = 4
"""Rows of a tile."""
AHEAD_NBYTES = 16384
"""How far ahead of the row that is read to prefetch: far enough for the memory, near enough for the second-level
cache."""
LONG = 1024
"""Columns of a long row."""
_FLOAT_TILES, _BLOCK_TILES = {
    "avxvnni": ((3, 2, 1), (2, 1)),
    "avx2": ((3, 2, 1), (4, 2, 1)),
    "neon": ((2, 1), (1,)),
    "portable": ((2, 1), (1,)),
}.get(ISA.name, ((6, 4, 2, 1), (4, 2, 1)))
"""Vectors of a tile: as many as there are registers for the sums, and fewer for those that are left."""
_FLOATS_ALONE = 1 if ISA.lanes == 16 else 2
"""Rows in turn that a vector alone takes at once in the float formats: memory prefers few, the sums' latency many."""


@dataclass
class _ProductCall:
    """Emits the loops over rows and vectors of one call; the values are those of `row_products`."""

    b: Any
    values: Any
    scales: Any
    stride: Any
    scales_stride: Any
    columns: Any
    offsets: Any
    slots: Any
    first: Any
    index: Any
    count: Any
    known: Any
    inputs: Any
    input_stride: Any
    tokens: Any
    token_count: Any
    out: Any
    out_stride: Any

    def _least(self, n: Any, count: Any) -> Any:
        """n, but the last of `count` things where n is past it."""
        last = self.b.sub(count, v.offset(1))
        return self.b.select(self.b.icmp_signed("<", n, last), n, last)

    def _rows(self, n: Any, rows: int, distances: int = 1) -> Rows:
        """Rows from the n-th on (past the end the last one again), and the rows that are prefetched meanwhile: so far
        ahead, and twice as far where two distances are."""
        b = self.b
        ahead = b.udiv(b.add(self.stride, v.offset(AHEAD_NBYTES - 1)), self.stride)
        now, later = [], []
        for k in range(rows):
            one = self._least(b.add(n, v.offset(k)), self.count)
            now.append(v.listed(b, self.index, one, b.add(self.first, one)))
            for times in range(1, distances + 1):
                one = self._least(b.add(b.add(n, b.mul(ahead, v.offset(times))), v.offset(k)), self.known)
                later.append(v.listed(b, self.index, one, b.add(self.first, one)))

        def pointers(numbers: list[Any], base: Any, stride: Any) -> list[Any]:
            return [v.pointer(b, b.add(base, b.mul(row, stride))) for row in numbers]

        def values(numbers: list[Any]) -> list[Any]:
            return pointers([v.listed(b, self.slots, row, row) for row in numbers], self.values, self.stride)

        return Rows(
            values(now),
            pointers(now, self.scales, self.scales_stride),
            values(later),
            pointers(later, self.scales, self.scales_stride),
            self.offsets,
        )

    def _tile(self, tile: Callable[..., Any], lanes: int, rows: Rows, row: Any, t: Any, size: int) -> None:
        """Emit one tile: its products go where the rows from `row` on, and the vectors from t on, have theirs."""
        b, inputs = self.b, []
        for k in range(size):
            which = self._least(b.add(t, v.offset(k)), self.token_count)
            token = v.listed(b, self.tokens, which, which)
            inputs.append(v.pointer(b, b.add(self.inputs, b.mul(token, self.input_stride))))
        count, in_all = len(rows.values), lanes * len(rows.values)
        zeros = v.const(v.F32, min(REGISTER, in_all), 0.0)
        sums = [[cgutils.alloca_once_value(b, zeros) for _ in range(0, in_all, REGISTER)] for _ in range(size)]
        for place in (place for into in sums for place in into):
            b.store(zeros, place)
        tile(b, rows, inputs, self.columns, sums)
        for k, into in enumerate(sums):
            found = v.halves_added(b, v.join(b, [b.load(place) for place in into]), lanes)
            token = b.add(t, v.offset(k))
            at = b.add(b.add(self.out, b.mul(token, self.out_stride)), b.mul(row, v.offset(4)))
            with b.if_then(b.icmp_signed("<", token, self.token_count)):
                self._write(found, v.pointer(b, at), row, count)

    def _write(self, found: Any, at: Any, row: Any, count: int) -> None:
        b = self.b
        with b.if_else(b.icmp_signed("<=", b.add(row, v.offset(count)), self.count)) as (whole, part):
            with whole:
                v.store(b, found, at, v.offset(0))
            with part:
                for r in range(count - 1):
                    with b.if_then(b.icmp_signed("<", b.add(row, v.offset(r)), self.count)):
                        v.store(b, b.extract_element(found, ir.Constant(v.I32, r)), at, v.offset(4 * r))

    def _near(self, n: Any, rows: int) -> Rows:
        """The same rows, with what is prefetched in them and the next ones (see `codegen.prefetch`)."""
        found = self._rows(n, rows, 0)
        later = [self.b.gep(row, [v.offset(AHEAD.nbytes)]) for row in found.values]
        return replace(found, later=later, level=AHEAD.level)

    def emit(
        self,
        tile: Callable[..., Any],
        lanes: int,
        sizes: tuple[int, ...],
        alone_rows: int,
        bits: int,
        grouped: BlockFormat | None = None,
    ) -> None:
        """Emit a format's loops. `alone_rows`: a vector alone takes so many long rows in turn at once.

        Memory prefers few of these, and of scattered ones as many as a tile has. `grouped` is the format if it has
        scales of groups: they are unpacked once for all of the largest tiles.
        """
        b = self.b
        long = b.icmp_signed(">=", self.columns, v.offset(LONG))
        one = b.icmp_signed("==", self.token_count, v.offset(1))
        with b.if_else(b.and_(b.and_(long, one), self._in_turn())) as (alone, company):
            with alone:
                self._alone(tile, lanes, alone_rows, bits)
            with company:
                self._many(tile, lanes, sizes, grouped)

    def _alone(self, tile: Callable[..., Any], lanes: int, rows: int, bits: int) -> None:
        b = self.b

        def each(some: Callable[[Any], Rows]) -> None:
            with cgutils.for_range_slice(b, v.offset(0), self.count, v.offset(rows)) as (row, _):
                self._tile(tile, lanes, some(row), row, v.offset(0), 1)

        usual, near = partial(self._rows, rows=rows, distances=2), partial(self._near, rows=rows)
        if bits not in AHEAD.bits:
            each(usual)
            return
        apart = b.icmp_signed(">", b.mul(self.stride, v.offset(16)), b.mul(self.columns, v.offset(3 * bits)))
        with b.if_else(apart) as (apart, together):
            with apart:
                each(usual)
            with together:
                each(near)

    def _in_turn(self) -> Any:
        """Whether the last rows follow each other: those of a list of few neurons hardly ever do."""
        b, last = self.b, self.b.sub(self.count, v.offset(1))
        before = b.sub(last, v.offset(ROWS - 1))
        before = b.select(b.icmp_signed("<", before, v.offset(0)), v.offset(0), before)
        apart = b.sub(v.listed(b, self.index, last, last), v.listed(b, self.index, before, before))
        return b.icmp_signed("==", apart, b.sub(last, before))

    def _many(self, tile: Callable[..., Any], lanes: int, sizes: tuple[int, ...], grouped: BlockFormat | None) -> None:
        b = self.b
        room = None if grouped is None else beside_room(b, ROWS, self.columns)
        with cgutils.for_range_slice(b, v.offset(0), self.count, v.offset(ROWS)) as (row, _):
            rows, t = self._rows(row, ROWS), v.offset(0)
            for size in sizes:
                tiles, taken = self._tiles(b.sub(self.token_count, t), size), rows
                if grouped is not None and size == sizes[0]:
                    with b.if_then(b.icmp_signed(">", tiles, v.offset(0))):
                        taken = write_beside(grouped, b, rows, self.columns, room)
                with cgutils.for_range(b, tiles) as loop:
                    self._tile(tile, lanes, taken, row, b.add(t, b.mul(loop.index, v.offset(size))), size)
                t = b.add(t, b.mul(tiles, v.offset(size)))

    def _tiles(self, left: Any, size: int) -> Any:
        """How many tiles of a size so many vectors take: those of three leave no vector alone; those of more also take
        one vector less, and compute the last one twice."""
        b = self.b
        alone = b.icmp_signed("==", b.srem(left, v.offset(3)), v.offset(1))
        spare = b.select(alone, v.offset(-3), v.offset(0)) if size == 3 else v.offset(int(size > 3))
        return b.sdiv(b.add(left, spare), v.offset(size))


@emits(types.void(types.intp, types.UniTuple(types.intp, 17)))
def _emit_row_products(b: Any, fmt: Any, call: Any) -> Any:
    """Emit `row_products`; `call` is a tuple of the values of `_ProductCall`, in order."""
    call = _ProductCall(b, *cgutils.unpack_tuple(b, call))
    cases: dict[int, Callable[[], None]] = {}
    for code, f in FLOAT_FORMATS.items():
        cases[code] = partial(call.emit, partial(float_tile, f), f.lanes, _FLOAT_TILES, _FLOATS_ALONE, 8 * f.nbytes)
    for code, block in BLOCK_FORMATS.items() if ISA.lanes else ():
        grouped = block if block.fmt.grouped else None
        tile = partial(BlockTile, block)
        cases[code] = partial(call.emit, tile, LANES, _BLOCK_TILES, 1, block.bits, grouped)
    v.switch(b, fmt, cases)


@public
def vector_row_products(m: MatrixView, rows: RowList, x: Vectors, out: int, out_stride: int) -> None:
    """`row_products` by vector instructions."""
    matrix = m.values, m.scales, m.stride, m.scales_stride, m.columns, m.offsets, m.slots
    listed, vectors = (rows.first, rows.listed, rows.rows, rows.known), (x.inputs, x.stride, x.listed, x.tokens)
    _emit_row_products(m.fmt, (*matrix, *listed, *vectors, out, out_stride))


@device
def _float_lane(fmt: int, row: int, input_at: int, columns: int, lane: int) -> np.float32:
    """What one lane sums up."""
    x_D, total = carray(pointer_of(input_at), (columns,), np.float32), np.float32(0)
    for j in range(lane, columns, FLOAT_LANES if fmt == F32 else REGISTER):
        total = multiply_add(float_weight(fmt, row, j), x_D[j], total)
    return total


@device
def _block_lane(m: MatrixView, values: int, row: int, input_at: int, lane: int) -> np.float32:
    """What one of `LANES` lanes sums up: a block of each group, then a four of each block outside the groups."""
    p, blocks, total = padded_width(m.columns), (m.columns + BLOCK - 1) // BLOCK, np.float32(0)
    q_P = carray(pointer_of(row_order_at(input_at, p)), (p,), np.int8)
    t_B = carray(pointer_of(scales_at(input_at, p)), (blocks,), np.float32)
    grouped = blocks // LANES * LANES
    for n in range(grouped // LANES + blocks - grouped):
        block = lane + LANES * n if LANES * n < grouped else grouped + n - grouped // LANES
        first, count = (block * BLOCK, BLOCK) if block < grouped else (block * BLOCK + 4 * lane, 4)
        one, negative_one = _integer_sums(m.fmt, values, q_P, first, count // 2, blocks)
        other, negative_other = _integer_sums(m.fmt, values, q_P, first + count // 2, count // 2, blocks)
        scale, offset, of_one, of_other = beside_block(m.fmt, m.scales + row * m.scales_stride, m.offsets, block)
        if block >= grouped:  # fours lie in one half each
            of_one = of_other = of_one if lane < LANES // 2 else of_other
        sums = one * of_one + other * of_other, negative_one + negative_other
        total = block_product(m.fmt, total, sums, (scale, t_B[block], offset))
    return total


@device
def _integer_sums(fmt: int, row: int, q_P: Bytes, first: int, count: int, blocks: int) -> tuple[np.float32, np.float32]:
    """The sum of products over some columns of one block, and the negative sum of the input's integers."""
    whole, negative = np.int32(0), np.int32(0)
    for column in range(first, first + count):
        at = stored_index(column, blocks)
        whole += integer_weight(fmt, row, at, blocks) * np.int32(q_P[at])
        negative -= np.int32(q_P[at])
    return np.float32(whole), np.float32(negative)


@device
def _row_product(m: MatrixView, values: int, row: int, input_at: int, sum_L: Floats) -> np.float32:
    """The sum of all lanes: the upper half of them is added to the lower one until one is left."""
    # No recursion: numba leaves such a function's own name unresolved in what it loads from the kernel cache.
    lanes = LANES if is_quantised(m.fmt) else FLOAT_LANES if m.fmt == F32 else REGISTER
    for lane in range(lanes):
        if is_quantised(m.fmt):
            sum_L[lane] = _block_lane(m, values, row, input_at, lane)
        else:
            sum_L[lane] = _float_lane(m.fmt, values, input_at, m.columns, lane)
    while lanes > 1:
        lanes //= 2
        for lane in range(lanes):
            sum_L[lane] += sum_L[lane + lanes]
    return sum_L[0]


@public
def portable_row_products(m: MatrixView, rows: RowList, x: Vectors, out: int, out_stride: int) -> None:
    """The definition of `row_products` in plain loops."""
    sum_L = np.empty(FLOAT_LANES, np.float32)
    for n in range(rows.rows):
        row = integers(rows.listed, rows.rows)[n] if rows.listed != 0 else rows.first + n
        values = values_of_row(m, row)
        for t in range(x.tokens):
            at = x.inputs + (integers(x.listed, x.tokens)[t] if x.listed != 0 else t) * x.stride
            vector(out + t * out_stride, rows.rows)[n] = _row_product(m, values, row, at, sum_L)


@public
def mixed_row_products(m: MatrixView, rows: RowList, x: Vectors, out: int, out_stride: int) -> None:
    """`row_products` without integer dot products: the float formats by whatever vectors LLVM makes."""
    if is_quantised(m.fmt):
        portable_row_products(m, rows, x, out, out_stride)
    else:
        vector_row_products(m, rows, x, out, out_stride)


_without_vectors = mixed_row_products if HALF_IS_NATIVE else portable_row_products
_few_row_products = by_address(vector_row_products if ISA.lanes else _without_vectors)


@device
def _in_turn(x: Vectors) -> bool:
    """Whether a list of vectors has all up to its length in turn."""
    found = True
    if x.listed != 0:
        listed = integers(x.listed, x.tokens)
        for t in range(x.tokens):
            found &= listed[t] == t
    return found


@public
def tiled_row_products(m: MatrixView, rows: RowList, x: Vectors, out: int, out_stride: int) -> None:
    """`row_products`, whole tiles of rows and vectors by AMX where vectors are laid so."""
    tokens, count = tile_vectors(m.fmt, x.tokens), rows.rows // TILE * TILE
    if m.fmt not in TILED or tokens == 0 or count == 0 or not _in_turn(x):
        _few_row_products(m, rows, x, out, out_stride)
        return
    whole, laid = RowList(rows.first, rows.listed, count, rows.known), Vectors(x.inputs, x.stride, 0, tokens)
    tile_row_products(m, whole, laid, out, out_stride)
    if count < rows.rows:
        listed = rows.listed + 8 * count if rows.listed != 0 else 0
        others = RowList(rows.first + count, listed, rows.rows - count, rows.known - count)
        _few_row_products(m, others, laid, out + 4 * count, out_stride)
    if tokens < x.tokens:
        others_x = Vectors(x.inputs + tokens * x.stride, x.stride, 0, x.tokens - tokens)
        _few_row_products(m, rows, others_x, out + tokens * out_stride, out_stride)


_row_products = by_address(tiled_row_products) if ISA.tiles else _few_row_products


@device
def row_products(m: MatrixView, rows: RowList, x: Vectors, out: int, out_stride: int) -> None:
    """out[t, n] ← row_n · x_t for some rows and vectors. All places are addresses, strides in bytes.

    Results of one vector are consecutive.
    """
    if rows.rows > 0 and x.tokens > 0:
        _row_products(m, rows, x, out, out_stride)
