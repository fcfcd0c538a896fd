"""Predictors: which neurons of a layer will fire, from the FFN's input, at a fraction of its bytes.

score = up (down x) + bias, a neuron is predicted where its score is above 0. N samples, D model width, F neurons,
R rank. The warm start is the best rank-R approximation of `first` in the inputs' own metric: with their second moment
C = E[x xᵀ] and its root S, the SVD of W S truncated to R (Eckart–Young for E‖Wx − Ŵx‖²). Training then lowers a
weighted cross-entropy; a threshold, folded into the bias, is set afterwards from what may be lost.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile import torch_decoder as td
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.quantisation import as_stored

Tensor = torch.Tensor
MISS_WEIGHT = 4.0
"""How much a miss of average weight costs against a false alarm: reading a row too many is cheap, a miss is not."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """down (R, D), up (F, R), bias (F,); neurons in the checkpoint's order."""

    down: Tensor
    up: Tensor
    bias: Tensor

    def scores(self, x_ND: Tensor) -> Tensor:
        return F.linear(F.linear(x_ND, self.down), self.up, self.bias)

    def shifted(self, threshold: float) -> "Predictor":
        """The predictor whose score 0 is this one's `threshold`."""
        return Predictor(self.down, self.up, self.bias - threshold)

    def stored_as(self, name: str) -> "Predictor":
        """What remains of it in a number format: what the runtime will compute with."""
        down, up = (torch.from_numpy(as_stored(name, m.cpu().numpy())).to(m.device) for m in (self.down, self.up))
        return Predictor(down, up, self.bias)


def starting_rank(d: Decoder, density: float, top_share: float, step: int) -> int:
    """Rank from sparsity and skewness, D · √density · 1.5 (1.2 − top_share), in whole steps.

    `top_share`: share of all activations that the hottest fifth of the neurons have. Sparse and skewed layers need
    less (PowerInfer, section 5.1); the constants are a start that candidates around it and the quality budget correct.
    """
    wished = d.d_model * math.sqrt(density) * 1.5 * (1.2 - top_share)
    return max(step, min(d.d_model // step, round(wished / step)) * step)


def second_moment(blocks: Iterable[Tensor], width: int) -> Tensor:
    """E[x xᵀ] (D, D) over blocks of samples, float64."""
    total, count = torch.zeros(width, width, dtype=torch.float64), 0
    for x in blocks:
        total += (x.T @ x).double().cpu()
        count += len(x)
    return total / count


def warm_start(first_FD: Tensor, bias_F: Tensor | None, moment_DD: Tensor, rank: int) -> Predictor:
    """The truncated SVD of W C^½; its scores approximate the pre-activations W x + b."""
    values, vectors = torch.linalg.eigh(moment_DD)
    values = values.clamp_min(float(values.max()) * 1e-9)
    root, inverse = ((vectors * values**p) @ vectors.T for p in (0.5, -0.5))
    u, s, vt = torch.linalg.svd(first_FD.double().cpu() @ root, full_matrices=False)
    up, down = (u[:, :rank] * s[:rank]).float(), (vt[:rank] @ inverse).float()
    bias = torch.zeros(len(first_FD)) if bias_F is None else bias_F.cpu()
    return Predictor(*(m.to(first_FD.device).contiguous() for m in (down, up, bias)))


def energy(h_NF: Tensor, w: td.Weights) -> Tensor:
    """(N, F) (h_i ‖rest_i‖)²: what the output loses, to first order, if neuron i is missed."""
    return torch.square(h_NF * torch.linalg.vector_norm(w["ffn/rest"][:, -1], dim=1))


def train(
    start: Predictor, batches: Iterator[Tensor], d: Decoder, w: td.Weights, *, steps: int, learning_rate: float
) -> Predictor:
    """Lower the weighted cross-entropy by AdamW over `steps` batches (N, D) of inputs; labels come from the weights.

    A neuron that fires weighs `MISS_WEIGHT` times the root of its energy over the mean; one that does not, 1.
    """
    first = next(batches)
    # Scores of unit spread, or the first steps would undo the warm start.
    spread = 1 / start.scores(first).std()
    leaves = [t.clone().requires_grad_() for t in (start.down, start.up * spread, start.bias * spread)]
    optimizer = torch.optim.AdamW(leaves, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps + 1)
    predictor = Predictor(*leaves)
    for _, x in zip(range(steps), batches, strict=False):
        with torch.no_grad():
            e = energy(td.neurons(d, w, x), w)
            fires = e > 0
            mean = e.sum() / fires.sum().clamp_min(1)
            weight = torch.where(fires, MISS_WEIGHT * (e / mean).clamp(0.05, 20).sqrt(), 1.0)
        loss = F.binary_cross_entropy_with_logits(predictor.scores(x), fires.float(), weight=weight)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return Predictor(*(t.detach() for t in leaves))


def thresholds_for(scores_NF: Tensor, energy_NF: Tensor, lost_shares: Sequence[float]) -> list[float]:
    """For each share, the highest threshold at which the neurons not predicted hold at most that much of the energy."""
    fires = energy_NF > 0
    scores, place = scores_NF[fires].sort()
    lost = energy_NF[fires][place].double().cumsum(0)
    if len(lost) == 0:
        return [float(scores_NF.max())] * len(lost_shares)
    may_lose = torch.tensor(lost_shares, dtype=torch.float64, device=lost.device) * lost[-1]
    stays = torch.searchsorted(lost, may_lose, right=True).clamp_max(len(lost) - 1)
    # A neuron is predicted if its score is *above* the threshold: stop just below the first one that must stay.
    return torch.nextafter(scores[stays], scores.new_tensor(-math.inf)).tolist()
