"""What fires in the FFNs of a run, found by an observer: it is shown each FFN's input, and computes all neurons for it.

    h_i = a(first_i · x) [up_i · x]          a neuron fires where h_i ≠ 0

So whoever runs the model computes what it always computes, and counts nothing for this.

Shape letters: L layers, T tokens, N of them that take one expert, D model width, K experts of a token.
"""

from collections.abc import Iterator

import numpy as np

from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.kernels.data.weight_table import StoredArrays, config_of, table_of
from pi_runtime.kernels.data.workspace import allocate_workspace
from pi_runtime.kernels.ffn.memory import ffn_of, tokens_by_expert, whole_batch
from pi_runtime.kernels.ffn.network import count_neurons
from pi_runtime.kernels.moe import ffn_of_experts, route


class Firing:
    """Counts, over all tokens that it is shown, what fires and what the mode's rungs read and keep.

    It reads the weights in the file's own mapping, wherever the run has them, and works in memory of its own.
    """

    def __init__(self, artifact: StoredArrays, mode: str) -> None:
        m = artifact.manifest
        rank = max((layer.rank or 0 for layer in m.layers), default=0)
        self.cfg, self.table_LX = config_of(m.decoder, m.formats), table_of(artifact, mode)
        self.workspace = allocate_workspace(m.decoder, rank, layout=m.ffn_layout)
        self._ffn = ffn_of(self.cfg, self.workspace)
        self.counts_L3 = np.zeros((len(m.layers), 3), np.int64)
        """Neurons that fire, rows of `first` that are read, and neurons that fire and are kept."""

    def see(self, layer: int, input_TD: Floats, expert_TK: Ints | None) -> None:
        """Take in the FFN's input of some tokens, and the experts that they take; None: those that its router takes."""
        if not self.table_LX[layer, 0]["down"]:
            for _ in self.computed(layer, input_TD, expert_TK):
                pass
            return
        w_X, tokens, tally_T3 = self.table_LX[layer].copy(), len(input_TD), np.zeros((len(input_TD), 3), np.int64)
        w_X["dense"] = 0  # then just what fires counts as kept
        ffn_of_experts(
            self.cfg, w_X, input_TD, np.ones(tokens, np.int64), self.workspace, tally_T3, np.zeros_like(input_TD)
        )
        _, read, fires = tally_T3.sum(0)
        self.counts_L3[layer] += fires, read, fires

    def computed(self, layer: int, input_TD: Floats, expert_TK: Ints | None) -> Iterator[tuple[int, Ints]]:
        """Compute and count the neurons of one expert after the other; yields it, and the tokens (N,) that take it.

        Until the next one the workspace holds their factors (see `network.count_neurons`).
        """
        w_X, ws, tally_T3 = self.table_LX[layer], self.workspace, np.zeros((len(input_TD), 3), np.int64)
        if expert_TK is None:
            expert_TK = ws.expert_TK[: len(input_TD)]
            if self.cfg.experts > 1:
                route(self.cfg, w_X[0], input_TD, ws)
        for expert, token_N, weight_N in tokens_by_expert(expert_TK, np.ones(expert_TK.shape, np.float32), len(w_X)):
            batch = whole_batch(self._ffn, w_X, expert, token_N, np.ones_like(token_N), weight_N)
            count_neurons(self._ffn, batch, input_TD, tally_T3)
            yield expert, token_N
        self.counts_L3[layer] += tally_T3.sum(0)
