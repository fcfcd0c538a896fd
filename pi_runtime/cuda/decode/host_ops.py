"""The CPU's work for one token beside a GPU: the compiled functions of `pi_runtime.kernels`, on the CPU's own memory.

Neurons of an expert from its cut on are the CPU's; without experts a layer is one expert of weight 1. Where the
residual is on the GPU, the FFN's input and the selected cold rows arrive in a handover, and the sum leaves in
`sum_to_device`. Where the residual is on the CPU, a handover with the selected hot rows leaves, and the GPU's sum
arrives in `sum_to_host`.

Shape letters: D model width, F neurons of the token's experts, X experts, K experts of a token, L layers, G key-value
heads, S positions, W words of a head's key.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pi_runtime.artifact.schema import Layer
from pi_runtime.cuda.decode.selectors import picks
from pi_runtime.cuda.memory.handover import HandoverArrays, PinnedBuffers
from pi_runtime.execution.cpu import CpuModel, positions_of
from pi_runtime.execution.executor import Floats
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.plan_layout import Cuts
from pi_runtime.kernels import moe
from pi_runtime.kernels.data import neuron_chunks
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS
from pi_runtime.kernels.forward import after_ffn, attention, embed, head
from pi_runtime.kernels.ops.neuron_selection import inputs_of
from pi_runtime.kernels.split_ffn import Integers, cold_sum, predict


class HostOps:
    """One artifact on the CPU, the token that is decoded, and the pinned memory that the GPU shares."""

    def __init__(
        self, model: CpuModel, layers: Sequence[Layer], cuts: Sequence[Cuts], pinned: PinnedBuffers, cache: KVCache
    ) -> None:
        self.model, self.layers, self.cuts = model, layers, cuts
        self.token_1, cfg = np.zeros(1, np.int64), model.cfg
        cache.reserve(1)  # building the schedule runs a token
        self.move_to(cache, 0)
        self._memory = neuron_chunks.chunks_of(cfg, model.workspace), inputs_of(model.workspace)
        self._tally_T3 = np.zeros((1, 3), np.int64)
        self._cut_LX = np.array([c.cut_X for c in cuts], np.int64)
        self._base_LX = np.array([c.base_X for c in cuts], np.int64)
        self._cold_F, self._cold_count = np.zeros(cfg.experts_per_token * cfg.d_ff, np.int32), 0
        self._own_sum = np.zeros(cfg.d_model, np.float32)
        self._send, self._recv = pinned.handover_to_device.arrays(), pinned.handover_to_host.arrays()
        self._sum_to_device, self._sum_to_host = pinned.sum_to_device.numpy(), pinned.sum_to_host.numpy()
        self._x_to_device, self._x_to_host = pinned.x_to_device.numpy(), pinned.x_to_host.numpy()

    def move_to(self, cache: KVCache, start: int) -> None:
        """Go on at position `start` of a sequence."""
        self.cache, self.start, self._at = cache, start, positions_of([(1, start, cache)])

    @property
    def x_1D(self) -> Floats:
        return self.model.workspace.x_TD[:1]

    def embed(self) -> None:
        m = self.model
        embed(m.cfg, m.ends, self.token_1, self._at.position_T, m.workspace, self.x_1D)

    def attention(self, layer: int) -> None:
        """x ← x + attention(norm(x)); then the FFN's input, and the token's experts."""
        m, w = self.model, self.model.table_LXW[layer, 0]
        attention(m.cfg, w, m.eps, m.cos_SJ, m.sin_SJ, self._at, layer, self.x_1D, m.workspace)

    def whole_ffn(self, layer: int) -> None:
        """x ← x + FFN, where no neuron is on the GPU."""
        m, ws, w_XW = self.model, self.model.workspace, self.model.table_LXW[layer]
        x_1D, select_1 = ws.normed_TD[:1], np.ones(1, np.int64)
        moe.ffn_of_experts(m.cfg, w_XW, x_1D, select_1, False, ws, self._tally_T3, self.x_1D)
        ws.rows_L2[layer] = self._tally_T3[0, neuron_chunks.READ :]
        after_ffn(m.cfg, w_XW[0], m.eps, self.x_1D)

    def send_handover(self) -> None:
        """Leave the FFN's input and the token's experts for the GPU."""
        ws, send, slots = self.model.workspace, self._send, len(self._send.expert_K)
        send.x_D[:] = ws.normed_TD[0]
        send.expert_K[:] = ws.expert_TK[0, :slots]
        send.route_weight_K[:] = ws.route_weight_TK[0, :slots]

    def select(self, layer: int) -> None:
        """Leave the selected hot rows for the GPU; keep the selected cold ones."""
        m, send = self.model, self._send
        own = self._cut_LX[layer], self._base_LX[layer]
        x_D, expert_K = m.workspace.normed_TD[0], m.workspace.expert_TK[0]
        lists = self._memory[1], send.index_F, self._cold_F
        send.count[0], self._cold_count = predict(m.cfg, m.table_LXW[layer], x_D, expert_K, *own, *lists)

    def cold_sum(self, layer: int) -> None:
        """Sum the cold neurons where the residual is on the CPU."""
        if self.cuts[layer].cold:
            x_D = self.model.workspace.normed_TD[0]
            self._cold_sum(layer, x_D, self._send, self._cold_count, self._cold_F, self._own_sum)

    def cold_sum_for_device(self, layer: int) -> None:
        """Sum the cold neurons where the residual is on the GPU, which fetches the sum."""
        recv = self._recv
        self._cold_sum(layer, recv.x_D, recv, int(recv.count[0]), recv.index_F, self._sum_to_device)

    def _cold_sum(
        self, layer: int, x_D: Floats, routed: HandoverArrays, count: int, index_F: Integers, sum_D: Floats
    ) -> None:
        """Sum the cold neurons of a handover's experts; where the rung selects, the first `count` listed ones."""
        m, cut_X, selects = self.model, self._cut_LX[layer], picks(self.layers[layer])
        expert_K, route_weight_K = (routed.expert_K, routed.route_weight_K) if len(cut_X) > 1 else _ONE_EXPERT
        routing, listed = (expert_K, route_weight_K), (selects, count, index_F)
        m.workspace.rows_L2[layer] = cold_sum(
            m.cfg, m.table_LXW[layer], x_D, *routing, cut_X, *listed, *self._memory, sum_D
        )

    def merge(self, layer: int) -> None:
        """x ← x + the cold neurons' sum + the GPU's sum + the bias."""
        if self.cuts[layer].cold:
            self.x_1D[0] += self._own_sum
        self.x_1D[0] += self._sum_to_host
        after_ffn(self.model.cfg, self.model.table_LXW[layer, 0], self.model.eps, self.x_1D)

    def send_residual(self) -> None:
        self._x_to_device[:] = self.x_1D[0]

    def receive_residual(self) -> None:
        self.x_1D[0] = self._x_to_host

    def head(self) -> None:
        """logits = norm(x) Wᵀ + bias."""
        m = self.model
        head(m.cfg, m.ends, m.eps, self.x_1D, m.workspace, m.workspace.logits_TV[:1])


def token_blocks(count: int, size: int = BLOCK_TOKENS) -> Iterator[slice]:
    """The tokens [0, count) in blocks of at most `size`, as many as the CPU works on at once."""
    for low in range(0, count, size):
        yield slice(low, min(count, low + size))


_ONE_EXPERT = np.zeros(1, np.int32), np.ones(1, np.float32)
"""The experts of a token, and their weights, in a layer without experts."""
