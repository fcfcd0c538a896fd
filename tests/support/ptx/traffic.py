"""How many bytes a launch moves, by the addresses that it used."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from support.ptx.global_memory import Access, GlobalMemory

SECTOR = 32
"""Bytes that memory delivers at least."""


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written, each counted once for reads and once for writes."""

    distinct: int
    sectors: int
    """Of whole sectors, each once: what memory delivers if nothing is read twice from it."""
    asked: int
    """Of whole sectors for each instruction of a warp: what caches deliver."""


def traffic(memory: GlobalMemory) -> Traffic:
    """Count a launch's bytes."""
    distinct = sectors = asked = 0
    for writes in (False, True):
        chosen = [a for a in memory.accesses if a.writes == writes]
        if chosen:
            used = np.unique(np.concatenate([_spread(a.address, a.size) for a in chosen]))
            distinct, sectors = distinct + len(used), sectors + len(np.unique(used // SECTOR)) * SECTOR
            asked += sum(_asked(a) for a in chosen) * SECTOR
    return Traffic(distinct, sectors, asked)


def _spread(address: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    return (address[:, None] + np.arange(size)).ravel()


def _asked(a: Access) -> int:
    """An access is aligned to its size, which is at most a sector."""
    warp = a.program << 20 | (a.stamp & 0xFFFFF) >> 5
    return len(np.unique(np.stack([warp, a.address // SECTOR]), axis=1).T)
