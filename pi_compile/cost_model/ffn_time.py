"""What one layer's FFN reads of memory for a token, and the time that takes: what rungs are chosen by.

    T  =  2 launches + predictor ÷ rate      on the rungs predicted and sign
       +  2 launches + first ÷ rate + rest ÷ rate

as in `cost`, with all neurons on one unit: what a second one takes off it is decided later. `first` is gathered on
the rungs that predict, `rest` on all but dense.
"""

from dataclasses import dataclass

from pi_compile.cost_model.processors import Unit
from pi_compile.cost_model.token_time import FFN_LAUNCHES, PREDICTOR_LAUNCHES
from pi_runtime.artifact.sizes import SIGNS, FfnBytes

PREDICTING = ("predicted", "sign")
"""Rungs on which only some rows of `first` are read."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Bytes per token of one layer's FFN, by what they are read for."""

    rung: str
    predictor: float
    first: float
    rest: float

    @classmethod
    def of(cls, neuron: FfnBytes, rung: str, predictor: int | None, read: float, kept: float) -> "Reads":
        """From the shares of a layer's neurons whose `first` is read and that are computed to the end.

        `predictor`: its rank, `SIGNS` or None, as `schema.Layer.predictor`. Of several experts, a token reads those
        that it goes to; shares are of all experts' neurons.
        """
        neurons, taken = neuron.d.neurons, neuron.d.experts_per_token
        return cls(
            rung=rung,
            predictor=0 if predictor is None else taken * neuron.predictor(predictor),
            first=(read * neurons if rung in PREDICTING else taken * neuron.d.d_ff) * neuron.first,
            rest=(taken * neuron.d.d_ff if rung == "dense" else kept * neurons) * neuron.rest,
        )

    @property
    def total(self) -> float:
        return self.predictor + self.first + self.rest

    def ps(self, unit: Unit, neuron: FfnBytes) -> float:
        """Picoseconds on a unit."""
        neurons, predicting = neuron.ffn_format, self.rung in PREDICTING
        ps: float = FFN_LAUNCHES * unit.launch_ps
        ps += _ps(self.first, unit.rate(neurons, "picked" if predicting else "neurons"))
        ps += _ps(self.rest, unit.rate(neurons, "neurons" if self.rung == "dense" else "picked"))
        if predicting:
            # Signs are no number format: they are read as fast as the memory delivers.
            fmt = "" if self.rung == "sign" else neuron.predictor_format
            ps += PREDICTOR_LAUNCHES * unit.launch_ps + _ps(self.predictor, unit.rate(fmt, "predictor"))
        return ps


def _ps(nbytes: float, rate: int) -> float:
    return nbytes * 1e12 / rate


def predictor_of(rung: str, rank: int | None) -> int | None:
    """What `schema.Layer.predictor` says of such a layer."""
    return SIGNS if rung == "sign" else rank
