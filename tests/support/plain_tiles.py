"""AMX's tile instructions in NumPy, for kernels that are compiled with calls of these in their place.

What they do is written down from Intel's manual (volume 2A, instructions LDTILECFG to TILEZERO). Where a processor
would raise an exception, `assert` fails; because an exception cannot leave a callback, `errors` keeps it.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

I8, I64 = ir.IntType(8), ir.IntType(64)


class PlainTiles:
    """Eight tiles of 16 rows of 64 bytes, as one thread has them."""

    def __init__(self) -> None:
        self.rows: list[int] | None = None
        self.nbytes: list[int] = []
        self.tiles = np.zeros((8, 16, 64), np.uint8)
        self.errors: list[BaseException] = []
        self.counts: dict[str, int] = {}
        self._callbacks: dict[str, Any] = {}

    def instruction(self, b: Any, name: str, *operands: Any) -> None:
        """Emit the call of an instruction's twin, in the place of `amx.instruction`."""
        if name not in self._callbacks:
            kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(operands))
            self._callbacks[name] = kind(self._kept(name, getattr(self, f"_{name}")))
        address = ctypes.cast(self._callbacks[name], ctypes.c_void_p).value
        values = [I64(o) if isinstance(o, int) else b.ptrtoint(o, I64) if o.type.is_pointer else o for o in operands]
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(operands))
        b.call(b.inttoptr(I64(address), kind.as_pointer()), values)

    def _kept(self, name: str, run: Callable[..., None]) -> Callable[..., None]:
        def call(*operands: int) -> None:
            self.counts[name] = self.counts.get(name, 0) + 1
            try:
                run(*operands)
            except BaseException as error:
                self.errors.append(error)

        return call

    def _memory(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def _shape(self, tile: int) -> tuple[int, int]:
        assert self.rows is not None, "tiles without a configuration"
        assert self.rows[tile], f"tile {tile} has no shape"
        return self.rows[tile], self.nbytes[tile]

    def _ldtilecfg(self, at: int) -> None:
        config = self._memory(at, 64)
        assert config[0] == 1, "palette"
        assert not config[1:16].any()
        assert not config[32:48].any()
        assert not config[56:].any()
        self.nbytes, self.rows = config[16:32].view(np.uint16).tolist(), config[48:56].tolist()
        assert all(0 < n <= 64 for n in self.nbytes)
        assert all(0 < n <= 16 for n in self.rows)
        self.tiles[:] = 0

    def _tilerelease(self) -> None:
        self.rows, self.tiles[:] = None, 0

    def _tilezero(self, tile: int) -> None:
        self._shape(tile)
        self.tiles[tile] = 0

    def _tileloadd64(self, tile: int, at: int, stride: int) -> None:
        rows, nbytes = self._shape(tile)
        self.tiles[tile] = 0
        for r in range(rows):
            self.tiles[tile, r, :nbytes] = self._memory(at + r * stride, nbytes)

    def _tilestored64(self, tile: int, at: int, stride: int) -> None:
        rows, nbytes = self._shape(tile)
        for r in range(rows):
            self._memory(at + r * stride, nbytes)[:] = self.tiles[tile, r, :nbytes]

    def _tdpbssd(self, sums: int, left: int, right: int) -> None:
        (rows, width), (left_rows, depth), (fours, right_width) = map(self._shape, (sums, left, right))
        assert len({sums, left, right}) == 3
        assert (left_rows, fours, right_width) == (rows, depth // 4, width)
        assert depth % 4 == width % 4 == 0
        left_MK = self.tiles[left, :rows, :depth].view(np.int8).astype(np.int64).reshape(rows, fours, 4)
        right_KN = self.tiles[right, :fours, :width].view(np.int8).astype(np.int64).reshape(fours, width // 4, 4)
        sums_MN = self.tiles[sums].view(np.int32)[:rows, : width // 4]
        sums_MN += np.einsum("mkj,knj->mn", left_MK, right_KN).astype(np.int32)
