"""How rungs that read only some rows of `first` name them: by a low-rank predictor.

Shape letters: M tokens, N neurons that are asked for, D model width, R rank, K experts of a token (1 without experts).
"""

from dataclasses import dataclass

import torch

from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.kernels.ffn_neurons import predict
from pi_runtime.cuda.kernels.row_dot import linear
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.memory.weights import DeviceWeights
from pi_runtime.cuda.memory.workspace import DeviceWorkspace


def picks(layer: Layer) -> bool:
    """Whether the layer's rung reads only some rows of `first`."""
    return RUNGS[layer.rung].picks


@dataclass(frozen=True)
class Selector:
    """One layer's selector: neurons whose score  up · (down · x) + bias  is above 0."""

    layer: Layer
    prefix: str
    """What the names of its arrays begin with."""
    weights: DeviceWeights
    workspace: DeviceWorkspace
    tiling: Tiling
    expert_MK: torch.Tensor | None
    """The tokens' experts; None where the layer has only one."""
    d_ff: int
    """Neurons of one expert."""

    def prepare(self) -> None:
        """Compute what the selection of all neurons shares."""
        down, x_MD = self.weights.matrix(f"{self.prefix}down"), self.workspace.handover.x_MD
        linear(down, None, x_MD, self._r_MR, self.tiling, expert_MK=self.expert_MK)

    def mark(self, low: int, high: int, candidates: NeuronList | None, marks_MN: torch.Tensor) -> int:
        """Mark the selected ones of the neurons [low, high), or of the candidates at their places in the list.

        Candidates are rows of these neurons, expert · d_ff + neuron. Returns how many neurons one number of the
        workspace's counts is for.
        """
        up, bias_F = self.weights.matrix(f"{self.prefix}up"), self.weights.arrays[f"{self.prefix}bias"]
        counts_MF = self.workspace.counts_MF
        return predict(
            up[low:high], bias_F[low:high], self._r_MR, marks_MN, counts_MF, self.tiling, candidates,
            self.expert_MK, self.d_ff,
        )  # fmt: skip

    @property
    def _r_MR(self) -> torch.Tensor:
        """R numbers for each of a token's experts."""
        rank = self.weights.matrix(f"{self.prefix}up").columns
        return self.workspace.r_MR[:, : rank * (1 if self.expert_MK is None else self.expert_MK.shape[1])]
