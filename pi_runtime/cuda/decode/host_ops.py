"""The CPU's work for one token beside a GPU: the compiled functions of `pi_runtime.kernels`, on buffers of its own.

Neurons from a layer's cut on are the CPU's. Where the residual is on the GPU, the FFN's input and the selected cold
rows arrive in a handover, and the sum leaves in `sum_to_device`. Where the residual is on the CPU, a handover with the
selected hot rows leaves, and the GPU's sum arrives in `sum_to_host`.

Legend: T tokens (here 1), D model width, F neurons, X experts, L layers, W columns of the weight table, S positions, J
pairs of columns that are rotated.
"""

from dataclasses import dataclass, field

import numpy as np

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.schema import Layer
from pi_runtime.cuda.decode.selectors import picks
from pi_runtime.cuda.memory.handover import HandoverArrays
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.execution.plan_layout import Cuts
from pi_runtime.kernels import ffn, moe
from pi_runtime.kernels.data.matrix_view import Halves
from pi_runtime.kernels.data.weight_table import Ends, KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.forward import after_ffn, attention, embed, head
from pi_runtime.kernels.split_ffn import cold_sum, predict


@dataclass
class Step:
    """The token that is decoded."""

    tokens: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    start: int = 0
    """Its position."""
    cache_L2GSW: Halves = field(default_factory=lambda: np.zeros((0, 2, 0, 0, 0), np.uint16))
    listed: int = 0
    """Selected cold neurons, in the workspace's list of candidates."""


@dataclass(frozen=True)
class HostOps:
    """One artifact on the CPU, its workspace, and the pinned memory that the GPU shares."""

    decoder: Decoder
    layers: tuple[Layer, ...]
    """How each layer is run."""
    cfg: KernelConfig
    ends: Ends
    table_LXW: Ints
    eps: np.float32
    cos_SJ: Floats
    sin_SJ: Floats
    workspace: Workspace
    cuts: tuple[Cuts, ...]
    step: Step
    send: HandoverArrays
    """The handover to the GPU."""
    recv: HandoverArrays
    """The handover from the GPU."""
    sum_to_device: Floats
    sum_to_host: Floats
    addresses: Ints
    """The workspace's addresses, as `cold_sum` takes them."""
    own_sum: Floats
    """The cold neurons' sum where the residual is on the CPU."""
    x_to_device: Floats
    x_to_host: Floats

    @property
    def x_1D(self) -> Floats:
        return self.workspace.x_TD[:1]

    def embed(self) -> None:
        embed(self.cfg, self.ends, self.step.tokens, self.step.start, self.workspace, self.x_1D)

    def attention(self, layer: int) -> None:
        """x ← x + attention(norm(x)); then the FFN's input."""
        s, cache = self.step, self.step.cache_L2GSW[layer]
        w = self.table_LXW[layer, 0]
        attention(self.cfg, w, self.eps, self.cos_SJ, self.sin_SJ, s.start, cache, self.x_1D, self.workspace)

    def whole_ffn(self, layer: int) -> None:
        """x ← x + FFN, where no neuron is on the GPU."""
        ws, w_XW = self.workspace, self.table_LXW[layer]
        ws.rows_L2[layer] = moe.step(self.cfg, w_XW, ws.normed_TD[0], ws)
        ffn.add_sums(ws.sums_CP, self.x_1D[0])
        after_ffn(self.cfg, w_XW[0], self.eps, self.x_1D)

    def selects(self, layer: int) -> bool:
        """Whether the layer's rung reads only some rows of `first`."""
        return picks(self.layers[layer])

    def send_handover(self) -> None:
        """Leave the FFN's input for the GPU."""
        self.send.x_D[:] = self.workspace.normed_TD[0]

    def select(self, layer: int) -> None:
        """Leave the selected hot rows for the GPU; keep the selected cold ones in the list of candidates."""
        found = predict(self.cfg, self.table_LXW[layer, 0], self.workspace.normed_TD[0], self.workspace)
        rows_F = self.workspace.candidates_F[:found]
        hot = int(np.searchsorted(rows_F, self.cuts[layer].hot))
        self.send.count[0] = hot
        self.send.index_F[:hot] = rows_F[:hot]
        rows_F[: found - hot] = rows_F[hot:].copy()
        self.step.listed = found - hot

    def cold_sum(self, layer: int) -> None:
        """Sum the cold neurons for an input of the CPU's own."""
        if self.cuts[layer].cold:
            self._cold_sum(layer, self.workspace.normed_TD[0], self.step.listed, self.own_sum)

    def cold_sum_for_device(self, layer: int) -> None:
        """Sum the cold neurons for the input that the GPU sent; the GPU fetches the sum."""
        count = 0
        if self.selects(layer):
            count = int(self.recv.count[0])
            self.workspace.candidates_F[:count] = self.recv.index_F[:count]
        self._cold_sum(layer, self.recv.x_D, count, self.sum_to_device)

    def _cold_sum(self, layer: int, x_D: Floats, count: int, sum_D: Floats) -> None:
        low, listed = self.cuts[layer].hot, self.selects(layer)
        count = count if listed else self.cuts[layer].cold
        kept = cold_sum(self.addresses, self.table_LXW[layer, 0], x_D, low, count, listed, sum_D)
        rows_L2 = self.workspace.rows_L2
        rows_L2[layer, 0], rows_L2[layer, 1] = count, kept

    def merge(self, layer: int) -> None:
        """x ← x + the cold neurons' sum + the GPU's sum + the bias."""
        if self.cuts[layer].cold:
            self.x_1D[0] += self.own_sum
        self.x_1D[0] += self.sum_to_host
        after_ffn(self.cfg, self.table_LXW[layer, 0], self.eps, self.x_1D)

    def send_residual(self) -> None:
        self.x_to_device[:] = self.x_1D[0]

    def receive_residual(self) -> None:
        self.x_1D[0] = self.x_to_host

    def head(self) -> None:
        """logits = norm(x) Wᵀ + bias."""
        ws = self.workspace
        head(self.cfg, self.ends, self.eps, self.x_1D, ws, ws.logits_TV[:1])
