"""Two workers at once: hot neurons on one, cold neurons on the other, one merge per FFN.

    x ← x + Σ hot + Σ cold + bias

A thread with the CPU's serial kernels stands in for the GPU, by the same plan and with the same handover. It is no
faster, but it runs on every machine, so that plans can be tested anywhere: attention, embedding and head run on the CPU
whatever side the plan names. Rows of cold neurons are in memory, or come from disk while the hot ones are summed; then
what a plan puts on the GPU lies in this memory too, but counts as the GPU's. So both budgets are kept, and the text is
the same to the last bit as with all cold rows in memory.

Shape letters: T tokens, N tokens that take one expert, D model width, L layers, X experts.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pi_runtime.artifact.footprint import FEW_TOKENS
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.errors import DoesNotFitError, Setting
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.execution.host import CpuModel, token_blocks
from pi_runtime.execution.ops import CpuOps
from pi_runtime.execution.rows import MemoryRows
from pi_runtime.kernels.data.workspace import allocate_workspace
from pi_runtime.kernels.ffn.memory import Batch, ffn_of, tokens_by_expert, whole_batch
from pi_runtime.kernels.ffn.network import serial_add_neurons


def check_divisible(manifest: Manifest) -> None:
    """Raise DoesNotFitError for a model whose FFNs cannot be computed in two places."""
    if manifest.decoder.inner_norms:
        raise DoesNotFitError(
            "an FFN whose values are normed together is not computed in two places",
            found="decoder.inner_norms",
            remedy=(Setting("device", "cpu"),),
        )


class HotWorker:
    """Computes ranges of each layer's neurons for a few tokens, on its own thread and in a workspace of its own."""

    def __init__(self, host: CpuModel) -> None:
        self._workspace = allocate_workspace(host.manifest.decoder, host.largest_rank, tokens=FEW_TOKENS)
        self._ffn = ffn_of(host.cfg, self._workspace)
        self.sum_TD = np.zeros((FEW_TOKENS, host.cfg.neuron_width), np.float32)
        """What it computed last."""

    def run(self, batches: Sequence[Batch], input_TD: Floats, tally_T3: Ints) -> None:
        """Compute these neurons of a layer; `tally_T3` ← their counts."""
        sum_TD, found_T3 = self.sum_TD[: len(input_TD)], np.empty_like(tally_T3)
        sum_TD[:] = 0
        for batch in batches:
            serial_add_neurons(self._ffn, batch, input_TD, found_T3, sum_TD)
            tally_T3 += found_T3


class StandIn(CpuOps):
    """Tokens in two parts: of each layer's neurons one worker has those below the cut, the other the rest.

    It is both sides of a plan. Each expert has a cut of its own. Close it, or its thread stays.
    """

    def __init__(self, host: CpuModel, rows: MemoryRows, plan: Plan) -> None:
        super().__init__(host, rows)
        self._cuts_LX = np.array(plan.cuts).reshape(len(host.table_LX), host.cfg.experts).tolist()
        self.hot, self._cold_sum_TD = HotWorker(host), np.zeros((FEW_TOKENS, host.cfg.neuron_width), np.float32)
        self._gpu_thread = ThreadPoolExecutor(1, thread_name_prefix="pi-stand-in")

    def ffn(self, layer: int) -> None:
        """Add both workers' sums, for a few tokens at a time."""
        for part in token_blocks(len(self.x_TD), FEW_TOKENS):
            self._ffn_of_few(layer, part)
        self.rows.end_layer(layer)

    def _ffn_of_few(self, layer: int, part: slice) -> None:
        """Let both workers compute at once; a token wholly on one side needs no handover."""
        h, w_X, input_TD, cuts_X = self.host, self.host.table_LX[layer], self.input_TD[part], self._cuts_LX[layer]
        ws, tokens, select_T = h.workspace, len(input_TD), self.select_T[part]
        taken = tokens_by_expert(ws.expert_TK[part], ws.route_weight_TK[part], h.cfg.experts)
        every = [whole_batch(h.ffn, w_X, e, token_N, select_T[token_N], w_N) for e, token_N, w_N in taken]
        hot = [batch._replace(high=cuts_X[batch.expert]) for batch in every if cuts_X[batch.expert] > 0]
        cold = [batch._replace(low=cuts_X[batch.expert]) for batch in every if cuts_X[batch.expert] < batch.high]
        hot_T3, cold_T3, cold_TD = *np.zeros((2, tokens, 3), np.int64), self._cold_sum_TD[:tokens]
        pending = self._gpu_thread.submit(self.hot.run, hot, input_TD, hot_T3) if hot else None
        try:
            if cold:
                self.rows.sum_few(layer, input_TD, cold, cold_T3, cold_TD)
        finally:
            # Whatever happens here, the other worker must have left its workspace; its own error surfaces from here.
            if pending is not None:
                pending.result()
        for sum_TD, batches in ((self.hot.sum_TD, hot), (cold_TD, cold)):
            for t in sorted({t for batch in batches for t in batch.token_N.tolist()}):
                self.sum_TD[part][t] += sum_TD[t]
        ws.counts_LT3[layer, part] = hot_T3 + cold_T3

    def close(self) -> None:
        """Let the thread return."""
        self._gpu_thread.shutdown()
