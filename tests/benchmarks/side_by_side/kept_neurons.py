"""Which neurons each token of a batch keeps, by looking on at a run layer by layer, apart from what is timed.

Shape letters: L layers, T tokens of the batch, N neurons of a layer with those of all its experts, D model width,
X experts.
"""

from collections.abc import Sequence
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.reader import Artifact
from pi_runtime.execution.cpu import CpuModel
from pi_runtime.execution.cpu_ops import CpuOps
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.plan_layout import CPU
from pi_runtime.execution.schedule import one_side_schedule
from pi_runtime.kernels.data.weight_table import LayerRecords
from pi_runtime.kernels.ffn.memory import tokens_of, whole_batch
from pi_runtime.kernels.ffn.network import add

Flags = npt.NDArray[np.bool_]


class KeptNeurons:
    """Runs single tokens with selection on the CPU, whatever device the model runs on. Close it, or the file stays."""

    def __init__(self, path: Path, mode: str, *, context: int, threads: int, cache_format: str) -> None:
        self._model = CpuModel(Artifact.open(path), mode, context, threads, cache_format)
        self._ops = CpuOps(self._model)
        self._schedule = one_side_schedule(len(self._model.table_LX))[:-1]  # nobody asks for logits

    def step(self, sequences: Sequence[SequenceStep]) -> Flags:
        """Run one token of each sequence; returns (L, T, N) whether a token keeps a neuron.

        In a dense layer every neuron is kept; a neuron of an expert that is not taken is not.
        """
        with self._model.turn(sequences) as batches:
            return np.concatenate([self._run(batch) for batch in batches], axis=1)

    def _run(self, sequences: Sequence[SequenceStep]) -> Flags:
        m, ops = self._model, self._ops
        kept_LTN = np.zeros((len(m.table_LX), len(sequences), m.cfg.experts * m.cfg.d_ff), np.bool_)
        numba.set_num_threads(m.threads)
        ops.take(sequences)
        for operation in self._schedule:
            operation.run({CPU: ops})
            if operation.name == "ffn":
                self._mark(m.table_LX[operation.layer], kept_LTN[operation.layer])
        m.finished(sequences)
        return kept_LTN

    def _mark(self, w_X: LayerRecords, kept_TN: Flags) -> None:
        """Mark what the tokens keep of a layer whose FFN has just run."""
        cfg, ws, x_TD = self._model.cfg, self._model.workspace, self._ops.input_TD
        counts_T3, sums_TD = np.zeros((len(x_TD), 3), np.int64), np.zeros_like(x_TD)
        for expert, w in enumerate(w_X):
            token_N, weight_N = tokens_of(ws.expert_TK[: len(x_TD)], ws.route_weight_TK, expert)
            kept_NF = np.ones((len(token_N), cfg.d_ff), np.bool_)
            if len(token_N) and not w["dense"]:
                batch = whole_batch(self._model.ffn, w_X, expert, token_N, np.ones_like(token_N), weight_N)
                add(self._model.ffn, batch, True, counts_T3, sums_TD)
                # The call has left a factor for each token and neuron of every chunk: 0 where it is not kept.
                for chunk, count in enumerate(ws.count_C):
                    factors_NK = ws.h_CTK[chunk, : len(token_N), :count]
                    kept_NF[:, ws.list_CK[chunk, :count]] = factors_NK != 0
            kept_TN[token_N, expert * cfg.d_ff : (expert + 1) * cfg.d_ff] = kept_NF

    def close(self) -> None:
        """Close the artifact."""
        self._model.close()
