"""Bytes that one layer's FFN reads for a token, and the time that takes, to choose rungs by.

    T  =  2 launches + predictor ÷ rate      on rungs that pick
       +  2 launches + first ÷ rate + rest ÷ rate

as in `token_time`, with all neurons on one processor: a second processor's share is decided later, by placing. Rungs
that pick gather rows of `first`; all rungs but the dense one gather rows of `rest`.
"""

from dataclasses import dataclass

from pi_compile.cost_model.processors import FFN_LAUNCHES, PREDICTOR_LAUNCHES, Processor
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import FfnBytes


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
        ps += _ps(self.first, processor.rate(fmt, "gather" if kind.picks else "neurons"))
        ps += _ps(self.rest, processor.rate(fmt, "neurons" if kind.dense else "gather"))
        if kind.picks:
            ps += PREDICTOR_LAUNCHES * processor.launch_ps
            ps += _ps(self.predictor, processor.rate(neuron.predictor_format, "predictor"))
        return ps


def _ps(nbytes: float, rate: int) -> float:
    return nbytes * 1e12 / rate
