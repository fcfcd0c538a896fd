"""Which neurons each token of a batch keeps, by looking on at a run layer by layer, apart from what is timed.

Shape letters: L layers, T tokens of the batch, N neurons of a layer with those of all its experts, D model width,
K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.reader import Artifact
from pi_runtime.execution.executor import Floats, Ints, SequenceStep
from pi_runtime.execution.firing import Firing
from pi_runtime.execution.host_executor import in_memory
from pi_runtime.kernels.ffn.memory import tokens_by_expert

Flags = npt.NDArray[np.bool_]


class KeptNeurons(Firing):
    """Runs single tokens with selection on the CPU, whatever device the model runs on. Close it, or the file stays."""

    def __init__(self, path: Path, mode: str, *, context: int, threads: int, cache_format: str) -> None:
        artifact = Artifact.open(path)
        super().__init__(artifact, mode)
        self._executor = in_memory(artifact, mode, context, threads, cache_format)
        self._kept: list[list[Flags]] = []

    def step(self, sequences: Sequence[SequenceStep]) -> Flags:
        """Run one token of each sequence; returns (L, T, N) whether a token keeps a neuron.

        In a dense layer every neuron is kept; a neuron of an expert that is not taken is not.
        """
        self._kept = [[] for _ in self.table_LX]
        self._executor.step([replace(s, observer=self) for s in sequences])
        return np.stack([np.concatenate(of_calls) for of_calls in self._kept])

    def see(self, layer: int, input_TD: Floats, expert_TK: Ints | None) -> None:
        """Note what the tokens of a call keep in a layer."""
        assert expert_TK is not None
        cfg, ws, w_X = self.cfg, self.workspace, self.table_LX[layer]
        kept_TN = np.zeros((len(input_TD), cfg.experts * cfg.d_ff), np.bool_)
        self._kept[layer].append(kept_TN)
        if w_X[0]["dense"]:
            for expert, token_N, _ in tokens_by_expert(expert_TK, np.ones(expert_TK.shape, np.float32), cfg.experts):
                kept_TN[token_N, expert * cfg.d_ff : (expert + 1) * cfg.d_ff] = True
            return
        for expert, token_N in self.computed(layer, input_TD, expert_TK):
            kept_NF = np.zeros((len(token_N), cfg.d_ff), np.bool_)
            for chunk, count in enumerate(ws.count_C):  # each has a factor for a token and neuron: 0 if it is not kept
                kept_NF[:, ws.list_CK[chunk, :count]] = ws.h_CTK[chunk, : len(token_N), :count] != 0
            kept_TN[token_N, expert * cfg.d_ff : (expert + 1) * cfg.d_ff] = kept_NF

    def close(self) -> None:
        """Close the artifact."""
        self._executor.close()
