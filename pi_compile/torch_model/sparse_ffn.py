"""The FFN of one layer on its rung, in torch; `pi_runtime.kernels.reference` is the definition.

Every rung that leaves neurons out gives each neuron a score, and computes those whose score is above the layer's limit.
Shape letters: D model width, F neurons of all experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.predictor import Predictor, routed_neurons
from pi_runtime.artifact import rungs
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.schema import Layer

Tensor = torch.Tensor


def magnitudes(d: Decoder, w: td.NamedTensors, x: Tensor) -> Tensor:
    """(…, D) → (…, F) |a(z)|, the scores of the rung `threshold`; 0 in experts that the token is not routed to."""
    found = td.activate_(
        d, torch.nn.functional.linear(x[..., : d.d_model], w["ffn/first"], w.get("ffn/first_bias"))
    ).abs_()
    routed = routed_neurons(d, w, x)
    return found if routed is None else found.mul_(routed)


@dataclass(frozen=True, eq=False)
class SparseFfn:
    """One layer's rung with the tensors it needs."""

    layer: Layer
    predictor: Predictor | None = None
    """The predictor as the artifact stores it: its threshold is part of the bias."""

    def scores(self, d: Decoder, w: td.NamedTensors, x: Tensor) -> Tensor:
        """(…, D) → (…, F) scores, which the rung compares with its limit."""
        return SCORES[self.layer.rung](self, d, w, x)

    def apply(self, d: Decoder, w: td.NamedTensors, x: Tensor, h: Tensor) -> tuple[Tensor | None, Tensor]:
        """The neurons whose `first` is read, and their values h with those left out set to 0; both (…, F).

        The former is None where `first` is read for all neurons of the experts that a token is routed to.
        """
        rung = self.layer.kind
        if rung.exact:
            return None, h
        selected = self.scores(d, w, x) > self.layer.threshold
        routed = routed_neurons(d, w, x)
        if routed is not None:
            selected &= routed
        return selected if rung.picks else None, torch.where(selected, h, 0.0)


def _predicted(ffn: SparseFfn, _d: Decoder, _w: td.NamedTensors, x: Tensor) -> Tensor:
    assert ffn.predictor is not None
    return ffn.predictor.scores(x)


SCORES: Mapping[str, Callable[[SparseFfn, Decoder, td.NamedTensors, Tensor], Tensor]] = {
    "threshold": lambda _, d, w, x: magnitudes(d, w, x),
    "predicted": _predicted,
}
"""How each rung that leaves neurons out scores them."""

DENSE = SparseFfn(Layer(rung=rungs.DENSE))
"""A layer that computes everything."""
