"""The processors of one machine, each with its memory, in integers: picoseconds and bytes.

Rungs are chosen by the bytes that one layer's FFN reads for a token, and the time that takes:

    T  =  2 launches + predictor ÷ rate      on rungs that pick
       +  2 launches + first ÷ rate + rest ÷ rate

with all neurons on one processor: a second processor's share is decided later, by placing. Rungs that pick gather rows
of `first`; all rungs but the dense one gather rows of `rest`. Without a GPU a dense layer is stored as matrices, which
read prompts quicker than neurons do: what a layer of neurons takes longer for `PROMPT_TOKENS` of a prompt is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pi_compile.machine import Cpu, Gpu, Machine, Rates, to_units
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.rungs import Rung
from pi_runtime.artifact.schema import SIDES, Layer
from pi_runtime.artifact.sizes import FfnBytes

ATTENTION_LAUNCHES, PREDICTOR_LAUNCHES, FFN_LAUNCHES = 3, 2, 2
"""Operators of a layer. Attention: queries, keys and values; attention over the cache; its output. Predictor: down and
up. FFN: `first` and `rest`."""

PROMPT_TOKENS = 4
"""Tokens of prompts for each token that is decoded, where rungs are chosen."""

PICO = 10**12
CPU, GPU = 0, 1
"""Indices of a machine's processors. The sides of a placement are these numbers; `SIDES` are their names."""


