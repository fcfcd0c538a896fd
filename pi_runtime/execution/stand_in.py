"""Two workers at once: hot neurons on one, cold neurons on the other, one merge per FFN.

    x ← x + Σ hot + Σ cold + bias

A thread with the CPU's serial kernels stands in for the GPU, by the same plan and with the same handover. It is no
faster, but it runs on every machine, so that plans can be tested anywhere.

Shape letters: D model width, L layers, X experts, G key-value heads, S positions.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Plan
from pi_runtime.execution.cpu import CpuModel, HostExecutor
from pi_runtime.execution.cpu_ops import CpuOps
from pi_runtime.execution.executor import Floats, Ints, SequenceResult, SequenceStep
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.execution.plan_layout import CPU, GPU
from pi_runtime.execution.schedule import schedule_of
from pi_runtime.kernels.data.weight_table import LayerRecords
from pi_runtime.kernels.data.workspace import Workspace, allocate_workspace
from pi_runtime.kernels.ffn.memory import Ffn, every_token, ffn_of
from pi_runtime.kernels.ffn.network import add_neurons, serial_add_neurons

ExpertRange = tuple[int, np.float32, int, int]
"""An expert, its route weight, and the range of its neurons, which is not empty."""


@dataclass(frozen=True)
class NeuronWorker:
    """Computes ranges of each layer's neurons for one token, in a workspace of its own."""

    add: Any
    """`network.add_neurons` or `network.serial_add_neurons`."""
    ffn: Ffn
    workspace: Workspace
    """Kept: `ffn` holds its addresses."""
    sum_1D: Floats
    """What it computed last."""

    def run(self, w_X: LayerRecords, x_1D: Floats, ranges: Sequence[ExpertRange]) -> Ints:
        """Compute these neurons of a layer; returns the sums of (rows of `first` read, neurons kept)."""
        rows_2, tally_13 = np.zeros(2, np.int64), np.zeros((1, 3), np.int64)
        self.sum_1D[:] = 0
        for expert, route_weight, low, high in ranges:
            batch = every_token(w_X, expert, low, high, tokens=1, route_weight=float(route_weight))
            self.add(self.ffn, batch, x_1D, False, tally_13, self.sum_1D)
            rows_2 += tally_13[0, 1:]
        return rows_2


class StandInOps(CpuOps):
    """One token in two parts: of each layer's neurons one worker has those below the cut, the other the rest.

    Each expert has a cut of its own. Close it, or its thread stays.
    """

    def __init__(self, model: CpuModel, plan: Plan) -> None:
        super().__init__(model)
        self._cuts_LX = np.array(plan.cuts).reshape(len(model.table_LX), model.cfg.experts).tolist()
        own = allocate_workspace(model.manifest.decoder, model.largest_rank, tokens=1)
        sums_21D = np.zeros((2, 1, model.cfg.d_model), np.float32)
        self.hot = NeuronWorker(serial_add_neurons, ffn_of(model.cfg, own), own, sums_21D[0])
        self.cold = NeuronWorker(add_neurons, model.ffn, model.workspace, sums_21D[1])
        self._gpu_thread = ThreadPoolExecutor(1, thread_name_prefix="pi-stand-in")

    def ffn(self, layer: int) -> None:
        """Add both workers' sums, which they compute at once; a token wholly on one side needs no handover."""
        m, ws, w_X, cut_X = self.model, self.model.workspace, self.model.table_LX[layer], self._cuts_LX[layer]
        taken, rows_2 = sorted(zip(ws.expert_TK[0].tolist(), ws.route_weight_TK[0], strict=True)), np.zeros(2, np.int64)
        hot: list[ExpertRange] = [(e, weight, 0, cut_X[e]) for e, weight in taken if cut_X[e] > 0]
        cold: list[ExpertRange] = [(e, weight, cut_X[e], m.cfg.d_ff) for e, weight in taken if cut_X[e] < m.cfg.d_ff]
        pending = self._gpu_thread.submit(self.hot.run, w_X, self.input_TD, hot) if hot else None
        try:
            if cold:
                rows_2 += self.cold.run(w_X, self.input_TD, cold)
        finally:
            # Whatever happens here, the other worker must have left its workspace; its own error surfaces from here.
            if pending is not None:
                rows_2 += pending.result()
        for worker, ranges in ((self.hot, hot), (self.cold, cold)):
            if ranges:
                self.x_TD += worker.sum_1D
        ws.counts_LT3[layer, 0, 1:] = rows_2

    def close(self) -> None:
        """Let the thread return."""
        self._gpu_thread.shutdown()


class StandInExecutor(HostExecutor):
    """Decodes by a plan without a GPU: its schedule, with both sides on this processor and in this memory.

    So attention, embedding and head run on the CPU whatever side the plan names, and the result is the same. Prompts
    run dense on the CPU, whose memory holds everything. Close the executor, or its thread stays.
    """

    device_name = "stand-in"
    draft_tokens = 1
    allocation: Allocation

    def __init__(
        self, artifact: Artifact, mode: str, threads: int, allocation: Allocation, cache: str = "auto"
    ) -> None:
        self._model = model = CpuModel(artifact, mode, allocation.context, threads, cache)
        self.allocation, self.context, self.neurons = allocation, allocation.context, model.neurons
        self._schedule, self.ops = schedule_of(allocation.plan), StandInOps(model, allocation.plan)

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences. A single token with selection goes to both workers."""
        with self._model.turn(sequences) as batches:
            return [self._run(s) for batch in batches for s in batch]

    def _run(self, s: SequenceStep) -> SequenceResult:
        if len(s.tokens) > 1 and s.select and s.logits == "last":
            # Each gets the bits that it gets alone.
            return [self._run(replace(s, tokens=token_1)) for token_1 in np.split(s.tokens, len(s.tokens))][-1]
        if len(s.tokens) > 1 or not s.select or s.logits == "all":
            return self._model.run([s])[0]
        # One core is the stand-in's.
        numba.set_num_threads(max(1, self._model.threads - 1))
        self.ops.take([s])
        for operation in self._schedule:
            operation.run({CPU: self.ops, GPU: self.ops})
        return self._model.finished([s])[0]

    def _release(self) -> None:
        self.ops.close()
