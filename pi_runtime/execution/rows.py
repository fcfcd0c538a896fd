"""Where the rows of FFNs are: the source that operations have them from.

`MemoryRows` has all of them in memory, in one range. `disk_rows.DiskRows` has some of them there, and others come while
those are computed. Either way sums have the same order, and so the same bits.

Shape letters: T tokens, D model width, K experts of a token.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.execution.executor import DiskStats, Floats, Ints
from pi_runtime.execution.host import CpuModel, token_blocks
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ffn.memory import Batch, Taken, every_token
from pi_runtime.kernels.ffn.network import add_neurons
from pi_runtime.kernels.moe import ends_of_ffn, ffn_of_experts
from pi_runtime.kernels.split_ffn import NeuronLists


class FfnTokens(NamedTuple):
    """The tokens of an FFN; their experts are in the workspace."""

    x_TD: Floats
    """The residual."""
    input_TD: Floats
    sum_TD: Floats
    """What takes the sum: the residual, or of narrower experts memory of their own."""
    select_T: Ints


class Piece:
    """Memory of a long piece: the residual, the FFN's input and sum, and the tokens' experts."""

    def __init__(self, ws: Workspace, x_TD: Floats, input_TD: Floats) -> None:
        """`x_TD` and `input_TD` have room for the whole piece."""
        self.x_TD, self.input_TD, self.sum_TD = x_TD, input_TD, x_TD
        self.residual_TD = np.zeros_like(x_TD) if len(ws.residual_TD) else input_TD
        if ws.narrow_TL.shape[1]:
            self.input_TD, self.sum_TD = (np.ones((len(x_TD), ws.narrow_TL.shape[1]), np.float32) for _ in range(2))
        shape = len(x_TD), ws.expert_TK.shape[1]
        self.expert_TK, self.route_weight_TK = np.zeros(shape, np.int64), np.ones(shape, np.float32)

    @property
    def is_narrow(self) -> bool:
        """Whether experts are narrower than the model."""
        return self.sum_TD is not self.x_TD

    def keep(self, part: slice, ws: Workspace) -> None:
        """Keep what attention has left of a block."""
        tokens = part.stop - part.start
        self.input_TD[part] = ends_of_ffn(ws)[0][:tokens]
        if self.is_narrow:
            self.residual_TD[part], self.sum_TD[part] = ws.normed_TD[:tokens], 0
        elif len(ws.residual_TD):
            self.residual_TD[part] = ws.residual_TD[:tokens]
        self.expert_TK[part], self.route_weight_TK[part] = ws.expert_TK[:tokens], ws.route_weight_TK[:tokens]


class MemoryRows:
    """The rows of a model whose weights are all in memory."""

    disk: DiskStats | None = None
    """What reading rows from disk took; None where nothing is read."""
    block_tokens = BLOCK_TOKENS
    """Most tokens of a prompt that go through a layer together."""
    are_in_memory = True
    """Whether all rows of all layers stay in memory."""
    tokens: FfnTokens

    def __init__(self, host: CpuModel) -> None:
        self.host = host
        self.whole_L: Sequence[bool] = (True,) * len(host.table_LX)
        """The same of each layer."""

    @property
    def kv_room(self) -> int | None:
        """Bytes that further keys and values may take; None where nothing limits them."""
        return None

    def embedded(self, tokens_T: Ints) -> Ints:
        """Where the tokens' rows are in the embedding as it is in memory."""
        return tokens_T

    def step(self) -> AbstractContextManager[None]:
        """Within it rows are asked for; where an earlier step ended in an exception, none are taken to be there."""
        return nullcontext()

    def decoding(self, tokens: int) -> AbstractContextManager[None]:  # noqa: ARG002  nothing is read
        """Count what a step with a few tokens that select takes, which happens within."""
        return nullcontext()

    def take(self, tokens: FfnTokens, *, ahead: bool = True) -> None:  # noqa: ARG002  nothing is read
        """Go on with these tokens; `ahead`: what next layers will need may be read before their turn."""
        self.tokens = tokens

    def take_piece(self, piece: Piece, blocks: Sequence[slice]) -> None:  # noqa: ARG002  nobody has one
        """Go on with a long piece of a sequence, in blocks of its tokens: only where `block_tokens` are as many."""
        raise AssertionError(self.block_tokens)

    def before_attention(self, layer: int) -> None:
        """Look at the residual of a few tokens before a layer's attention."""

    def ffn(self, layer: int) -> None:
        """x ← x + the FFN of the tokens that were taken."""
        h, ws, t = self.host, self.host.workspace, self.tokens
        tally_T3 = ws.counts_LT3[layer, : len(t.x_TD)]
        ffn_of_experts(h.cfg, h.table_LX[layer], t.input_TD, t.select_T, ws, tally_T3, t.sum_TD)

    def sum_few(
        self, layer: int, input_TD: Floats, batches: Sequence[Batch], tally_T3: Ints, y_TD: Floats,
        listed: NeuronLists | None = None,
    ) -> None:  # fmt: skip
        """y ← neurons of some experts, one after the other, for a few tokens; `tally_T3` ← their counts.

        `listed`: what was selected elsewhere, where the layer's rung selects.
        """
        assert listed is None, layer  # `split_ffn.cold_sum` takes a list where all rows are there
        y_TD[:], tally_T3[:] = 0, 0
        found_T3 = np.empty_like(tally_T3)
        for batch in batches:
            add_neurons(self.host.ffn, batch, input_TD, found_T3, y_TD)
            tally_T3 += found_T3

    def add_dense(
        self, layer: int, taken: Sequence[Taken], cut_X: Sequence[int], input_TD: Floats, y_TD: Floats
    ) -> None:
        """y ← y + all neurons behind the cuts of some experts, in blocks of the tokens that take them."""
        f, w_X, tally_T3 = self.host.ffn, self.host.table_LX[layer], np.empty((BLOCK_TOKENS, 3), np.int64)
        for expert, token_N, weight_N in taken:
            for block in token_blocks(len(token_N)):
                some_N = token_N[block]
                x_ND, y_ND = input_TD[some_N], np.zeros((len(some_N), input_TD.shape[1]), np.float32)
                batch = every_token(w_X, expert, cut_X[expert], self.host.cfg.d_ff, len(some_N), select=False)
                add_neurons(f, batch, x_ND, tally_T3[: len(some_N)], y_ND)
                y_TD[some_N] += weight_N[block, None] * y_ND

    def end_layer(self, layer: int) -> None:
        """Let go of rows that were read for a layer ahead of its turn."""

    def close(self) -> None:
        """Let go of all rows; the host is closed already."""
