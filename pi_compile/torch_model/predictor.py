"""Predictors: low-rank matrices that predict, from the FFN's input, which neurons of a layer fire.

score = up (down x) + bias; a neuron is predicted to fire where its score is above 0. The warm start is the best rank-R
approximation of `first` in the metric of the inputs: with their second moment C = E[x xᵀ] and its root S, the SVD of
W S truncated to R (Eckart–Young for E‖Wx − Ŵx‖²). Training then lowers a weighted cross-entropy. A threshold is set
afterwards, from what may be lost, and becomes part of the bias.

Shape letters: N samples, D model width, X experts, F neurons of all experts, R rank.

What a layer computes on its rung is here too; `pi_runtime/kernels/reference.py` is the definition. Every rung that
leaves neurons out gives each neuron a score, and computes those whose score is above the layer's limit.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.torch_model import decoder as td
from pi_runtime.artifact import rungs
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.quantisation import as_stored
from pi_runtime.artifact.schema import Layer

Tensor = torch.Tensor
MISS_WEIGHT = 4.0
"""Cost of a false negative of average energy, in false positives: an extra row costs little, a missed neuron much."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """down (X·R, D), up (F, R), bias (F,); neurons in the checkpoint's order."""

    down: Tensor
    up: Tensor
    bias: Tensor

    def scores(self, x_ND: Tensor) -> Tensor:
        """(…, D) FFN inputs → (…, F) scores of the neurons."""
        # Behind the FFN's inputs a router's values may stand.
        inner, rank = F.linear(x_ND[..., : self.down.shape[1]], self.down), self.up.shape[1]
        if len(self.down) == rank:
            return F.linear(inner, self.up, self.bias)
        experts = self.up.view(len(self.down) // rank, -1, rank)
        return (
            torch.einsum("...xr,xfr->...xf", inner.view(*inner.shape[:-1], -1, rank), experts).flatten(-2) + self.bias
        )

    def shifted(self, threshold: float) -> "Predictor":
        """The predictor whose score 0 is this one's `threshold`."""
        return Predictor(self.down, self.up, self.bias - threshold)

    def stored_as(self, fmt: str) -> "Predictor":
        """The predictor rounded to a number format, as the runtime computes with it."""
        down, up = (torch.from_numpy(as_stored(fmt, m.cpu().numpy())).to(m.device) for m in (self.down, self.up))
        return Predictor(down, up, self.bias)


def initial_rank(d: Decoder, density: float, top_share: float, step: int) -> int:
    """The rank that suits a layer's sparsity and skewness: D · √density · 1.5 (1.2 − top_share), in whole steps.

    `top_share` is the fraction of all activations that the hottest fifth of the neurons have. Sparse and skewed layers
    need lower ranks (PowerInfer, section 5.1). The constants are a first guess: the search around it corrects them.
    """
    wanted = d.neuron_width * math.sqrt(density) * 1.5 * (1.2 - top_share)
    return max(step, min(d.neuron_width // step, round(wanted / step)) * step)


def second_moment(blocks: Iterable[Tensor], width: int) -> Tensor:
    """The second moment E[x xᵀ] (D, D) over blocks of samples, in float64."""
    total, count = torch.zeros(width, width, dtype=torch.float64), 0
    for block in blocks:
        x = block[:, :width]
        total += (x.T @ x).double().cpu()
        count += len(x)
    return total / count


@dataclass(frozen=True, eq=False)
class WarmStarts:
    """The truncated SVD of W C^½ at any rank; its scores approximate the pre-activations W x + b."""

    down_XRD: Tensor
    up_FR: Tensor
    bias_F: Tensor

    @classmethod
    def of(cls, first_FD: Tensor, bias_F: Tensor | None, moment_DD: Tensor, n_experts: int = 1) -> "WarmStarts":
        """The factors at full rank, from the layer's weights and its inputs' second moment."""
        values, vectors = torch.linalg.eigh(moment_DD.to(first_FD.device))
        values = values.clamp_min(float(values.max()) * 1e-9)
        root, inverse = ((vectors * values**p) @ vectors.T for p in (0.5, -0.5))
        factors = [_svd(w.double() @ root, inverse) for w in first_FD.chunk(n_experts)]
        ups, downs = zip(*factors, strict=True)
        bias = first_FD.new_zeros(len(first_FD)) if bias_F is None else bias_F
        return cls(torch.stack(downs), torch.cat(ups), bias)

    def at(self, rank: int) -> Predictor:
        """The best predictor of this rank, in each expert."""
        down_RD = self.down_XRD[:, :rank].flatten(0, 1)
        return Predictor(down_RD.contiguous(), self.up_FR[:, :rank].contiguous(), self.bias_F.clone())

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The factors by the names of the fields."""
        return {f.name: getattr(self, f.name).numpy(force=True) for f in fields(self)}


def _svd(m_FD: Tensor, inverse_DD: Tensor) -> tuple[Tensor, Tensor]:
    """The factors U S and Vᵀ C^−½ of the matrix M = W C^½ with the SVD U S Vᵀ.

    V are the eigenvectors of Mᵀ M, which is smaller than M, and U S = M V.
    """
    _, vectors = torch.linalg.eigh(m_FD.T @ m_FD)
    v_DD = vectors.flip(1)
    return (m_FD @ v_DD).float(), (v_DD.T @ inverse_DD).float()


def energy(h_NF: Tensor, w: td.NamedTensors) -> Tensor:
    """(N, F) energies (h_i ‖rest_i‖)²: what their sum loses, to first order, if neuron i is left out."""
    return torch.square(h_NF * torch.linalg.vector_norm(w["ffn/rest"][:, -1], dim=1))


def routed_neurons(d: Decoder, w: td.NamedTensors, x: Tensor) -> Tensor | None:
    """(…, D) → (…, F) neurons of the experts that a token is routed to; None where there is one expert."""
    return None if d.n_experts == 1 else (td.routing(d, w, x) > 0).repeat_interleave(d.d_ff, -1)


def train(
    starts: Sequence[Predictor],
    batches: Iterator[Tensor],
    d: Decoder,
    w: td.NamedTensors,
    *,
    steps: int,
    learning_rate: float,
    on_step: Callable[[], None] = lambda: None,
) -> list[Predictor]:
    """Lower the weighted cross-entropy by AdamW over `steps` batches (N, D) of inputs; labels come from the weights.

    A neuron that fires weighs `MISS_WEIGHT` times the root of its energy over the mean; one that does not weighs 1.
    Predictors of several ranks are trained side by side, each as if alone: the labels cost most, and are made once.
    `on_step` is called after each step.
    """
    first = next(batches)
    predictors = [_trainable(start, first) for start in starts]
    leaves = [leaf for p in predictors for leaf in (p.down, p.up, p.bias)]
    optimizer = torch.optim.AdamW(leaves, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps + 1)
    for _, x in zip(range(steps), batches, strict=False):
        with torch.no_grad():
            fires, weight = _labels(d, w, x)
        optimizer.zero_grad()
        for p in predictors:
            loss = F.binary_cross_entropy_with_logits(p.scores(x), fires, weight=weight)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        on_step()
    return [Predictor(p.down.detach(), p.up.detach(), p.bias.detach()) for p in predictors]


def _trainable(start: Predictor, x_ND: Tensor) -> Predictor:
    """A copy of a predictor whose tensors take gradients."""
    # Scores with a standard deviation of 1, or the first steps would undo the warm start.
    scale = 1 / start.scores(x_ND).std()
    return Predictor(*(t.clone().requires_grad_() for t in (start.down, start.up * scale, start.bias * scale)))


def _labels(d: Decoder, w: td.NamedTensors, x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """(N, F) labels, 1 where a neuron fires, else 0, and the weight of a wrong answer."""
    e = energy(td.neurons(d, w, x_ND), w)
    fires = e > 0
    mean = e.sum() / fires.sum().clamp_min(1)
    weight = torch.where(fires, MISS_WEIGHT * (e / mean).clamp(0.05, 20).sqrt(), 1.0)
    routed = routed_neurons(d, w, x_ND)
    return fires.float(), weight if routed is None else weight * routed


def magnitudes(d: Decoder, w: td.NamedTensors, x: Tensor) -> Tensor:
    """(…, D) → (…, F) |a(z)|, the scores of the rung `threshold`; 0 in experts that the token is not routed to."""
    found = td.activate_(
        d, torch.nn.functional.linear(x[..., : d.neuron_width], w["ffn/first"], w.get("ffn/first_bias"))
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
