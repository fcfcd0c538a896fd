"""Reading a long piece of a prompt with rows from disk: each row is read once, while others are computed.

    for each layer, expert and range of chunks:  the rows of the next range are read, all tokens take this one

Shape letters: T tokens, D model width, K experts of a token, N tokens that take one expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, padded_width
from pi_runtime.artifact.rows import ROW_ARRAYS
from pi_runtime.disk.row_store import Request, RowRange, RowStore
from pi_runtime.execution.cpu import CpuModel, positions_of
from pi_runtime.execution.executor import Floats, Ints, SequenceStep
from pi_runtime.kernels import ffn_parts
from pi_runtime.kernels.codegen import progress
from pi_runtime.kernels.data.neuron_chunks import chunks_of
from pi_runtime.kernels.forward import Positions, after_ffn, attention, embed
from pi_runtime.kernels.ops.neuron_selection import inputs_of


@dataclass(frozen=True)
class _Block:
    """Up to `BLOCK_TOKENS` tokens of a long piece, all of which go through a layer before the next one is read."""

    tokens_T: Ints
    at: Positions
    x_TD: Floats
    normed_TD: Floats
    carried_TD: Floats
    """Sums of the chunks of one expert that have been computed."""
    expert_TK: Ints
    route_weight_TK: Floats


class PromptReader:
    """Runs up to `tokens` tokens of one sequence through each layer together, with every neuron."""

    def __init__(self, model: CpuModel, rows: RowStore, tokens: int) -> None:
        d = model.manifest.decoder
        self._model, self._rows = model, rows
        self._parts = chunks_of(model.cfg, model.workspace), inputs_of(model.workspace)
        self._named_F, self._all_F = np.empty(d.d_ff + 1, np.int64), np.arange(d.d_ff)
        self._memory = {
            name: np.ones((tokens if tokens > BLOCK_TOKENS else 0, width), dtype)
            for name, width, dtype in (
                ("x_TD", d.d_model, np.float32),
                ("normed_TD", d.d_model, np.float32),
                ("carried_TD", padded_width(d.d_model), np.float32),
                ("expert_TK", d.experts_per_token, np.int64),
                ("route_weight_TK", d.experts_per_token, np.float32),
            )
        }

    def run(self, s: SequenceStep) -> Floats:
        """Run the tokens; returns the last one's residual (1, D)."""
        m, ws = self._model, self._model.workspace
        blocks = list(self._blocks(s))
        for b in blocks:
            embed(m.cfg, m.ends, b.tokens_T, b.at.position_T, ws, b.x_TD)
        needs = [(name, self._all_F) for name in ROW_ARRAYS]
        every = product(range(len(m.table_LXW)), range(m.cfg.experts))
        for part in self._rows.ranges((Request(layer, expert, needs) for layer, expert in every), keep=False):
            self._add(blocks, part)
        for b in blocks:
            after_ffn(m.cfg, m.table_LXW[-1, 0], m.eps, b.x_TD)
        return blocks[-1].x_TD[-1:].copy()

    def _blocks(self, s: SequenceStep) -> Iterator[_Block]:
        for first in range(0, len(s.tokens), BLOCK_TOKENS):
            tokens_T = s.tokens[first : first + BLOCK_TOKENS]
            at = positions_of([(len(tokens_T), s.cache.length + first, s.cache)])
            rows = slice(first, first + len(tokens_T))
            yield _Block(tokens_T, at, **{name: memory[rows] for name, memory in self._memory.items()})

    def _add(self, blocks: list[_Block], part: RowRange) -> None:
        """Add the sums of a range of an expert's chunks. A layer begins with its attention."""
        m, ws, layer, expert = self._model, self._model.workspace, part.request.layer, part.request.expert
        w = m.table_LXW[layer, expert]
        if part.begin == 0 and expert == 0:
            for b in blocks:
                self._attend(b, layer)
        for b in blocks:
            token_N, slot_N = map(np.ascontiguousarray, np.nonzero((b.expert_TK == expert) | (m.cfg.experts == 1)))
            if len(token_N) == 0:
                continue
            none_N, weight_N = np.zeros(len(token_N), np.int64), b.route_weight_TK[token_N, slot_N]
            ffn_parts.prepare(m.cfg, w, b.normed_TD, ws)
            ffn_parts.name_neurons(m.cfg, w, b.normed_TD, token_N, none_N, *self._parts, self._named_F)
            call = token_N, none_N, weight_N, False, part.begin, part.end, b.carried_TD, b.x_TD
            ffn_parts.add_chunks(m.cfg, w, *self._parts, *call)
            progress.advance()

    def _attend(self, b: _Block, layer: int) -> None:
        """Finish the layer before, run attention, and keep the FFN's inputs."""
        m, ws, tokens = self._model, self._model.workspace, len(b.x_TD)
        if layer > 0:
            after_ffn(m.cfg, m.table_LXW[layer - 1, 0], m.eps, b.x_TD)
        attention(m.cfg, m.table_LXW[layer, 0], m.eps, m.cos_SJ, m.sin_SJ, b.at, layer, b.x_TD, ws)
        b.normed_TD[:] = ws.normed_TD[:tokens]
        if m.cfg.experts > 1:
            b.expert_TK[:], b.route_weight_TK[:] = ws.expert_TK[:tokens], ws.route_weight_TK[:tokens]
