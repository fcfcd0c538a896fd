"""The FFNs of a transformers model with another activation, a penalty on their neurons, and counts of those that fire.

The model keeps its parameters under their names; only the forward pass of each FFN is replaced:

    h = a(gate · x) (up · x)             y = down h                relu, relu2; fatrelu: a(z) = z where z > t, else 0
    h = a(gate · x) max(up · x, 0)       y = down h                drelu (TurboSparse)

Shape letters: N tokens, D model width, F neurons of one expert, X experts, L layers.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import nn

from pi_compile.torch_model.decoder import tokens_by_expert

Tensor = torch.Tensor


@dataclass
class Activation:
    """What an FFN does between its matrices."""

    name: str
    """`relu`, `drelu`, `relu2` or `fatrelu`."""
    threshold: float = 0.0
    """FATReLU's: values up to it become 0."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Products with gate and up → the neurons' values h."""
        a = F.threshold(gate, self.threshold, 0.0) if self.threshold else F.relu(gate)
        if self.name == "relu2":
            a = a.square()
        return a * (F.relu(up) if self.name == "drelu" else up)


class _Penalised(torch.autograd.Function):
    """Identity whose gradient is that of adding weight · Σ|h| to the loss.

    A term beside the loss would be lost where a layer is computed twice (activation checkpointing) and would run
    before its layer's weights are there (FSDP).
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: float) -> Tensor:
        ctx.save_for_backward(h)
        ctx.weight = weight
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (h,), (gradient,) = ctx.saved_tensors, gradients
        return gradient.add(h.sign(), alpha=ctx.weight), None


class LayerActivity:
    """What the neurons of one layer did while they were observed."""

    def __init__(self, neurons: int, experts: int, activation: Activation) -> None:
        self.neurons, self.experts, self.activation = neurons, experts, activation
        self.clear(count_each=False)

    def clear(self, *, count_each: bool) -> None:
        """Begin anew. `count_each` counts every neuron, not only all together."""
        self.values = 0
        self.fired = self.magnitude = self.gates = torch.zeros((), dtype=torch.float64)
        self.fired_XF = torch.zeros(self.experts, self.neurons, dtype=torch.int64) if count_each else None

    def observe(self, gate_NF: Tensor, h_NF: Tensor, expert: int) -> None:
        """Count the values of an expert's neurons that are not 0."""
        self.values += h_NF.numel()
        self.magnitude = self.magnitude.to(h_NF.device) + h_NF.abs().sum(dtype=torch.float32).double()
        self.gates = self.gates.to(h_NF.device) + gate_NF.abs().sum(dtype=torch.float32).double()
        if self.fired_XF is None:
            self.fired = self.fired.to(h_NF.device) + h_NF.count_nonzero()
        else:
            self.fired_XF = self.fired_XF.to(h_NF.device)
            self.fired_XF[expert] += h_NF.flatten(0, -2).count_nonzero(0)


