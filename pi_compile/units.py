"""The processors of one machine, each with its memory, in integers: picoseconds and bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from pi_compile.machine_file import Cpu, Gpu, Machine, whole
from pi_runtime.artifact.checks import SIDES

PICO = 10**12
CPU, GPU = 0, 1
"""Places in the tuple of units. A plan's sides are these numbers; `SIDES` are their names."""


@dataclass(frozen=True)
class Unit:
    """What works on one side of a cut."""

    name: str
    launch_ps: int
    """Starting one operator: attention, predictor, FFN, or head."""
    bytes_per_s: Mapping[str, int]
    """Reading a whole matrix, by number format; other formats and everything else at `""`."""
    gathered_per_s: Mapping[str, int]
    """Reading picked rows; formats that are not here as `bytes_per_s`."""

    def rate(self, fmt: str, *, gathered: bool = False) -> int:
        """Bytes a second at which this format is read."""
        stream = self.bytes_per_s.get(fmt, self.bytes_per_s[""])
        return self.gathered_per_s.get(fmt, stream) if gathered else stream

    def ps(self, nbytes: int, fmt: str = "", *, gathered: bool = False) -> int:
        """Picoseconds to read so many bytes, rounded up."""
        return -(-nbytes * PICO // self.rate(fmt, gathered=gathered))


@dataclass(frozen=True)
class Link:
    """Between two units."""

    sync_ps: int
    bytes_per_s: int

    def ps(self, nbytes: int) -> int:
        """Handing so many bytes over, and being waited for."""
        return self.sync_ps + -(-nbytes * PICO // self.bytes_per_s)


def units_of(machine: Machine) -> tuple[Unit, ...]:
    """(CPU,) or (CPU, GPU)."""
    return tuple(_unit(name, s) for name, s in zip(SIDES, (machine.cpu, machine.gpu), strict=True) if s is not None)


def link_of(machine: Machine) -> Link | None:
    """The link between the two units, if there are two."""
    if machine.link is None:
        return None
    return Link(whole(machine.link.sync_us, 10**6), whole(machine.link.pcie_gb_per_s, 10**9))


def _unit(name: str, section: Cpu | Gpu) -> Unit:
    stream = {str(fmt): whole(rate, 10**9) for fmt, rate in section.format_gb_per_s.items()}
    picked = {str(fmt): whole(rate, 10**9) for fmt, rate in section.gather_gb_per_s.items()}
    rates = {"": whole(section.bandwidth_gb_per_s, 10**9), **stream}
    return Unit(name, whole(section.launch_us, 10**6), rates, picked)
