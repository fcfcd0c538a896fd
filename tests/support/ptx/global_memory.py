"""Memory of tensors as a kernel's programs see it: only what its arguments are, each far from the others.

A pointer is an address that the emulator gives out, a tebibyte from the next one. So an address tells which argument it
was made from, and one beyond its end is found. Tensors may overlap: what is real is compared for races.
"""

import ctypes
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from support.ptx.faults import OutsideError, RaceError, UnwrittenError

Addresses = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

_APART = 40
POISON = 0xA5
"""Every byte of memory that is allocated and not written, while kernels run here."""
_POISONED = {4: np.uint32(0xA5A5A5A5), 8: np.uint64(0xA5A5A5A5A5A5A5A5)}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Access:
    """One instruction's use of memory by some threads: real addresses, bytes of each, and who."""

    region: int
    address: Numbers
    size: int
    program: Numbers
    stamp: Numbers
    """See `races.stamps`."""
    writes: bool
    line: int
    """Where the instruction stands."""


class Region:
    """The bytes of one tensor: from its first element to its last one."""

    def __init__(self, number: int, name: str, tensor: torch.Tensor) -> None:
        assert tensor.device.type == "cpu"
        self.number, self.name, self.start = number, name, tensor.data_ptr()
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.size = (steps + 1) * tensor.itemsize if tensor.numel() else 0
        self.pointer = (number + 1 << _APART) + self.start % 4096
        self._aligned = self.start // 16 * 16
        room = (self.start + self.size - self._aligned + 15) // 16 * 16
        # The ends may belong to others: no index reaches them.
        raw = (ctypes.c_uint8 * room).from_address(self._aligned) if room else b""
        self._views = {size: np.frombuffer(raw, kind) for size, kind in _UNSIGNED.items()}

    def places(self, address: Addresses, size: int, count: int) -> tuple[Numbers, Numbers]:
        """Real addresses, and indexes of the view for `size`. Raises OutsideError."""
        offset = (address - np.uint64(self.pointer)).astype(np.int64)
        if (wrong := (offset < 0) | (offset > self.size - size * count)).any():
            raise OutsideError(f"{self.name} has {self.size} bytes; {offset[wrong][0]} + {size * count}")
        real = offset + self.start
        if (real % (size * count)).any():
            raise OutsideError(f"{self.name}: an address is no multiple of {size * count}")
        return real, ((real - self._aligned) // size)[:, None] + np.arange(count)

    def view(self, size: int) -> npt.NDArray[np.unsignedinteger]:
        found: npt.NDArray[np.unsignedinteger] = self._views[size]
        return found


@dataclass
class GlobalMemory:
    """The tensors of one launch, and what its programs did to them."""

    regions: list[Region]
    accesses: list[Access] = field(default_factory=list)

    def load(
        self, address: Addresses, size: int, count: int, program: Numbers, stamp: Numbers, line: int
    ) -> npt.NDArray[np.generic]:
        """[threads, count] numbers of `size` bytes."""
        found = np.empty((len(address), count), _UNSIGNED[size])
        for region, chosen in self._regions(address):
            real, at = region.places(address[chosen], size, count)
            found[chosen] = read = region.view(size)[at]
            if size in _POISONED and (read == _POISONED[size]).any():
                raise UnwrittenError(f"{region.name}: read of memory that nothing wrote")
            self.accesses.append(Access(region.number, real, size * count, program[chosen], stamp[chosen], False, line))
        return found

    def store(
        self, address: Addresses, size: int, value: npt.NDArray[np.generic], program: Numbers, stamp: Numbers, line: int
    ) -> None:
        """`value`: [threads, count]."""
        count = value.shape[1]
        for region, chosen in self._regions(address):
            real, at = region.places(address[chosen], size, count)
            region.view(size)[at] = value[chosen]
            self.accesses.append(Access(region.number, real, size * count, program[chosen], stamp[chosen], True, line))

    def _regions(self, address: Addresses) -> list[tuple[Region, slice | npt.NDArray[np.bool_]]]:
        numbers = (address >> np.uint64(_APART)).astype(np.int64) - 1
        used = np.unique(numbers)
        if len(used) and not 0 <= used[0] <= used[-1] < len(self.regions):
            raise OutsideError("an address that is in no argument")
        if len(used) == 1:
            return [(self.regions[used[0]], slice(None))]
        return [(self.regions[n], numbers == n) for n in used]

    def check_races(self) -> None:
        """Raise RaceError where two threads used a byte, one of them to write, and nothing orders them."""
        written = [a for a in self.accesses if a.writes]
        if not written:
            return
        low, high = min(a.address.min() for a in written), max(a.address.max() + a.size for a in written)
        read = [a for a in self.accesses if not a.writes and a.address.max() + a.size > low and a.address.min() < high]
        piece = min(4, *(a.size for a in written + read))
        parts = [_pieces(a, piece) for a in written + read]
        place, program, stamp, writes, line = (np.concatenate(column) for column in zip(*parts, strict=True))
        thread, epoch = stamp & 0xFFFFF, stamp >> 20
        _check((place,), program, writes, line)
        _check((place, program, epoch >> 20), thread >> 5, writes, line)
        _check((place, program, epoch, thread >> 5), thread, writes, line)


def _pieces(a: Access, size: int) -> tuple[npt.NDArray[np.generic], ...]:
    count = a.size // size
    place = ((a.address // size)[:, None] + np.arange(count)).ravel()
    program, stamp = np.repeat(a.program, count), np.repeat(a.stamp, count)
    return place, program, stamp, np.full(place.size, a.writes), np.full(place.size, a.line)


def _check(
    keys: tuple[npt.NDArray[np.generic], ...], who: Numbers, writes: npt.NDArray[np.bool_], line: Numbers
) -> None:
    """Among uses with the same keys, if one writes, all must be by the same."""
    order = np.lexsort(keys)
    new = np.zeros(len(order), bool)
    new[0] = True
    for key in keys:
        new[1:] |= np.diff(key[order]) != 0
    starts = np.flatnonzero(new)
    several = np.minimum.reduceat(who[order], starts) != np.maximum.reduceat(who[order], starts)
    wrong = several & np.logical_or.reduceat(writes[order], starts)
    if wrong.any():
        group = np.searchsorted(starts, np.arange(len(order)), side="right") - 1 == np.argmax(wrong)
        raise RaceError(
            f"lines {sorted(set(line[order][group].tolist()))}: threads use one place, one writes, nothing orders them"
        )
