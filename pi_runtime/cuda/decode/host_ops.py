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
from pi_runtime.execution.cpu import CpuModel, positions_of
from pi_runtime.execution.cpu_ops import CpuOps
from pi_runtime.execution.disk_ops import DiskOps
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.plan_layout import Cuts
from pi_runtime.kernels.ffn.memory import READ, Batch, tokens_by_expert
from pi_runtime.kernels.split_ffn import NeuronLists, cold_sum, predict


class HostOps(CpuOps):
    """One artifact on the CPU, the tokens that are decoded, and the pinned memory that the GPU shares.

    `tokens` of them are decoded together.
    """

    def __init__(
        self, model: CpuModel, layers: Sequence[Layer], cuts: Sequence[Cuts], pinned: PinnedBuffers, tokens: int,
        rows: DiskOps | None = None,
    ) -> None:  # fmt: skip
        """`rows` sums neurons whose rows may be on disk; None where all of them are in memory."""
        super().__init__(model)
        self.layers, self.cuts, self._pinned, self._rows = layers, cuts, pinned, rows
        self.tokens, cfg, pinned = tokens, model.cfg, pinned.first(tokens)
        self._tally_M3, self.count_all = np.zeros((tokens, 3), np.int64), False
        self.select_T, self.wanted_N = np.ones(tokens, np.int64), np.arange(tokens)
        self.x_TD, self.input_TD = model.workspace.x_TD[:tokens], model.workspace.normed_TD[:tokens]
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
        return HostOps(self.model, self.layers, self.cuts, self._pinned, tokens, self._rows)

    def move_to(self, caches: Sequence[KVCache], token_M: Ints) -> None:
        """Go on behind what the sequences' caches hold, with as many of these tokens each."""
        self.cache, self.start, self.tokens_T = caches[0], caches[0].length, token_M
        self.at = positions_of([(len(token_M) // len(caches), cache.length, cache) for cache in caches])

    def ffn(self, layer: int) -> None:
        """x ← x + FFN, where no neuron is on the GPU."""
        if self._rows is None:
            super().ffn(layer)
        else:
            self._rows.take_few(self.x_TD, self.input_TD)
            self._rows.ffn(layer)
        self.rows_ML2[:, layer] = self.model.workspace.counts_LT3[layer, : self.tokens, READ:]

    def send_handover(self) -> None:
        """Leave the FFN's input and the tokens' experts for the GPU."""
        ws, send, slots = self.model.workspace, self._send, self._send.expert_MK.shape[1]
        send.x_MD[:] = self.input_TD
        send.expert_MK[:] = ws.expert_TK[: self.tokens, :slots]
        send.route_weight_MK[:] = ws.route_weight_TK[: self.tokens, :slots]

    def select(self, layer: int) -> None:
        """Leave the selected hot rows for the GPU; keep the selected cold ones."""
        m, send, expert_MK = self.model, self._send, self.model.workspace.expert_TK[: self.tokens]
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
        m, cut_X, selected = self.model, self._cut_LX[layer], RUNGS[self.layers[layer].rung].picks
        one = self._one_expert
        expert_MK, weight_MK = (routed.expert_MK, routed.route_weight_MK) if len(cut_X) > 1 else one
        w_X, tally_M3, rows = m.table_LX[layer], self._tally_M3, self.on_disk(layer)
        if rows is None:
            cold_sum(m.ffn, w_X, x_MD, expert_MK, weight_MK, cut_X, selected, cold, tally_M3, sum_MD)
        else:
            rows.take_few(self.x_TD, x_MD)
            batches = [
                Batch(w_X, e, int(cut_X[e]), m.cfg.d_ff, token_N, np.ones(len(token_N), np.int64), weight_N, 0)
                for e, token_N, weight_N in tokens_by_expert(expert_MK.astype(np.int64), weight_MK, m.cfg.experts)
                if cut_X[e] < m.cfg.d_ff
            ]
            rows.sum_few(layer, x_MD, batches, tally_M3, sum_MD, cold if selected else None)
            rows.end_layer(layer)
        self.rows_ML2[:, layer] = tally_M3[:, READ:]
        if self.has_disk:  # hits are counted by them
            m.workspace.counts_LT3[layer, : self.tokens] = tally_M3

    @property
    def has_disk(self) -> bool:
        """Whether there are rows on disk at all."""
        return self._rows is not None

    def on_disk(self, layer: int) -> DiskOps | None:
        """What sums the layer's neurons where some of their rows may be on disk."""
        return None if self._rows is None or self._rows.whole_L[layer] else self._rows

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
