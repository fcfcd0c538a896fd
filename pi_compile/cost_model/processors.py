"""The processors of one machine, each with its memory, in integers: picoseconds and bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from pi_compile.machine.profile import Cpu, Gpu, Machine, Rates, to_units
from pi_runtime.artifact.schema import SIDES

PICO = 10**12
CPU, GPU = 0, 1
"""Places in the tuple of units. A plan's sides are these numbers; `SIDES` are their names."""


@dataclass(frozen=True)
class Unit:
    """What works on one side of a cut."""

    name: str
    launch_ps: int
    """Starting one operator."""
    bytes_per_s: Mapping[str, int]
    """Reading a whole matrix, by number format; other formats and everything else at `""`."""
    others_per_s: Mapping[str, Mapping[str, int]]
    """The same by what is read otherwise: `neurons`, all of a layer; `picked` ones; a `predictor`. Formats that are not
    here as `bytes_per_s`."""
    queried_per_s: int | None
    """Bytes of keys and values worked through, once for each query; None where reading them takes longer."""

    def rate(self, fmt: str, what: str = "") -> int:
        """Bytes a second at which this format is read."""
        return self.others_per_s.get(what, {}).get(fmt, self.bytes_per_s.get(fmt, self.bytes_per_s[""]))

    def ps(self, nbytes: int, fmt: str = "", what: str = "") -> int:
        """Picoseconds to read so many bytes, rounded up."""
        return -(-nbytes * PICO // self.rate(fmt, what))

    def cache_ps(self, nbytes: int, queries: int) -> int:
        """Picoseconds of attention over `nbytes` of keys and values, each worked through by so many queries."""
        computing = 0 if self.queried_per_s is None else -(-nbytes * queries * PICO // self.queried_per_s)
        return max(self.ps(nbytes), computing)


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
    return Link(to_units(machine.link.sync_us, 10**6), to_units(machine.link.pcie_gb_per_s, 10**9))


def _unit(name: str, section: Cpu | Gpu) -> Unit:
    others = {
        "neurons": section.neurons_gb_per_s,
        "picked": section.gather_gb_per_s,
        "predictor": section.predictor_gb_per_s,
    }
    queried = section.attention_gb_per_s
    return Unit(
        name=name,
        launch_ps=to_units(section.launch_us, 10**6),
        bytes_per_s={"": to_units(section.bandwidth_gb_per_s, 10**9), **_in_bytes(section.format_gb_per_s)},
        others_per_s={what: _in_bytes(rates) for what, rates in others.items()},
        queried_per_s=None if queried is None else to_units(queried, 10**9),
    )


def _in_bytes(rates: Rates) -> dict[str, int]:
    return {str(fmt): to_units(rate, 10**9) for fmt, rate in rates.items()}
