"""AMX: registers of 16 rows of 64 bytes, and sums of products of signed bytes for a whole such tile.

    sums[m, n] += Σ_{k<8} Σ_{j<4} left[m, 4 k + j] · right[k, 4 n + j]           32 bits, exact

A block has 32 columns, so a tile of the left factor has 32 bytes a row, and one of the right factor 8 rows: sums of two
blocks stay apart.

Tiles mean something between `configure` and `release` alone, and no call keeps them: all that works with them belongs
into one compiled function. What the system must allow first is in `isa`.
"""

import struct
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.isa import TILES

ROWS, ROW_NBYTES = 16, 64
"""Rows of a whole tile, and bytes of one of its rows."""
PRODUCTS = (0, 4, 6), (1, 5, 7), (2, 4, 6), (3, 5, 7)
"""The tiles of products that are computed one after the other: of the sums, and of the left and the right factor."""
_SHAPES = [(16, 64)] * 4 + [(16, 32)] * 2 + [(8, 64)] * 2
"""Rows of each tile, and bytes of a row."""
_CONFIGURATION = struct.pack(
    "<2B14x8H16x8B8x", 1, 0, *(nbytes for _, nbytes in _SHAPES), *(rows for rows, _ in _SHAPES)
)


def instruction(b: Any, name: str, *operands: Any) -> None:
    """Emit one of AMX's instructions: tiles are given by number, the rest as values."""
    v.call(b, f"llvm.x86.{name}", ir.VoidType(), [v.I8(o) if isinstance(o, int) else o for o in operands])


def allow(context: Any, b: Any) -> None:
    """Let the function that is emitted have AMX, whatever the process compiles for."""
    ours = [context.codegen()._tm_features, *(f"+{name}" for name in sorted(TILES))]
    # llvmlite lets in only attributes that it knows by name.
    set.add(b.function.attributes, f'"target-features"="{",".join(filter(None, ours))}"')


def configure(context: Any, b: Any) -> None:
    """Give the tiles their shapes. These are a constant of the module: no compiler leaves out what is written to it."""
    allow(context, b)
    kind = ir.ArrayType(v.I8, len(_CONFIGURATION))
    shapes = b.module.globals.get("tile shapes")
    if shapes is None:
        shapes = cgutils.global_constant(b.module, "tile shapes", ir.Constant(kind, bytearray(_CONFIGURATION)))
    instruction(b, "ldtilecfg", b.bitcast(shapes, v.I8.as_pointer()))


def release(b: Any) -> None:
    """Forget tiles and shapes, so that the system need not keep them."""
    instruction(b, "tilerelease")


def multiply(b: Any, tiles: tuple[int, int, int], left: Any, left_stride: Any, right: Any, right_stride: Any) -> None:
    """Sums ← left · right, for the tiles of sums, left and right factor."""
    sums, a, w = tiles
    instruction(b, "tilezero", sums)
    instruction(b, "tileloadd64", w, right, right_stride)
    instruction(b, "tileloadd64", a, left, left_stride)
    instruction(b, "tdpbssd", sums, a, w)


def store(b: Any, tile: int, to: Any) -> None:
    """Store a tile, row after row."""
    instruction(b, "tilestored64", tile, to, v.offset(ROW_NBYTES))
