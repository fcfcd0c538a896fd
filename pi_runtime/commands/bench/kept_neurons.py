"""Which neurons each token of a batch keeps, by the kernels of a run, layer by layer and apart from what is timed.

Shape letters: L layers, T tokens of the batch, N neurons of a layer with those of all its experts, W columns of the
weight table, D model width, X experts.
"""

from collections.abc import Sequence
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.reader import Artifact
from pi_runtime.execution.cpu import CpuModel, positions_of
from pi_runtime.execution.executor import Floats, Ints, SequenceResult, SequenceStep
from pi_runtime.kernels import ffn
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.forward import after_ffn, attention, embed
from pi_runtime.kernels.moe import ffn_of_experts

Flags = npt.NDArray[np.bool_]


class KeptNeurons:
    """Runs single tokens with selection on the CPU, whatever device the model runs on. Close it, or the file stays."""

    def __init__(self, path: Path, mode: str, *, context: int, threads: int, cache_format: str) -> None:
        self._model = CpuModel(Artifact.open(path), mode, context, threads, cache_format)

    def step(self, sequences: Sequence[SequenceStep]) -> Flags:
        """Run one token of each sequence; returns (L, T, N) whether a token keeps a neuron.

        In a dense layer every neuron is kept; a neuron of an expert that is not taken is not.
        """
        found: list[Flags] = []
        self._model.step(sequences, lambda batch: self._run(batch, found))
        return np.concatenate(found, axis=1)

    def _run(self, sequences: Sequence[SequenceStep], found: list[Flags]) -> list[SequenceResult]:
        m, ws, tokens = self._model, self._model.workspace, len(sequences)
        x_TD, normed_TD, select_T = ws.x_TD[:tokens], ws.normed_TD[:tokens], np.ones(tokens, np.int64)
        at = positions_of([(1, s.cache.length, s.cache) for s in sequences])
        kept_LTN = np.zeros((len(m.table_LXW), tokens, m.cfg.experts * m.cfg.d_ff), np.bool_)
        numba.set_num_threads(m.threads)
        embed(m.cfg, m.ends, np.concatenate([s.tokens for s in sequences]), at.position_T, ws, x_TD)
        for layer, w_XW in enumerate(m.table_LXW):
            attention(m.cfg, w_XW[0], m.eps, m.cos_SJ, m.sin_SJ, at, layer, x_TD, ws)
            ffn_of_experts(m.cfg, w_XW, normed_TD, select_T, False, ws, ws.counts_LT3[layer, :tokens], x_TD)
            self._mark(w_XW, normed_TD, kept_LTN[layer])
            after_ffn(m.cfg, w_XW[0], m.eps, x_TD)
        found.append(kept_LTN)
        for s in sequences:
            s.cache.append(s.tokens, select=True)
        return []

    def _mark(self, w_XW: Ints, x_TD: Floats, kept_TN: Flags) -> None:
        """Mark what the tokens keep of a layer, whose inputs are prepared and whose experts are chosen."""
        cfg, ws = self._model.cfg, self._model.workspace
        counts_T3, sums_TD = np.zeros((len(x_TD), 3), np.int64), np.zeros_like(x_TD)
        for expert, w in enumerate(w_XW):
            token_N = np.flatnonzero((ws.expert_TK[: len(x_TD)] == expert).any(1))
            kept_NF = np.ones((len(token_N), cfg.d_ff), np.bool_)
            if len(token_N) and not w[weight_table.DENSE]:
                ones_N = np.ones(len(token_N), np.int64), np.ones(len(token_N), np.float32)
                ffn.add_expert(cfg, w, x_TD, token_N, *ones_N, True, ws, counts_T3, sums_TD)
                # The call has left a factor for each token and neuron of every chunk: 0 where it is not kept.
                for chunk, count in enumerate(ws.count_C):
                    factors_NK = ws.h_CTK[chunk, : len(token_N), :count]
                    kept_NF[:, ws.list_CK[chunk, :count]] = factors_NK != 0
            kept_TN[token_N, expert * cfg.d_ff : (expert + 1) * cfg.d_ff] = kept_NF

    def close(self) -> None:
        """Close the artifact."""
        self._model.close()
