"""The six operations of a schedule on the CPU: the compiled operators, one call each.

Shape letters: T tokens, N of them whose logits are wanted, D model width, K experts of a token.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.execution.cpu import CpuModel, no_states, positions_of
from pi_runtime.execution.executor import Floats, Ints, SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.kernels.forward import after_ffn, attention, embed, head, keep_state
from pi_runtime.kernels.moe import ffn_of_experts


class _Ops:
    """What both kinds of operations share."""

    def __init__(self, model: CpuModel) -> None:
        self.model = model

    def move(self, _layer: int) -> None:
        """Nothing: whatever sides there are share this memory."""


class CpuOps(_Ops):
    """The tokens of a step, at most `BLOCK_TOKENS`, in the workspace of a model whose weights are all in memory."""

    def __init__(self, model: CpuModel) -> None:
        super().__init__(model)
        self.state_L, self.states_TC = no_states(len(model.table_LX))

    def take(self, sequences: Sequence[SequenceStep]) -> None:
        """Go on with the next tokens of some sequences."""
        self.count_all = sequences[0].count
        step = self.model.step_of(sequences)
        self.tokens_T, self.at, self.select_T, self.wanted_N, self.state_L, self.states_TC = step
        ws, tokens = self.model.workspace, len(self.tokens_T)
        self.x_TD, self.input_TD = ws.x_TD[:tokens], ws.normed_TD[:tokens]
        self.residual_TD = (ws.residual_TD if len(ws.residual_TD) else ws.normed_TD)[:tokens]

    def embed(self, _layer: int) -> None:
        m = self.model
        embed(m.cfg, m.ends, m.eps, m.embedded(self.tokens_T), self.at.position_T, m.workspace, self.x_TD)

    def attention(self, layer: int) -> None:
        m, w = self.model, self.model.table_LX[layer, 0]
        self._keep_state(layer)
        attention(m.cfg, w, m.eps, m.cos_SJ, m.sin_SJ, self.at, self.x_TD, m.workspace)

    def _keep_state(self, layer: int) -> None:
        if self.states_TC.size:  # most steps keep none, and need no call for each layer
            keep_state(self.state_L, self.states_TC, layer, self.x_TD)

    def ffn(self, layer: int) -> None:
        m, ws = self.model, self.model.workspace
        tally_T3, w_X = ws.counts_LT3[layer, : len(self.x_TD)], m.table_LX[layer]
        ffn_of_experts(m.cfg, w_X, self.input_TD, self.select_T, self.count_all, ws, tally_T3, self.x_TD)

    def after_ffn(self, layer: int) -> None:
        m = self.model
        after_ffn(m.cfg, m.table_LX[layer, 0], m.eps, self.residual_TD, self.x_TD)

    def head(self, _layer: int) -> None:
        self._keep_state(len(self.model.table_LX))
        m, x_ND = self.model, self.x_TD[self.wanted_N]
        head(m.cfg, m.ends, m.eps, x_ND, m.workspace, m.workspace.logits_TV[: len(x_ND)])


class BlockOps(_Ops):
    """A long piece of one sequence, in blocks of `BLOCK_TOKENS` that take an operation one after the other.

    FFN and head are up to who extends it. `x_TD` and `input_TD` have room for the whole piece.
    """

    def __init__(self, model: CpuModel, x_TD: Floats, input_TD: Floats) -> None:
        super().__init__(model)
        self.x_TD, self.input_TD = x_TD, input_TD
        self.residual_TD = np.zeros_like(x_TD) if len(model.workspace.residual_TD) else input_TD
        shape = len(x_TD), model.workspace.expert_TK.shape[1]
        self.expert_TK, self.route_weight_TK = np.zeros(shape, np.int64), np.ones(shape, np.float32)

    def take_piece(self, tokens_T: Ints, start: int, cache: KVCache) -> None:
        """Go on with these tokens of a sequence, from a position on."""
        self._tokens_T, self.tokens = tokens_T, len(tokens_T)
        self.blocks = [
            (part, positions_of([(part.stop - part.start, start + part.start, cache)]))
            for part in token_blocks(len(tokens_T))
        ]

    def embed(self, _layer: int) -> None:
        m = self.model
        for part, at in self.blocks:
            tokens_T = m.embedded(self._tokens_T[part])
            embed(m.cfg, m.ends, m.eps, tokens_T, at.position_T, m.workspace, self.x_TD[part])

    def attention(self, layer: int) -> None:
        """x ← x + attention(x); the FFN's inputs and the tokens' experts are kept."""
        m, w, ws = self.model, self.model.table_LX[layer, 0], self.model.workspace
        for part, at in self.blocks:
            attention(m.cfg, w, m.eps, m.cos_SJ, m.sin_SJ, at, self.x_TD[part], ws)
            tokens = part.stop - part.start
            self.input_TD[part] = ws.normed_TD[:tokens]
            if len(ws.residual_TD):
                self.residual_TD[part] = ws.residual_TD[:tokens]
            if m.cfg.experts > 1:
                self.expert_TK[part], self.route_weight_TK[part] = ws.expert_TK[:tokens], ws.route_weight_TK[:tokens]

    def after_ffn(self, layer: int) -> None:
        m = self.model
        after_ffn(m.cfg, m.table_LX[layer, 0], m.eps, self.residual_TD[: self.tokens], self.x_TD[: self.tokens])


def token_blocks(count: int, size: int = BLOCK_TOKENS) -> Iterator[slice]:
    """The tokens [0, count) in blocks of at most `size`, as many as the CPU works on at once."""
    for low in range(0, count, size):
        yield slice(low, min(count, low + size))