@dataclass(frozen=True)
class Processor:
    """Rates and launch time of a CPU or a GPU."""

    name: str
    launch_ps: int
    """Starting one operator."""
    bytes_per_s: Mapping[str, int]
    """Reading a whole matrix, by number format; `""` is for other formats and for everything that is no matrix."""
    access_per_s: Mapping[str, Mapping[str, int]]
    """Bytes a second of other accesses, by access, then by format: `neurons` reads all neurons of a layer, `dense`
    those of a dense layer, `gather` the active ones only, `predictor` a predictor. A format that is not listed runs at
    its `bytes_per_s`."""
    attention_per_s: int | None
    """Bytes of keys and values a second, counted once for each query; None where reading them takes longer."""
    matrices: bool = False
    """Whether dense layers are stored as matrices, and read at that rate."""
    late_ps: Mapping[str, float] = field(default_factory=dict)
    """What a token of a prompt takes longer for a weight of an FFN by neuron than for one of a matrix, by format."""

    def rate(self, fmt: str, access: str = "") -> int:
        """Bytes a second at which this format is read."""
        return self.access_per_s.get(access, {}).get(fmt, self.bytes_per_s.get(fmt, self.bytes_per_s[""]))

    def ps(self, nbytes: int, fmt: str = "") -> int:
        """Picoseconds to read so many bytes, rounded up."""
        return -(-nbytes * PICO // self.rate(fmt))

    def prompt_ps(self, layer: Layer, neuron: FfnBytes) -> float:
        """Picoseconds that a token of a prompt takes longer in a layer than where it is stored as matrices."""
        d = neuron.d
        if layer.kind.dense or d.n_experts > 1:  # experts are always stored by neuron
            return 0.0
        return self.late_ps.get(neuron.ffn_format, 0.0) * d.d_ff * d.neuron_width * (1 + neuron.rest // neuron.first)

    def cache_ps(self, nbytes: int, queries: int) -> int:
        """Picoseconds of attention over `nbytes` of keys and values that `queries` queries share."""
        computing = 0 if self.attention_per_s is None else -(-nbytes * queries * PICO // self.attention_per_s)
        return max(self.ps(nbytes), computing)


@dataclass(frozen=True)
class Interconnect:
    """Time of a transfer between the two processors."""

    sync_ps: int
    bytes_per_s: int

    def ps(self, nbytes: int) -> int:
        """Picoseconds to transfer so many bytes and to wait for them."""
        return self.sync_ps + -(-nbytes * PICO // self.bytes_per_s)

    def round_trip_ps(self, nbytes: int) -> int:
        """Picoseconds to transfer so many bytes in both directions, with one wait."""
        return 2 * self.ps(nbytes) - self.sync_ps


def accesses(kind: Rung) -> tuple[str, str]:
    """How a rung reads `first` and `rest` (see `Processor.access_per_s`)."""
    if kind.dense:
        return "dense", "dense"
    return "gather" if kind.picks else "neurons", "gather"


def processors_of(machine: Machine, matrices: bool = True) -> tuple[Processor, ...]:
    """(CPU,) or (CPU, GPU). `matrices`: dense layers are stored as matrices where there is no GPU."""
    sections = zip(SIDES, (machine.cpu, machine.gpu), strict=True)
    whole = matrices and machine.gpu is None
    return tuple(_processor(name, section, whole) for name, section in sections if section is not None)


def interconnect_of(machine: Machine) -> Interconnect | None:
    """The interconnect of the two processors, if there are two."""
    if machine.link is None:
        return None
    return Interconnect(to_units(machine.link.sync_us, 10**6), to_units(machine.link.pcie_gb_per_s, 10**9))


def _processor(name: str, section: Cpu | Gpu, whole: bool) -> Processor:
    accesses = {
        "neurons": section.neurons_gb_per_s,
        "gather": section.gather_gb_per_s,
        "dense": {} if whole else section.neurons_gb_per_s,
        "predictor": section.predictor_gb_per_s,
    }
    attention = section.attention_gb_per_s
    return Processor(
        name=name,
        launch_ps=to_units(section.launch_us, 10**6),
        bytes_per_s={"": to_units(section.bandwidth_gb_per_s, 10**9), **_in_bytes(section.format_gb_per_s)},
        access_per_s={access: _in_bytes(rates) for access, rates in accesses.items()},
        attention_per_s=None if attention is None else to_units(attention, 10**9),
        matrices=whole,
        late_ps=_late(section) if whole else {},
    )


def _late(section: Cpu | Gpu) -> dict[str, float]:
    whole, neurons = _in_bytes(section.format_gflop_per_s), _in_bytes(section.neurons_gflop_per_s)
    return {fmt: max(0.0, 2 * PICO / neurons[fmt] - 2 * PICO / whole[fmt]) for fmt in whole.keys() & neurons.keys()}


def _in_bytes(rates: Rates) -> dict[str, int]:
    """The rates; a format without one has that of another, whose rows take about as long to unpack."""
    found = {str(fmt): to_units(rate, 10**9) for fmt, rate in rates.items()}
    return {f.name: found[f.timed_as] for f in FORMATS.values() if f.timed_as in found} | found


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Bytes per token of one layer's FFN, by what they are read for."""

    predictor: float = 0.0
    first: float
    rest: float

    @classmethod
    def of(cls, neuron: FfnBytes, layer: Layer, read: float, kept: float) -> "Reads":
        """Bytes from two shares of a layer's neurons: those whose `first` is read, and those computed to the end.

        The shares are of the neurons of all experts; a predictor is read for a token's experts only.
        """
        kind, predictor = layer.kind, layer.rank
        neurons, experts = neuron.d.neurons, neuron.d.experts_per_token
        return cls(
            predictor=0 if predictor is None else experts * neuron.predictor(predictor),
            first=(read * neurons if kind.picks else experts * neuron.d.d_ff) * neuron.first,
            rest=(experts * neuron.d.d_ff if kind.dense else kept * neurons) * neuron.rest,
        )

    @property
    def total(self) -> float:
        return self.predictor + self.first + self.rest

    def ps(self, layer: Layer, processor: Processor, neuron: FfnBytes) -> float:
        """Picoseconds on a processor, with the layer on its rung."""
        fmt, kind = neuron.ffn_format, layer.kind
        ps: float = FFN_LAUNCHES * processor.launch_ps
        first, rest = accesses(kind)
        ps += _ps(self.first, processor.rate(fmt, first))
        ps += _ps(self.rest, processor.rate(fmt, rest))
        if kind.picks:
            ps += PREDICTOR_LAUNCHES * processor.launch_ps
            ps += _ps(self.predictor, processor.rate(neuron.predictor_format, "predictor"))
        return ps


def _ps(nbytes: float, rate: int) -> float:
    return nbytes * 1e12 / rate
