"""Threads of some programs of a grid, run together until all have ended.

All threads at one block of instructions run it at once. Of several blocks the first one in the text comes next, so that
threads that parted meet again. `Schedule` draws which programs run together, and which warps go ahead of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from support.ptx import warps
from support.ptx.arithmetic import Lanes
from support.ptx.faults import BarrierError, PtxError, RaceError, UnknownInstructionError
from support.ptx.global_memory import GlobalMemory
from support.ptx.parsing import Instruction
from support.ptx.races import Numbers, stamps
from support.ptx.registers import Mask, Registers
from support.ptx.shared_memory import SharedMemory
from support.ptx.translating import Translated

TOGETHER = 8192
"""Threads that run at once, about: NumPy is fast from some thousands on."""
_END = 1 << 30


class Schedule:
    """Draws an order of programs and warps; the same seed, the same orders."""

    def __init__(self, seed: int = 0, groups: Sequence[int] = (1, 1, 2)) -> None:
        """`groups`: into how many groups warps may be parted, one of which runs ahead up to the next barrier."""
        self._rng, self._groups = np.random.default_rng(seed), groups

    def parts(self, programs: int, most: int) -> list[Numbers]:
        """Programs in any order, at most so many together."""
        order = self._rng.permutation(programs)
        return [order[start : start + most] for start in range(0, programs, most)]

    def groups(self) -> int:
        return int(self._rng.choice(self._groups))

    def ranks(self, warps_: int, groups: int) -> Numbers:
        """Which group each warp is in."""
        return self._rng.integers(0, groups, warps_)


@dataclass(frozen=True)
class Grid:
    """Programs in three directions, and the shared memory of one."""

    size: tuple[int, int, int]
    shared: int


def run(kernel: Translated, grid: Grid, parameters: dict[str, Lanes], memory: GlobalMemory, schedule: Schedule) -> None:
    """Run every program of a grid. Raises PtxError."""
    x, y, z = grid.size
    with np.errstate(all="ignore"):
        for programs in schedule.parts(x * y * z, max(1, TOGETHER // kernel.kernel.threads)):
            Machine(kernel, grid, programs, parameters, memory, schedule).run()
    try:
        memory.check_races()
    except RaceError as error:
        raise RaceError(f"{kernel.kernel.name}, {error}") from error


class Machine:
    """The state of the threads of some programs."""

    def __init__(
        self, translated: Translated, grid: Grid, programs: Numbers, parameters: dict[str, Lanes],
        memory: GlobalMemory, schedule: Schedule,
    ) -> None:  # fmt: skip
        threads = translated.kernel.threads
        self._translated, self._threads, self.parameters, self._memory = translated, threads, parameters, memory
        self._schedule, self._groups = schedule, schedule.groups()
        count = threads * len(programs)
        self.shared = SharedMemory(len(programs), grid.shared, translated.piece, count)
        self._own = np.repeat(np.arange(len(programs)), threads)
        self._program = np.repeat(programs, threads)
        self._thread = np.tile(np.arange(threads), len(programs))
        self._program_epoch, self._warp_epoch = np.ones(count, np.int64), np.ones(count, np.int64)
        self._block, self._waiting = np.zeros(count, np.int64), np.zeros(count, bool)
        self._barrier = np.zeros(count, np.int64)
        self.registers = self._special(grid, programs)
        self._draw()

    def _special(self, grid: Grid, programs: Numbers) -> Registers:
        x, y, _ = grid.size
        at = {"x": programs % x, "y": programs // x % y, "z": programs // (x * y)}
        found = Registers({f"%ctaid.{d}": np.repeat(p, self._threads).astype(np.uint32) for d, p in at.items()})
        found |= {"%tid.x": self._thread.astype(np.uint32), "%laneid": (self._thread % warps.WARP).astype(np.uint32)}
        return found

    def _draw(self) -> None:
        rank = self._schedule.ranks(len(self._thread) // warps.WARP, self._groups)
        self._rank = np.repeat(rank, warps.WARP)

    def run(self) -> None:
        """Until every thread has ended."""
        while True:
            ready = ~self._waiting & (self._block != _END)
            if not ready.any():
                break
            if self._groups > 1:
                ready &= self._rank == self._rank[ready].min()
            block = int(self._block[ready].min())
            ready &= self._block == block
            self._run_block(block, None if ready.all() else ready)
        if self._waiting.any():
            raise BarrierError(f"{self._translated.kernel.name}: threads wait at a barrier where others have ended")

    def _run_block(self, number: int, mask: Mask) -> None:
        block = self._translated.kernel.blocks[number]
        for instruction, step in zip(block.body, self._translated.steps[number], strict=True):
            try:
                step(self, mask)
            except PtxError as error:
                raise type(error)(f"{self._translated.kernel.name}, {instruction}: {error}") from error
        everyone = self.flags(mask)
        self._block[everyone] = number + 1
        if block.end is not None:
            self._end_block(block.end, everyone, number)

    def _end_block(self, end: Instruction, active: npt.NDArray[np.bool_], number: int) -> None:
        taking = self.guarded(end.guard, end.negated, active)
        assert taking is not None
        if end.opcode == "ret":
            self._block[taking] = _END
        elif end.opcode == "bar.sync":
            if end.operands != ("0",) or end.guard:
                raise BarrierError(f"{end}: only a barrier of all threads is known")
            self._waiting[active] = True
            self._barrier[active] = number
            self._release()
        else:
            self._block[taking] = self._translated.kernel.labels[end.operands[0]]

    def _release(self) -> None:
        """Let the programs go on whose threads have all come to the barrier."""
        all_wait = self._waiting.reshape(-1, self._threads).all(1)
        barriers = self._barrier.reshape(-1, self._threads)[all_wait]
        if (barriers != barriers[:, :1]).any():
            raise BarrierError(f"{self._translated.kernel.name}: a program's threads wait at different barriers")
        go = np.repeat(all_wait, self._threads)
        self._waiting[go] = False
        self._program_epoch[go] += 1
        if self._groups > 1 and all_wait.any():
            self._draw()

    # What instructions ask for.

    def flags(self, mask: Mask) -> npt.NDArray[np.bool_]:
        """The threads that take part."""
        return np.ones(len(self._thread), bool) if mask is None else mask

    def taking(self, mask: Mask) -> Numbers:
        """Their numbers."""
        return np.flatnonzero(self.flags(mask))

    def guarded(self, guard: str | None, negated: bool, mask: Mask) -> Mask:
        """Those of them whose guard is true, or false if `negated`."""
        if guard is None:
            return mask
        value = self.every(self.registers[guard]) != negated
        if mask is not None:
            return value & mask
        return None if value.all() else value

    def every(self, value: Lanes) -> Lanes:
        """A value for each thread."""
        return np.broadcast_to(value, self._thread.shape)

    def spread(self, value: Lanes, mask: Mask) -> Lanes:
        """Values of the threads that take part, at their places among all."""
        if mask is None:
            return value
        found = np.zeros(len(mask), value.dtype)
        found[mask] = value
        return found

    def now(self) -> Numbers:
        """A stamp for each thread."""
        return stamps(self._program_epoch, self._warp_epoch, self._thread)

    def warp_barrier(self, members: Lanes, mask: Mask) -> None:
        warps.check_whole(mask)
        warps.check_members(members)
        self._warp_epoch[self.flags(mask)] += 1

    def load(self, space: str, address: Lanes, size: int, count: int, mask: Mask, line: int) -> Lanes:
        """[threads that take part, count] numbers of `size` bytes."""
        at, now = self._chosen(address, mask), self._chosen(self.now(), mask)
        if space == "global":
            return self._memory.load(at, size, count, self._chosen(self._program, mask), now, line)
        return self.shared.load(self._chosen(self._own, mask), at.astype(np.int64), size, count, now)

    def store(self, space: str, address: Lanes, size: int, values: list[Lanes], mask: Mask, line: int) -> None:
        at, now = self._chosen(address, mask), self._chosen(self.now(), mask)
        value = np.stack([self._chosen(v, mask) for v in values], 1)
        if space == "global":
            self._memory.store(at, size, value, self._chosen(self._program, mask), now, line)
        else:
            self.shared.store(self._chosen(self._own, mask), at.astype(np.int64), size, value, now)

    def copy(self, target: Lanes, source: Lanes, count: int, size: Lanes, mask: Mask, line: int) -> None:
        """Begin a copy of `count` bytes for each thread; where `size` is 0, of zeros."""
        size = self._chosen(size, mask)
        if not np.isin(size, (0, count)).all():
            raise UnknownInstructionError("a copy of less than all its bytes")
        program, now = self._chosen(self._program, mask), self._chosen(self.now(), mask)
        data = np.zeros((len(size), count // 4), np.uint32)
        if (whole := size == count).any():
            at = self._chosen(source, mask)[whole]
            data[whole] = self._memory.load(at, 4, count // 4, program[whole], now[whole], line)
        to, own = self._chosen(target, mask).astype(np.int64), self._chosen(self._own, mask)
        self.shared.copy(self.taking(mask), own, to, data.view(np.uint8), now)

    def _chosen(self, value: Lanes, mask: Mask) -> Lanes:
        value = self.every(value)
        return value if mask is None else value[mask]
