"""Two sides at work at once: hot neurons on one, cold neurons on the other, one merge per FFN.

    x ← x + Σ hot + Σ cold + bias

Here the stand-in plays the accelerator: the same plan and hand-over, with the CPU's serial kernels on a thread of its
own in the GPU's place. So the path is the same on every machine and can be tested there; it is no faster.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Plan
from pi_runtime.execution.cpu import CpuExecutor, Floats, Ints
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.kernels import ffn
from pi_runtime.kernels.data.weight_table import Shape
from pi_runtime.kernels.data.workspace import Buffers, buffers
from pi_runtime.kernels.forward import after_ffn, attention, embed, head

Work = tuple[int, np.float32, int, int]
"""An expert, its share of the token, and the range of its neurons, not an empty one."""


@dataclass(frozen=True)
class Side:
    """Computes ranges of each layer's neurons for one token, into partial sums of its own."""

    step: Any
    """`ffn.step` or `ffn.serial_step`."""
    shape: Shape
    buffers: Buffers

    def run(self, w_XW: Ints, x_D: Floats, work: Sequence[Work]) -> Ints:
        """The neurons of a layer that `work` names; returns the sums of (rows of `first` read, neurons kept)."""
        rows_2 = np.zeros(2, np.int64)
        for n, (expert, share, low, high) in enumerate(work):
            rows_2 += self.step(self.shape, w_XW[expert], x_D, low, high, share, n > 0, self.buffers)
        return rows_2


class HybridExecutor(CpuExecutor):
    """Decodes by a plan: in each layer the hot side has the neurons up to a cut, with experts up to one in each, and
    the cold side the rest.

    Attention, embedding and head run on the CPU whatever the plan says of their sides, because here both sides are
    the same processor and memory; what is computed is the same. Prompts run dense on the CPU, whose memory holds
    everything. Close it, or its thread stays.
    """

    device_name = "stand-in"

    def __init__(self, artifact: Artifact, mode: str, context: int, threads: int, plan: Plan) -> None:
        super().__init__(artifact, mode, context, threads)
        self.plan = plan
        self._cuts_LX = np.array(plan.cuts).reshape(len(self._table_LXW), self._shape.experts).tolist()
        hot_buffers = buffers(self._shape, len(self._table_LXW), self._largest_rank, tokens=1)
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
        b, s, start, words_L2GSW = self._buffers, self._shape, len(cache.tokens), cache.words
        x_TD = b.x_TD[:1]
        embed(s, self._ends, tokens, start, b, x_TD)
        for layer, w_XW in enumerate(self._table_LXW):
            attention(s, w_XW[0], self._eps, self._cos_SJ, self._sin_SJ, start, words_L2GSW[layer], x_TD, b)
            b.rows_L2[layer] = self._ffn(w_XW, b.normed_TD[0], self._cuts_LX[layer], x_TD[0])
            after_ffn(s, w_XW[0], self._eps, x_TD)
        head(s, self._ends, self._eps, x_TD, b, b.logits_TV[:1])
        cache.tokens += tokens.tolist()
        return b.logits_TV[:1]

    def _ffn(self, w_XW: Ints, x_D: Floats, cut_X: Sequence[int], y_D: Floats) -> Ints:
        """y ← y + the FFN of x, both sides at once; a token wholly on one side hands nothing over."""
        b, width, rows_2 = self._buffers, self._shape.d_ff, np.zeros(2, np.int64)
        taken = list(zip(b.taken_TK[0].tolist(), b.share_TK[0], strict=True))
        hot: list[Work] = [(e, share, 0, cut_X[e]) for e, share in taken if cut_X[e] > 0]
        cold: list[Work] = [(e, share, cut_X[e], width) for e, share in taken if cut_X[e] < width]
        pending = self._accelerator.submit(self.hot.run, w_XW, x_D, hot) if hot else None
        try:
            if cold:
                rows_2 += self.cold.run(w_XW, x_D, cold)
        finally:
            # Whatever happens here, the other side must have left the buffers; its own fault surfaces from here.
            if pending is not None:
                rows_2 += pending.result()
        if hot:
            ffn.add_sums(self.hot.buffers.sums_CP, y_D)
        if cold:
            ffn.add_sums(self.cold.buffers.sums_CP, y_D)
        return rows_2

    def close(self) -> None:
        self._accelerator.shutdown()
        super().close()
