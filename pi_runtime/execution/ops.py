"""The six operations of a schedule on the CPU: the compiled operators, one call each, over a host and its rows.

A long piece of one sequence takes an operation in blocks of `BLOCK_TOKENS`, one after the other.

Shape letters: T tokens, N of them whose logits are wanted, D model width, K experts of a token.
"""

from collections.abc import Sequence

import numba

from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.execution.executor import Ints, SequenceResult, SequenceStep
from pi_runtime.execution.host import CpuModel, no_states, positions_of, token_blocks
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.rows import FfnTokens, MemoryRows, Piece
from pi_runtime.kernels.forward import Positions, after_ffn, attention, embed, forward, head, keep_state
from pi_runtime.kernels.moe import ends_of_ffn


class CpuOps:
    """The tokens of a step in the workspace of a host, or a long piece of a sequence in memory of its own."""

    def __init__(self, host: CpuModel, rows: MemoryRows, piece: Piece | None = None) -> None:
        self.host, self.rows, self.piece = host, rows, piece
        self.state_L, self.states_TC = no_states(len(host.table_LX))
        self.blocks: list[tuple[slice, Positions]] = []
        """The tokens that an operation takes at a time, and where they stand."""
        self._in_piece = False

    def run(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run a whole step in one compiled call, where every row is in memory."""
        h, step = self.host, self.host.step_of(sequences)
        numba.set_num_threads(h.threads)
        step = step._replace(tokens_T=self.rows.embedded(step.tokens_T))
        forward(h.cfg, h.ends, h.table_LX, h.eps, h.cos_SJ, h.sin_SJ, step, h.workspace)
        return h.finished(sequences, step.states_TC)

    def take(self, sequences: Sequence[SequenceStep]) -> None:
        """Go on with the next tokens of some sequences, or with a long piece of one."""
        step, s, ws = self.host.step_of(sequences), sequences[0], self.host.workspace
        self.tokens_T, self.at, self.select_T, self.wanted_N, self.state_L, self.states_TC = step
        tokens = len(self.tokens_T)
        self._in_piece = tokens > BLOCK_TOKENS
        if self._in_piece:
            self.rows.take_piece(self.take_piece(s.tokens, s.cache.length, s.cache), [part for part, _ in self.blocks])
            return
        self.blocks = [(slice(0, tokens), self.at)]
        self.x_TD = ws.x_TD[:tokens]
        self.input_TD, self.sum_TD = (end[:tokens] for end in ends_of_ffn(ws))
        self.residual_TD = (ws.residual_TD if len(ws.residual_TD) else ws.normed_TD)[:tokens]
        self.rows.take(FfnTokens(self.x_TD, self.input_TD, self.sum_TD, self.select_T))

    def take_piece(self, tokens_T: Ints, start: int, cache: KVCache) -> Piece:
        """Go on with these tokens of a sequence, from a position on, in blocks; returns their memory."""
        assert self.piece is not None
        self.tokens_T, self._in_piece, some = tokens_T, True, slice(len(tokens_T))
        self.blocks = [
            (part, positions_of([(part.stop - part.start, start + part.start, cache)]))
            for part in token_blocks(len(tokens_T))
        ]
        self.x_TD, self.input_TD = self.piece.x_TD[some], self.piece.input_TD[some]
        self.residual_TD = self.piece.residual_TD[some]
        return self.piece

    def embed(self, _layer: int) -> None:
        """x ← the tokens' embeddings."""
        h = self.host
        for part, at in self.blocks:
            tokens_T = self.rows.embedded(self.tokens_T[part])
            embed(h.cfg, h.ends, h.eps, tokens_T, at.position_T, h.workspace, self.x_TD[part])

    def move(self, _layer: int) -> None:
        """Nothing: whatever sides there are share this memory."""

    def attention(self, layer: int) -> None:
        """x ← x + attention(x); the FFN's inputs and the tokens' experts are kept."""
        h, w, ws = self.host, self.host.table_LX[layer, 0], self.host.workspace
        self._keep_state(layer)
        self.rows.before_attention(layer)
        for part, at in self.blocks:
            attention(h.cfg, w, h.eps, h.cos_SJ, h.sin_SJ, at, self.x_TD[part], ws)
            if self._in_piece and self.piece is not None:
                self.piece.keep(part, ws)

    def _keep_state(self, layer: int) -> None:
        if self.states_TC.size:  # most steps keep none, and need no call for each layer
            keep_state(self.state_L, self.states_TC, layer, self.x_TD)

    def ffn(self, layer: int) -> None:
        """x ← x + the FFN."""
        self.rows.ffn(layer)

    def after_ffn(self, layer: int) -> None:
        h = self.host
        for part, _ in self.blocks:
            if self._in_piece and self.piece is not None and self.piece.is_narrow:
                h.workspace.narrow_sum_TL[: part.stop - part.start] = self.piece.sum_TD[part]
            of = h.ends, h.table_LX[layer, 0], h.eps, self.tokens_T[part]
            after_ffn(h.cfg, *of, self.residual_TD[part], h.workspace, self.x_TD[part])

    def head(self, _layer: int) -> None:
        """The logits of the tokens for which they are wanted."""
        self._keep_state(len(self.host.table_LX))
        h, x_ND = self.host, self.x_TD[self.wanted_N]
        head(h.cfg, h.ends, h.eps, x_ND, h.workspace, h.workspace.logits_TV[: len(x_ND)])
