"""What a layer computes of its FFN on each rung, in torch; `pi_runtime.kernels.reference` is the definition."""

from dataclasses import dataclass

import torch

from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.predictor import Predictor, routed
from pi_runtime.artifact.decoder import Decoder

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """How one layer is run: its rung with what belongs to it (see `pi_runtime.artifact.schema.Layer`)."""

    rung: str = "dense"
    predictor: Predictor | None = None
    """As stored, its threshold at 0."""
    threshold: float = 0.0
    margin: int = 0

    def reads(self, d: Decoder, w: td.Weights, x: Tensor) -> Tensor | None:
        """(…, D) → (…, F): the neurons whose `first` is read; None for all that a token's experts have."""
        if self.predictor is not None:
            read = self.predictor.scores(x) > 0
        elif self.rung == "sign":
            read = agreement(w, x) > self.margin
        else:
            return None
        looked_at = routed(d, w, x)
        return read if looked_at is None else read & looked_at

    def keeps(self, d: Decoder, w: td.Weights, x: Tensor, h: Tensor, read: Tensor | None) -> Tensor:
        """What is left of the neuron values h."""
        if self.rung == "threshold":
            return torch.where(magnitudes(d, w, x) > self.threshold, h, 0.0)
        return h if read is None else torch.where(read, h, 0.0)


def magnitudes(d: Decoder, w: td.Weights, x: Tensor) -> Tensor:
    """(…, D) → (…, F) |a(z)|, what the rung `threshold` looks at; 0 in experts that a token does not go to."""
    found = td.activate_(d, torch.nn.functional.linear(x, w["ffn/first"], w.get("ffn/first_bias"))).abs_()
    looked_at = routed(d, w, x)
    return found if looked_at is None else found.mul_(looked_at)


def agreement(w: td.Weights, x: Tensor) -> Tensor:
    """(…, D) → (…, F): columns in which weight and input have the same sign, less those in which they differ."""
    weights, inputs = (1.0 - 2.0 * (t < 0) for t in (w["ffn/first"], x))
    return inputs @ weights.T
