"""What the CPU does of one token beside a GPU: the compiled pieces of `pi_runtime.kernels`, on its own buffers.

Neurons from a layer's cut on are the CPU's. Where the residual is on the GPU, the FFN's input and the cold rows that
were predicted arrive in a parcel, and the sum leaves in `sum_to_gpu`; where it is here, a parcel with hot rows goes out
and the GPU's sum comes in `sum_to_host`.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.cuda.memory.workspace import Parcel
from pi_runtime.cuda.plan_layout import Cuts
from pi_runtime.execution.cpu import Floats, Ints
from pi_runtime.kernels import ffn, moe
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import Halves
from pi_runtime.kernels.data.weight_table import Ends, KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.forward import after_ffn, attention, embed, head
from pi_runtime.kernels.split_ffn import cold_sum, predict


@dataclass
class Step:
    """The token at work."""

    tokens: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    start: int = 0
    cache_L2GSW: Halves = field(default_factory=lambda: np.zeros((0, 2, 0, 0, 0), np.uint16))
    listed: int = 0
    """Cold neurons that are predicted, in `candidates_F`."""


@dataclass(frozen=True)
class Words:
    """A parcel in pinned memory as arrays."""

    x_D: Floats
    share_K: Floats
    taken_K: npt.NDArray[np.int32]
    count: npt.NDArray[np.int32]
    index_F: npt.NDArray[np.int32]

    @classmethod
    def of(cls, p: Parcel) -> "Words":
        return cls(p.x_D.numpy(), p.share_K.numpy(), p.taken_K.numpy(), p.count.numpy(), p.index_F.numpy())


@dataclass(frozen=True)
class Host:
    """The CPU's side of one artifact."""

    decoder: Decoder
    cfg: KernelConfig
    ends: Ends
    table_LXW: Ints
    eps: np.float32
    cos_SJ: Floats
    sin_SJ: Floats
    b: Workspace
    cuts: tuple[Cuts, ...]
    step: Step
    given: Words
    """The parcel for the GPU."""
    taken: Words
    """The one from it."""
    sum_to_gpu: Floats
    sum_to_host: Floats
    addresses: Ints
    """For `cold_sum`."""
    own_sum: Floats
    """Of the cold neurons where the residual is here."""
    x_to_gpu: Floats
    x_to_host: Floats

    @property
    def x_1D(self) -> Floats:
        return self.b.x_TD[:1]

    def embed(self) -> None:
        embed(self.cfg, self.ends, self.step.tokens, self.step.start, self.b, self.x_1D)

    def attention(self, layer: int) -> None:
        """x ← x + attention(norm(x)); then the FFN's input."""
        s, cache = self.step, self.step.cache_L2GSW[layer]
        w = self.table_LXW[layer, 0]
        attention(self.cfg, w, self.eps, self.cos_SJ, self.sin_SJ, s.start, cache, self.x_1D, self.b)

    def whole(self, layer: int) -> None:
        """x ← x + FFN: no neuron is on the GPU."""
        b, w_XW = self.b, self.table_LXW[layer]
        b.rows_L2[layer] = moe.step(self.cfg, w_XW, b.normed_TD[0], b)
        ffn.add_sums(b.sums_CP, self.x_1D[0])
        after_ffn(self.cfg, w_XW[0], self.eps, self.x_1D)

    def predicts(self, layer: int) -> bool:
        return bool(self.table_LXW[layer, 0, weight_table.SELECTOR] != weight_table.SELECTOR_CODES[None])

    def hand_over(self) -> None:
        """The FFN's input for the GPU."""
        self.given.x_D[:] = self.b.normed_TD[0]

    def predict(self, layer: int) -> None:
        """Hot rows that are predicted, for the GPU; cold ones stay in the list here."""
        found = predict(self.cfg, self.table_LXW[layer, 0], self.b.normed_TD[0], self.b)
        rows_F = self.b.candidates_F[:found]
        hot = int(np.searchsorted(rows_F, self.cuts[layer].hot))
        self.given.count[0] = hot
        self.given.index_F[:hot] = rows_F[:hot]
        rows_F[: found - hot] = rows_F[hot:].copy()
        self.step.listed = found - hot

    def cold(self, layer: int) -> None:
        """The sum of the neurons that are here, of an input that is here."""
        if self.cuts[layer].cold:
            self._cold(layer, self.b.normed_TD[0], self.step.listed, self.own_sum)

    def cold_for_gpu(self, layer: int) -> None:
        """The same of the input that the GPU sent, to be fetched by it."""
        count = 0
        if self.predicts(layer):
            count = int(self.taken.count[0])
            self.b.candidates_F[:count] = self.taken.index_F[:count]
        self._cold(layer, self.taken.x_D, count, self.sum_to_gpu)

    def _cold(self, layer: int, x_D: Floats, count: int, sum_D: Floats) -> None:
        low, listed = self.cuts[layer].hot, self.predicts(layer)
        count = count if listed else self.cuts[layer].cold
        kept = cold_sum(self.addresses, self.table_LXW[layer, 0], x_D, low, count, listed, sum_D)
        self.b.rows_L2[layer, 0], self.b.rows_L2[layer, 1] = count, kept

    def merge(self, layer: int) -> None:
        """x ← x + what both sides found + the bias, once."""
        if self.cuts[layer].cold:
            self.x_1D[0] += self.own_sum
        self.x_1D[0] += self.sum_to_host
        after_ffn(self.cfg, self.table_LXW[layer, 0], self.eps, self.x_1D)

    def cross_out(self) -> None:
        """The residual to the GPU."""
        self.x_to_gpu[:] = self.x_1D[0]

    def cross_in(self) -> None:
        self.x_1D[0] = self.x_to_host

    def head(self) -> None:
        head(self.cfg, self.ends, self.eps, self.x_1D, self.b, self.b.logits_TV[:1])
