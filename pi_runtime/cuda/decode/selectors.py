"""How rungs that read only some rows of `first` name them: by a low-rank predictor, or by signs.

This is the one place of the GPU tier that knows the kinds of selectors: a further one needs its kernel, and a class in
`SELECTORS`.

Legend: N neurons that are asked for, D model width, R rank, K experts of a token, F neurons.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer
from pi_runtime.cuda.kernels import ffn_neurons, moe
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.kernels.moe import Routing
from pi_runtime.cuda.kernels.row_dot import linear
from pi_runtime.cuda.kernels.sign_selection import select_by_signs
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.memory.weights import DeviceWeights
from pi_runtime.cuda.memory.workspace import Workspace


def picks(layer: Layer) -> bool:
    """Whether the layer's rung reads only some rows of `first`."""
    return RUNGS[layer.rung].picks


@dataclass(frozen=True)
class Selector:
    """One layer's selector. `mark_*` return how many neurons one number of the workspace's counts is for."""

    layer: Layer
    prefix: str
    """What the names of its arrays begin with."""
    weights: DeviceWeights
    workspace: Workspace
    tiling: Tiling

    def prepare(self, routing: Routing | None) -> None:
        """Compute what the selection of all neurons shares."""

    def mark_range(self, low: int, high: int, marks_N: torch.Tensor) -> int:
        """Mark the selected ones of the neurons [low, high)."""
        raise NotImplementedError

    def mark_listed(self, candidates: NeuronList, routing: Routing, d_ff: int, marks_N: torch.Tensor) -> int:
        """Mark the selected ones of a list of expert · F + neuron, at their places in the list."""
        raise NotImplementedError


class LowRankSelector(Selector):
    """Neurons whose score  up · (down · x) + bias  is above 0."""

    def prepare(self, routing: Routing | None) -> None:
        down, x_D = self.weights.matrix(f"{self.prefix}down"), self.workspace.handover.x_D
        if routing is None:
            linear(down, None, x_D, self.workspace.r_R[: down.rows], self.tiling)
        else:
            rank = self.weights.matrix(f"{self.prefix}up").columns
            moe.predictor_down(down, routing, x_D, self._r_KR(rank, routing), self.tiling)

    def mark_range(self, low: int, high: int, marks_N: torch.Tensor) -> int:
        up, bias_F = self.weights.matrix(f"{self.prefix}up"), self.weights.arrays[f"{self.prefix}bias"]
        r_R, counts_F = self.workspace.r_R[: up.columns], self.workspace.counts_F
        return ffn_neurons.predict(up.slice(low, high), bias_F[low:high], r_R, marks_N, counts_F, self.tiling)

    def mark_listed(self, candidates: NeuronList, routing: Routing, d_ff: int, marks_N: torch.Tensor) -> int:
        up, bias_F = self.weights.matrix(f"{self.prefix}up"), self.weights.arrays[f"{self.prefix}bias"]
        r_KR, counts_F = self._r_KR(up.columns, routing), self.workspace.counts_F
        return moe.predict_listed(up, bias_F, r_KR, routing, candidates, d_ff, marks_N, counts_F, self.tiling)

    def _r_KR(self, rank: int, routing: Routing) -> torch.Tensor:
        return self.workspace.r_R[: rank * len(routing)].view(-1, rank)


class SignSelector(Selector):
    """Neurons whose row of `first` has the input's sign in enough columns."""

    def mark_range(self, low: int, high: int, marks_N: torch.Tensor) -> int:
        return self._mark(self.weights.arrays[f"{self.prefix}signs"][low:high], marks_N, None)

    def mark_listed(self, candidates: NeuronList, _routing: Routing, _d_ff: int, marks_N: torch.Tensor) -> int:
        return self._mark(self.weights.arrays[f"{self.prefix}signs"], marks_N, candidates)

    def _mark(self, signs_FW: torch.Tensor, marks_N: torch.Tensor, candidates: NeuronList | None) -> int:
        x_D, margin = self.workspace.handover.x_D, self.layer.margin
        return select_by_signs(signs_FW, len(x_D), margin, x_D, marks_N, self.workspace.counts_F, candidates)


SELECTORS: Mapping[str, type[Selector]] = {"low-rank": LowRankSelector, "signs": SignSelector}
"""Selectors by their kind, `Rung.selector`."""


def selector_of(
    layers: tuple[Layer, ...], layer: int, weights: DeviceWeights, workspace: Workspace, tiling: Tiling
) -> Selector:
    """The selector of a layer whose rung has one."""
    kind = RUNGS[layers[layer].rung].selector
    assert kind is not None, layers[layer]
    return SELECTORS[kind](layers[layer], f"layers/{layer}/predictor/", weights, workspace, tiling)