class FfnActivity:
    """The FFNs of a model: their activation, the penalty's weight, and what their neurons did."""

    def __init__(self, activation: Activation) -> None:
        self.activation = activation
        """What the layers begin with; their thresholds may become others."""
        self.penalty = 0.0
        """Weight of Σ|h| over all values of one forward pass, in the loss of that pass."""
        self.layers: list[LayerActivity] = []
        self.experts_per_token = 1
        self._observing = False

    @contextmanager
    def observed(self, *, count_each: bool) -> Iterator[list[LayerActivity]]:
        """Observe the forward passes inside; those that a backward pass repeats belong outside."""
        for layer in self.layers:
            layer.clear(count_each=count_each)
        self._observing = True
        try:
            yield self.layers
        finally:
            self._observing = False

    def neurons(self, gate: Tensor, up: Tensor, layer: LayerActivity, expert: int = 0) -> Tensor:
        """The values h of the neurons, penalised and observed."""
        h = layer.activation(gate, up)
        if self._observing:
            with torch.no_grad():
                layer.observe(gate, h, expert)
        penalised: Tensor = _Penalised.apply(h, self.penalty) if self.penalty else h  # type: ignore[no-untyped-call]
        return penalised

    @property
    def thresholds(self) -> list[float]:
        """The threshold of each layer."""
        return [layer.activation.threshold for layer in self.layers]

    @thresholds.setter
    def thresholds(self, thresholds: Sequence[float]) -> None:
        for layer, threshold in zip(self.layers, thresholds, strict=True):
            layer.activation.threshold = threshold

    def values_per_token(self) -> int:
        """Values of h that one token has in all layers; of the experts, those that it is routed to."""
        return sum(layer.neurons * self.experts_per_token for layer in self.layers)

    def install(self, model: nn.Module) -> None:
        """Replace the forward pass of every FFN of the model, in the order of its layers."""
        self.experts_per_token = getattr(model.config, "num_experts_per_tok", None) or 1
        for ffn in _ffns(model):
            if hasattr(ffn, "gate_up_proj"):
                layer = LayerActivity(ffn.down_proj.shape[2], ffn.down_proj.shape[0], replace(self.activation))
                ffn.forward = _ExpertForward(ffn, self, layer)
            else:
                layer = LayerActivity(ffn.down_proj.in_features, 1, replace(self.activation))
                ffn.forward = _Forward(ffn, self, layer)
            self.layers.append(layer)

    def share_threshold(self, model: nn.Module) -> None:
        """Give all layers one threshold, by weights that compute the same: c times the gate, and up over c."""
        shared = math.exp(sum(map(math.log, self.thresholds)) / len(self.layers))
        with torch.no_grad():
            for ffn, threshold in zip(_ffns(model), self.thresholds, strict=True):
                for parameter, gates in _gates_and_ups(ffn):
                    parameter.mul_(shared / threshold if gates else threshold / shared)
        self.thresholds = [shared] * len(self.layers)


def _ffns(model: nn.Module) -> list[Any]:
    """The modules that compute gated FFNs, in the order of their layers."""
    return [m for m in model.modules() if hasattr(m, "gate_up_proj") or hasattr(m, "gate_proj")]


def _gates_and_ups(ffn: Any) -> list[tuple[Tensor, bool]]:
    """The weights and biases whose products go through the activation, each with whether it is of the gate."""
    if hasattr(ffn, "gate_up_proj"):
        gate, up = ffn.gate_up_proj.chunk(2, dim=1)
        return [(gate, True), (up, False)]
    layers = ((ffn.gate_proj, True), (ffn.up_proj, False))
    return [(parameter, gates) for layer, gates in layers for parameter in layer.parameters()]


@contextmanager
def observed(activity: FfnActivity | None, *, count_each: bool) -> Iterator[list[LayerActivity]]:
    """Observe the FFNs of a model, if it has another activation than its own."""
    if activity is None:
        yield []
        return
    with activity.observed(count_each=count_each) as layers:
        yield layers


@dataclass
class _Forward:
    """The forward pass of a gated FFN."""

    ffn: Any
    activity: FfnActivity
    layer: LayerActivity

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.ffn.down_proj(self.activity.neurons(self.ffn.gate_proj(x), self.ffn.up_proj(x), self.layer))
        return y


@dataclass
class _ExpertForward:
    """The forward pass of Mixtral's experts: those that the router takes, expert by expert."""

    ffn: Any
    activity: FfnActivity
    layer: LayerActivity

    def __call__(self, x_ND: Tensor, taken_NK: Tensor, route_weight_NK: Tensor) -> Tensor:
        y_ND = torch.zeros_like(x_ND)
        for e, tokens, weight in tokens_by_expert(taken_NK, route_weight_NK, self.layer.experts):
            gate, up = F.linear(x_ND[tokens], self.ffn.gate_up_proj[e]).chunk(2, dim=-1)
            y = F.linear(self.activity.neurons(gate, up, self.layer, e), self.ffn.down_proj[e])
            y_ND = y_ND.index_add(0, tokens, (y * weight).to(y_ND.dtype))
        return y_ND
