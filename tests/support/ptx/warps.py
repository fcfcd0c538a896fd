"""Instructions of a whole warp: shuffles, reductions, and which lanes give which addresses to `ldmatrix`."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from support.ptx.arithmetic import Lanes
from support.ptx.faults import BarrierError, UnknownInstructionError

WARP = 32
_LANE = np.arange(WARP)


def check_whole(mask: npt.NDArray[np.bool_] | None) -> None:
    """Raise BarrierError unless all lanes of each warp take part, or none."""
    if mask is not None:
        lanes = mask.reshape(-1, WARP)
        if (lanes.any(1) != lanes.all(1)).any():
            raise BarrierError("some lanes of a warp are elsewhere")


def check_members(members: Lanes) -> None:
    """Only instructions of all 32 lanes are known."""
    if (np.asarray(members).astype(np.int64) & 0xFFFFFFFF != 0xFFFFFFFF).any():
        raise UnknownInstructionError("a mask that leaves lanes out")


def shuffle(kind: str, value: Lanes, by: Lanes, clamp: Lanes) -> Lanes:
    """Each lane's number from another lane: idx, up, down or bfly. Its own where that lane is beyond the limit."""
    v, n, c = (np.asarray(a).reshape(-1, WARP) for a in (value, by, clamp))
    n, c = n.astype(np.int64) & 31, c.astype(np.int64)
    segment = c >> 8 & 31
    low, limit = _LANE & segment, _LANE & segment | c & 31 & ~segment
    if kind == "up":
        source, inside = _LANE - n, _LANE - n >= limit
    elif kind == "idx":
        source = low | n & ~segment
        inside = source <= limit
    else:
        source = _LANE + n if kind == "down" else _LANE ^ n
        inside = source <= limit
    return np.take_along_axis(v, np.where(inside, source, _LANE), 1).ravel()


REDUCTIONS: dict[str, Callable[[Lanes], Lanes]] = {
    "add": lambda v: v.sum(1, dtype=v.dtype),
    "min": lambda v: v.min(1),
    "max": lambda v: v.max(1),
    "and": lambda v: np.bitwise_and.reduce(v, 1),
    "or": lambda v: np.bitwise_or.reduce(v, 1),
    "xor": lambda v: np.bitwise_xor.reduce(v, 1),
}


def reduce(kind: str, value: Lanes) -> Lanes:
    """One number for all lanes of a warp. Integers alone, so their order does not count."""
    return np.repeat(REDUCTIONS[kind](value.reshape(-1, WARP)), WARP)


def matrix_rows(address: Lanes, count: int) -> list[Lanes]:
    """The address of each lane's two numbers in each of `count` matrices of 8 × 8 numbers of 16 bits.

    Lanes 8 m to 8 m + 7 give the addresses of matrix m's rows.
    """
    rows = address.reshape(-1, WARP)
    return [(rows[:, 8 * m + _LANE // 4] + _LANE % 4 * 4).ravel() for m in range(count)]
