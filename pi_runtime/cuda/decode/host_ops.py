"""The CPU's work for some tokens, each of its own sequence, beside a GPU: the compiled functions of
`pi_runtime.kernels`, on the CPU's own memory, or within a budget of RAM with rows from disk.

Neurons of an expert from its cut on are the CPU's; without experts a layer is one expert of weight 1. Where the
residual is on the GPU, the FFN's input and the selected cold rows arrive in a handover, and the sum leaves in
`sum_to_device`. Where the residual is on the CPU, a handover with the selected hot rows leaves, and the GPU's sum
arrives in `sum_to_host`.

Shape letters: M tokens, D model width, F neurons of a token's experts, X experts, K experts of a token, L layers.
"""

from collections.abc import Sequence

import numpy as np

from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer
from pi_runtime.cuda.memory.handover import HandoverArrays, PinnedBuffers
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.execution.host import positions_of
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.ops import CpuOps
from pi_runtime.execution.plan_layout import Cuts
from pi_runtime.execution.rows import FfnTokens, MemoryRows
from pi_runtime.kernels.ffn.memory import READ, Batch, tokens_by_expert
from pi_runtime.kernels.split_ffn import NeuronLists, cold_sum, predict


class HostOps(CpuOps):
    """One artifact on the CPU, the tokens that are decoded, and the pinned memory that the GPU shares.

    `tokens` of them are decoded together.
    """

    def __init__(
        self, rows: MemoryRows, layers: Sequence[Layer], cuts: Sequence[Cuts], pinned: PinnedBuffers, tokens: int
    ) -> None:
        super().__init__(rows.host, rows)
        self.layers, self.cuts, self._pinned, ws = layers, cuts, pinned, rows.host.workspace
        self.tokens, cfg, pinned = tokens, rows.host.cfg, pinned.first(tokens)
        self._tally_M3 = np.zeros((tokens, 3), np.int64)
        self.select_T, self.wanted_N = np.ones(tokens, np.int64), np.arange(tokens)
        self.x_TD, self.input_TD = ws.x_TD[:tokens], ws.normed_TD[:tokens]
        self.residual_TD = self.input_TD
        self.rows_ML2 = np.zeros((tokens, len(layers), 2), np.int64)
        """For each layer: rows of `first` read here, and neurons kept."""
        self._cut_LX = np.array([c.cut_X for c in cuts], np.int64)
        self._base_LX = np.array([c.base_X for c in cuts], np.int64)
        cold_MF = np.zeros((tokens, cfg.experts_per_token * cfg.d_ff), np.int32)
        self._cold = NeuronLists(np.zeros(tokens, np.int32), cold_MF)
        self._one_expert = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)
        """The experts of tokens, and their weights, in a layer without experts."""
        self._own_sum_MD = np.zeros((tokens, cfg.d_model), np.float32)
        self._send, self._recv = pinned.handover_to_device.arrays(), pinned.handover_to_host.arrays()
        self._sum_to_device, self._sum_to_host = pinned.sum_to_device.numpy(), pinned.sum_to_host.numpy()
        self._x_to_device, self._x_to_host = pinned.x_to_device.numpy(), pinned.x_to_host.numpy()

    def for_tokens(self, tokens: int) -> "HostOps":
        """The same for so many tokens together."""
        return HostOps(self.rows, self.layers, self.cuts, self._pinned, tokens)

    def move_to(self, caches: Sequence[KVCache], token_M: Ints) -> None:
        """Go on behind what the sequences' caches hold, with as many of these tokens each."""
        self.cache, self.start, self.tokens_T = caches[0], caches[0].length, token_M
        self.at = positions_of([(len(token_M) // len(caches), cache.length, cache) for cache in caches])
        self.blocks = [(slice(0, self.tokens), self.at)]

    def ffn(self, layer: int) -> None:
        """x ← x + FFN, where no neuron is on the GPU."""
        self.rows.take(FfnTokens(self.x_TD, self.input_TD, self.x_TD, self.select_T), ahead=False)
        super().ffn(layer)
        self.rows_ML2[:, layer] = self.host.workspace.counts_LT3[layer, : self.tokens, READ:]

    def send_handover(self) -> None:
        """Leave the FFN's input and the tokens' experts for the GPU."""
        ws, send, slots = self.host.workspace, self._send, self._send.expert_MK.shape[1]
        send.x_MD[:] = self.input_TD
        send.expert_MK[:] = ws.expert_TK[: self.tokens, :slots]
        send.route_weight_MK[:] = ws.route_weight_TK[: self.tokens, :slots]

    def select(self, layer: int) -> None:
        """Leave the selected hot rows for the GPU; keep the selected cold ones."""
        m, send, expert_MK = self.host, self._send, self.host.workspace.expert_TK[: self.tokens]
        hot = NeuronLists(send.count_M, send.listed(self.cuts[layer].hot))
        cut_X, base_X = self._cut_LX[layer], self._base_LX[layer]
        predict(m.ffn, m.table_LX[layer], self.input_TD, expert_MK, cut_X, base_X, hot, self._cold)

    def cold_sum(self, layer: int) -> None:
        """Sum the cold neurons where the residual is on the CPU."""
        if self.cuts[layer].cold:
            self._cold_sum(layer, self.input_TD, self._send, self._cold, self._own_sum_MD)

    def cold_sum_for_device(self, layer: int) -> None:
        """Sum the cold neurons where the residual is on the GPU, which fetches the sum."""
        recv = self._recv
        cold = NeuronLists(recv.count_M, recv.listed(self.cuts[layer].cold))
        self._cold_sum(layer, recv.x_MD, recv, cold, self._sum_to_device)

    def _cold_sum(self, layer: int, x_MD: Floats, routed: HandoverArrays, cold: NeuronLists, sum_MD: Floats) -> None:
        """Sum the cold neurons of a handover's experts; where the rung selects, the listed ones."""
        m, cut_X, selected = self.host, self._cut_LX[layer], RUNGS[self.layers[layer].rung].picks
        one = self._one_expert
        expert_MK, weight_MK = (routed.expert_MK, routed.route_weight_MK) if len(cut_X) > 1 else one
        w_X, tally_M3 = m.table_LX[layer], self._tally_M3
        if self.rows.whole_L[layer]:
            cold_sum(m.ffn, w_X, x_MD, expert_MK, weight_MK, cut_X, selected, cold, tally_M3, sum_MD)
        else:
            self.rows.take(FfnTokens(self.x_TD, x_MD, self.x_TD, self.select_T), ahead=False)
            batches = [
                Batch(w_X, e, int(cut_X[e]), m.cfg.d_ff, token_N, np.ones(len(token_N), np.int64), weight_N, 0)
                for e, token_N, weight_N in tokens_by_expert(expert_MK.astype(np.int64), weight_MK, m.cfg.experts)
                if cut_X[e] < m.cfg.d_ff
            ]
            self.rows.sum_few(layer, x_MD, batches, tally_M3, sum_MD, cold if selected else None)
            self.rows.end_layer(layer)
        self.rows_ML2[:, layer] = tally_M3[:, READ:]
        m.workspace.counts_LT3[layer, : self.tokens] = tally_M3  # hits of rows are counted by them

    def merge(self, layer: int) -> None:
        """x ← x + the cold neurons' sum + the GPU's sum + the bias."""
        if self.cuts[layer].cold:
            self.x_TD[:] += self._own_sum_MD
        self.x_TD[:] += self._sum_to_host
        self.after_ffn(layer)

    def send_residual(self) -> None:
        self._x_to_device[:] = self.x_TD

    def receive_residual(self) -> None:
        self.x_TD[:] = self._x_to_host
