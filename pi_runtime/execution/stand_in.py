"""Two workers at once: hot neurons on one, cold neurons on the other, one merge per FFN.

    x ← x + Σ hot + Σ cold + bias

A thread with the CPU's serial kernels stands in for the GPU, by the same plan and with the same handover. It is no
faster, but it runs on every machine, so that plans can be tested anywhere.

Shape letters: D model width, L layers, X experts, W columns of the weight table, G key-value heads, S positions.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np

from pi_runtime.artifact.reader import Artifact
from pi_runtime.execution.cpu import CpuModel, HostExecutor, positions_of
from pi_runtime.execution.executor import Floats, Ints, SequenceResult, SequenceStep
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.kernels import ffn
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.data.workspace import Workspace, allocate_workspace
from pi_runtime.kernels.forward import after_ffn, attention, embed, head

ExpertRange = tuple[int, np.float32, int, int]
"""An expert, its route weight, and the range of its neurons, which is not empty."""


@dataclass(frozen=True)
class NeuronWorker:
    """Computes ranges of each layer's neurons for one token, in a workspace of its own."""

    add: Any
    """`ffn.add_neurons` or `ffn.serial_add_neurons`."""
    cfg: KernelConfig
    workspace: Workspace
    sum_1D: Floats
    """What it computed last."""

    def run(self, w_XW: Ints, x_1D: Floats, ranges: Sequence[ExpertRange]) -> Ints:
        """Compute these neurons of a layer; returns the sums of (rows of `first` read, neurons kept)."""
        rows_2, tally_13 = np.zeros(2, np.int64), np.zeros((1, 3), np.int64)
        self.sum_1D[:] = 0
        for expert, route_weight, low, high in ranges:
            call = x_1D, low, high, route_weight, True, False, self.workspace, tally_13, self.sum_1D
            self.add(self.cfg, w_XW[expert], *call)
            rows_2 += tally_13[0, 1:]
        return rows_2


class StandInExecutor(HostExecutor):
    """Decodes by a plan without a GPU: in each layer one worker has the neurons below the cut, the other the rest.

    Each expert has a cut of its own. Attention, embedding and head run on the CPU whatever side the plan names, because
    here both sides are the same processor and memory, and the result is the same. Prompts run dense on the CPU, whose
    memory holds everything. Close the executor, or its thread stays.
    """

    device_name = "stand-in"
    allocation: Allocation

    def __init__(
        self, artifact: Artifact, mode: str, threads: int, allocation: Allocation, cache: str = "auto"
    ) -> None:
        self._model = model = CpuModel(artifact, mode, allocation.context, threads, cache)
        self.allocation, self.context, self.neurons = allocation, allocation.context, model.neurons
        self._cuts_LX = np.array(allocation.plan.cuts).reshape(len(model.table_LXW), model.cfg.experts).tolist()
        manifest = artifact.manifest
        own = allocate_workspace(manifest.decoder, model.largest_rank, tokens=1)
        sums_21D = np.zeros((2, 1, model.cfg.d_model), np.float32)
        self.hot = NeuronWorker(ffn.serial_add_neurons, model.cfg, own, sums_21D[0])
        self.cold = NeuronWorker(ffn.add_neurons, model.cfg, model.workspace, sums_21D[1])
        self._gpu_thread = ThreadPoolExecutor(1, thread_name_prefix="pi-stand-in")

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences. A single token with selection goes to both workers."""
        return self._model.step(sequences, lambda batch: [self._run(s) for s in batch])

    def _run(self, s: SequenceStep) -> SequenceResult:
        if len(s.tokens) > 1 and s.select and s.logits == "last":
            # Each gets the bits that it gets alone.
            return [self._run(replace(s, tokens=token_1)) for token_1 in np.split(s.tokens, len(s.tokens))][-1]
        if len(s.tokens) > 1 or not s.select or s.logits == "all":
            return self._model.run([s])[0]
        m, ws = self._model, self._model.workspace
        # One core is the stand-in's.
        numba.set_num_threads(max(1, m.threads - 1))
        at, x_TD, rows_L2 = (
            positions_of([(1, s.cache.length, s.cache)]),
            ws.x_TD[:1],
            np.zeros((len(m.table_LXW), 2), np.int64),
        )
        embed(m.cfg, m.ends, s.tokens, at.position_T, ws, x_TD)
        for layer, w_XW in enumerate(m.table_LXW):
            attention(m.cfg, w_XW[0], m.eps, m.cos_SJ, m.sin_SJ, at, layer, x_TD, ws)
            rows_L2[layer] = self._ffn(w_XW, ws.normed_TD[:1], self._cuts_LX[layer], x_TD)
            after_ffn(m.cfg, w_XW[0], m.eps, x_TD)
        head(m.cfg, m.ends, m.eps, x_TD, ws, ws.logits_TV[:1])
        s.cache.append(s.tokens, s.select)
        return SequenceResult(logits_TV=ws.logits_TV[:1].copy(), rows_L2=rows_L2)

    def _ffn(self, w_XW: Ints, x_1D: Floats, cut_X: Sequence[int], y_1D: Floats) -> Ints:
        """y ← y + the FFN of x, both workers at once; a token wholly on one side needs no handover."""
        ws, width, rows_2 = self._model.workspace, self._model.cfg.d_ff, np.zeros(2, np.int64)
        taken = sorted(zip(ws.expert_TK[0].tolist(), ws.route_weight_TK[0], strict=True))
        hot: list[ExpertRange] = [(e, weight, 0, cut_X[e]) for e, weight in taken if cut_X[e] > 0]
        cold: list[ExpertRange] = [(e, weight, cut_X[e], width) for e, weight in taken if cut_X[e] < width]
        pending = self._gpu_thread.submit(self.hot.run, w_XW, x_1D, hot) if hot else None
        try:
            if cold:
                rows_2 += self.cold.run(w_XW, x_1D, cold)
        finally:
            # Whatever happens here, the other worker must have left its workspace; its own error surfaces from here.
            if pending is not None:
                rows_2 += pending.result()
        if hot:
            y_1D += self.hot.sum_1D
        if cold:
            y_1D += self.cold.sum_1D
        return rows_2

    def _release(self) -> None:
        self._gpu_thread.shutdown()
