"""What a model does on text that it is not trained on: its loss in each window, and how often each neuron fires.

Shape letters: N windows, W tokens of a window, L layers, X experts, F neurons of one expert.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from accelerate import Accelerator

from pi_compile.sparsification.activation import FfnActivity, observed
from pi_compile.sparsification.data import Ids

Tensor = torch.Tensor
_AT_ONCE = 4096
"""Tokens of one forward pass."""


@dataclass(frozen=True)
class Evaluation:
    """What a model did on some windows."""

    losses_N: npt.NDArray[np.float64]
    """Mean −log p of the next token in each window."""
    sparsity_L: tuple[float, ...]
    """Share of a layer's values that are 0; () for a model with its own activation."""
    dead_L: tuple[float, ...]
    """Share of a layer's neurons that never fired on this text."""

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return math.exp(self.losses_N.mean())

    @property
    def sparsity(self) -> float:
        """Mean over the layers; 0 for a model with its own activation."""
        return float(np.mean(self.sparsity_L)) if self.sparsity_L else 0.0

    @property
    def dead(self) -> float:
        """Share of all neurons that never fired."""
        return float(np.mean(self.dead_L)) if self.dead_L else 0.0

    def facts(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {
            "perplexity": self.perplexity,
            "sparsity": self.sparsity,
            "sparsity_by_layer": list(self.sparsity_L),
            "dead": self.dead,
            "dead_by_layer": list(self.dead_L),
        }


def language_loss(logits_NWV: Tensor, ids_NW: Tensor) -> Tensor:
    """Mean −log p of each next token."""
    return F.cross_entropy(logits_NWV[:, :-1].flatten(0, 1).float(), ids_NW[:, 1:].flatten())


def evaluate(
    accelerator: Accelerator, model: Any, activity: FfnActivity | None, ids_NW: Ids, autocast: bool = False
) -> Evaluation:
    """Run the windows through the model; each process takes its share of them, and all get the same result."""
    n, window = ids_NW.shape
    at_once = max(1, _AT_ONCE // window)
    losses_N = torch.zeros(n, dtype=torch.float64)
    model.eval()
    starts = range(accelerator.process_index * at_once, n, accelerator.num_processes * at_once)
    observing = observed(activity, count_each=True)
    with torch.no_grad(), torch.autocast(accelerator.device.type, torch.bfloat16, enabled=autocast):
        with observing as layers:
            for start in starts:
                ids_BW = torch.from_numpy(ids_NW[start : start + at_once]).to(accelerator.device)
                losses_N[start : start + at_once] = _losses(model(ids_BW).logits, ids_BW)
        # FSDP gathers weights for every forward pass: all processes must do equally many.
        for _ in range(math.ceil(n / (at_once * accelerator.num_processes)) - len(starts)):
            model(torch.from_numpy(ids_NW[:1]).to(accelerator.device))
    model.train()
    losses_N = accelerator.reduce(losses_N.to(accelerator.device)).cpu()
    # A process without windows has counted nothing, so nothing has moved its counts to the device.
    counted = [layer.fired_XF.to(accelerator.device) for layer in layers if layer.fired_XF is not None]
    fired_LXF = [accelerator.reduce(fired_XF).cpu() for fired_XF in counted]
    values = n * window * (activity.experts_per_token if activity else 1)
    return Evaluation(
        losses_N.numpy(),
        tuple(1 - float(fired_XF.sum()) / (values * fired_XF.shape[1]) for fired_XF in fired_LXF),
        tuple(float((fired_XF == 0).double().mean()) for fired_XF in fired_LXF),
    )


def _losses(logits_BWV: Tensor, ids_BW: Tensor) -> Tensor:
    """The loss of each window."""
    return torch.stack([language_loss(logits_BWV[i : i + 1], ids_BW[i : i + 1]) for i in range(len(ids_BW))]).cpu()
