"""Two workers at once: hot neurons on one, cold neurons on the other, one merge per FFN.

    x ← x + Σ hot + Σ cold + bias

A thread with the CPU's serial kernels stands in for the GPU, by the same plan and with the same handover. It is no
faster, but it runs on every machine, so that plans can be tested anywhere.

Shape letters: T tokens, N tokens that take one expert, D model width, L layers, X experts.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numba
import numpy as np

from pi_runtime.artifact.footprint import FEW_TOKENS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.errors import DoesNotFitError, Setting
from pi_runtime.execution.cpu import CpuModel, HostExecutor
from pi_runtime.execution.cpu_ops import CpuOps, token_blocks
from pi_runtime.execution.executor import Floats, Ints, SequenceResult, SequenceStep
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.execution.plan_layout import CPU, GPU
from pi_runtime.execution.schedule import schedule_of
from pi_runtime.kernels.data.weight_table import LayerRecords
from pi_runtime.kernels.data.workspace import Workspace, allocate_workspace
from pi_runtime.kernels.ffn.memory import Batch, Ffn, ffn_of, tokens_by_expert
from pi_runtime.kernels.ffn.network import add_neurons, serial_add_neurons


def check_divisible(manifest: Manifest) -> None:
    """Raise DoesNotFitError for a model whose FFNs cannot be computed in two places."""
    if manifest.decoder.inner_norms:
        raise DoesNotFitError(
            "an FFN whose values are normed together is not computed in two places",
            found="decoder.inner_norms",
            remedy=(Setting("device", "cpu"),),
        )


class ExpertRange(NamedTuple):
    """A range of one expert's neurons, which is not empty, for the tokens that take the expert."""

    low: int
    high: int
    expert: int
    token_N: Ints
    route_weight_N: Floats

    def batch(self, w_X: LayerRecords) -> Batch:
        """The same as kernels take it."""
        select_N = np.ones(len(self.token_N), np.int64)
        return Batch(w_X, self.expert, self.low, self.high, self.token_N, select_N, self.route_weight_N, 0)


@dataclass(frozen=True)
class NeuronWorker:
    """Computes ranges of each layer's neurons for a few tokens, in a workspace of its own."""

    add: Any
    """`network.add_neurons` or `network.serial_add_neurons`."""
    ffn: Ffn
    workspace: Workspace
    """Kept: `ffn` holds its addresses."""
    sum_TD: Floats
    """What it computed last."""

    def run(self, w_X: LayerRecords, x_TD: Floats, ranges: Sequence[ExpertRange]) -> Ints:
        """Compute these neurons of a layer; returns for each token the sums of (rows of `first` read, neurons kept)."""
        tokens = len(x_TD)
        rows_T2, tally_T3 = np.zeros((tokens, 2), np.int64), np.zeros((tokens, 3), np.int64)
        self.sum_TD[:tokens] = 0
        for r in ranges:
            self.add(self.ffn, r.batch(w_X), x_TD, False, tally_T3, self.sum_TD[:tokens])
            rows_T2 += tally_T3[:, 1:]
        return rows_T2


class StandInOps(CpuOps):
    """Tokens in two parts: of each layer's neurons one worker has those below the cut, the other the rest.

    Each expert has a cut of its own. Close it, or its thread stays.
    """

    def __init__(self, model: CpuModel, plan: Plan) -> None:
        super().__init__(model)
        self._cuts_LX = np.array(plan.cuts).reshape(len(model.table_LX), model.cfg.experts).tolist()
        own = allocate_workspace(model.manifest.decoder, model.largest_rank, tokens=FEW_TOKENS)
        sums_2TD = np.zeros((2, FEW_TOKENS, model.cfg.d_model), np.float32)
        self.hot = NeuronWorker(serial_add_neurons, ffn_of(model.cfg, own), own, sums_2TD[0])
        self.cold = NeuronWorker(add_neurons, model.ffn, model.workspace, sums_2TD[1])
        self._gpu_thread = ThreadPoolExecutor(1, thread_name_prefix="pi-stand-in")

    def ffn(self, layer: int) -> None:
        """Add both workers' sums, for a few tokens at a time."""
        for part in token_blocks(len(self.x_TD), FEW_TOKENS):
            self._ffn_of_few(layer, part)

    def cold_rows(self, _layer: int, w_X: LayerRecords, input_TD: Floats, ranges: Sequence[ExpertRange]) -> Ints:
        """Let the CPU's worker compute these neurons of a layer; returns what it counted."""
        return self.cold.run(w_X, input_TD, ranges)

    def _ffn_of_few(self, layer: int, part: slice) -> None:
        """Let both workers compute at once; a token wholly on one side needs no handover."""
        m, w_X, input_TD, cuts_X = self.model, self.model.table_LX[layer], self.input_TD[part], self._cuts_LX[layer]
        ws = m.workspace
        taken = tokens_by_expert(ws.expert_TK[part], ws.route_weight_TK[part], m.cfg.experts)
        hot = [ExpertRange(0, cuts_X[of[0]], *of) for of in taken if cuts_X[of[0]] > 0]
        cold = [ExpertRange(cuts_X[of[0]], m.cfg.d_ff, *of) for of in taken if cuts_X[of[0]] < m.cfg.d_ff]
        rows_T2 = np.zeros((len(input_TD), 2), np.int64)
        pending = self._gpu_thread.submit(self.hot.run, w_X, input_TD, hot) if hot else None
        try:
            if cold:
                rows_T2 += self.cold_rows(layer, w_X, input_TD, cold)
        finally:
            # Whatever happens here, the other worker must have left its workspace; its own error surfaces from here.
            if pending is not None:
                rows_T2 += pending.result()
        for worker, ranges in ((self.hot, hot), (self.cold, cold)):
            for t in sorted({t for r in ranges for t in r.token_N.tolist()}):
                self.x_TD[part][t] += worker.sum_TD[t]
        m.workspace.counts_LT3[layer, part, 1:] = rows_T2

    def close(self) -> None:
        """Let the thread return."""
        self._gpu_thread.shutdown()


class StandInExecutor(HostExecutor):
    """Decodes by a plan without a GPU: its schedule, with both sides on this processor and in this memory.

    So attention, embedding and head run on the CPU whatever side the plan names, and the result is the same. Prompts
    run dense on the CPU, whose memory holds everything. Close the executor, or its thread stays.
    """

    device_name = "stand-in"
    allocation: Allocation

    def __init__(
        self, artifact: Artifact, mode: str, threads: int, allocation: Allocation, cache: str = "auto"
    ) -> None:
        check_divisible(artifact.manifest)
        self._model = model = CpuModel(artifact, mode, allocation.context, threads, cache)
        self.allocation, self.context, self.neurons = allocation, allocation.context, model.neurons
        self.guess_head = model.new_guess_head()
        self._schedule, self.ops = schedule_of(allocation.plan), StandInOps(model, allocation.plan)

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences. With selection they go to both workers, unless they are counted."""
        with self._model.turn(sequences) as batches:
            parts = [list(part) for batch in batches for _, part in groupby(batch, lambda s: s.select and not s.count)]
            return [result for part in parts for result in self._run(part)]

    def _run(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        if not sequences[0].select or sequences[0].count:
            return self._model.run(sequences)
        # One core is the stand-in's.
        numba.set_num_threads(max(1, self._model.threads - 1))
        self.ops.take(sequences)
        for operation in self._schedule:
            operation.run({CPU: self.ops, GPU: self.ops})
        return self._model.finished(sequences, self.ops.states_TC)

    def _release(self) -> None:
        self.ops.close()
