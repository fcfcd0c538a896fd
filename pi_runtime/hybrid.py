"""Two sides at work at once: hot neurons on one, cold neurons on the other, one merge per FFN.

    x ← x + Σ hot + Σ cold + bias

Here the stand-in plays the accelerator: the same plan and hand-over, with the CPU's serial kernels on a thread of its
own in the GPU's place. So the path is the same on every machine and can be tested there; it is no faster.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Plan
from pi_runtime.cache import KVCache
from pi_runtime.executor import CpuExecutor, Floats, Ints
from pi_runtime.kernels import ffn, table
from pi_runtime.kernels.buffers import Buffers, buffers
from pi_runtime.kernels.forward import attention, embed, head
from pi_runtime.kernels.linear import add_vector
from pi_runtime.kernels.table import Shape


@dataclass(frozen=True)
class Side:
    """Computes a range of each layer's neurons for one token, into partial sums of its own."""

    step: Any
    """`ffn.step` or `ffn.serial_step`."""
    shape: Shape
    buffers: Buffers

    def run(self, w: Ints, x_D: Floats, low: int, high: int) -> tuple[int, int]:
        """Neurons [low, high) of the layer with table row w; returns (rows of `first` read, neurons kept)."""
        read, kept = self.step(self.shape, w, x_D, low, high, self.buffers)
        return read, kept


class HybridExecutor(CpuExecutor):
    """Decodes by a plan: in layer l the hot side has neurons [0, cuts[l]), the cold side the rest.

    Attention, embedding and head run on the CPU whatever the plan says of their sides, because here both sides are
    the same processor and memory; what is computed is the same. Prompts run dense on the CPU, whose memory holds
    everything. Close it, or its thread stays.
    """

    def __init__(self, artifact: Artifact, mode: str, context: int, threads: int, plan: Plan) -> None:
        super().__init__(artifact, mode, context, threads)
        self.plan = plan
        self._cuts = plan.cuts
        hot_buffers = buffers(self._shape, len(self._table_LW), self._largest_rank, tokens=1)
        self.hot = Side(ffn.serial_step, self._shape, hot_buffers)
        self.cold = Side(ffn.step, self._shape, self._buffers)
        self._accelerator = ThreadPoolExecutor(1, thread_name_prefix="pi-stand-in")

    def run(self, tokens: Ints, cache: KVCache, *, select: bool, every: bool) -> Floats:
        """As `CpuExecutor.run`; a single token with selection and not `every` goes to both sides."""
        if len(tokens) > 1 or not select or every:
            return super().run(tokens, cache, select=select, every=every)
        self._check(tokens, cache)
        # One core is the stand-in's.
        numba.set_num_threads(max(1, self._threads - 1))
        b, s, start = self._buffers, self._shape, len(cache.tokens)
        x_TD = b.x_TD[:1]
        embed(s, self._ends, tokens, start, b.normed_TD[0], x_TD)
        for layer, w in enumerate(self._table_LW):
            attention(s, w, self._eps, self._cos_SE, self._sin_SE, start, cache.values[layer], x_TD, b)
            b.rows_L2[layer] = self._ffn(w, b.normed_TD[0], self._cuts[layer], x_TD[0])
        head(s, self._ends, self._eps, x_TD, b.records.ctypes.data, b.logits_TV[:1])
        cache.tokens += tokens.tolist()
        return b.logits_TV[:1]

    def _ffn(self, w: Ints, x_D: Floats, cut: int, y_D: Floats) -> Ints:
        """y ← y + the FFN of x, both sides at once; a layer wholly on one side hands nothing over."""
        rows = np.zeros(2, np.int64)
        pending: Future[tuple[int, int]] | None = None
        if cut > 0:
            pending = self._accelerator.submit(self.hot.run, w, x_D, 0, cut)
        try:
            if cut < self._shape.d_ff:
                rows += self.cold.run(w, x_D, cut, self._shape.d_ff)
        finally:
            # Whatever happens here, the other side must have left the buffers; its own fault surfaces from here.
            if pending is not None:
                rows += pending.result()
        if cut > 0:
            ffn.add_sums(self.hot.buffers.sums_CP, y_D)
        if cut < self._shape.d_ff:
            ffn.add_sums(self.cold.buffers.sums_CP, y_D)
        add_vector(w[table.DOWN_BIAS], y_D)
        return rows

    def close(self) -> None:
        self._accelerator.shutdown()
        super().close()
