"""What GPU and CPU do of one token in a mixture of experts, where that is not what they do without experts.

The router is where attention is. The experts taken and their shares go over with the FFN's input; cold rows that are
predicted are named in the whole layer (expert · F + neuron), hot ones as they lie on the GPU.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pi_runtime.cuda.decode.device_ops import Side
from pi_runtime.cuda.decode.host_ops import Host
from pi_runtime.cuda.kernels import ffn_neurons, moe
from pi_runtime.cuda.kernels.compaction import close
from pi_runtime.cuda.kernels.ffn_neurons import List
from pi_runtime.cuda.kernels.moe import Places, Taken
from pi_runtime.cuda.kernels.row_dot import linear
from pi_runtime.cuda.kernels.sign_selection import agree
from pi_runtime.execution.cpu import Floats, Ints
from pi_runtime.kernels.split_ffn import cold_sum_experts, predict_experts


@dataclass(frozen=True)
class RoutedSide(Side):
    """The GPU's part."""

    places: tuple[Places, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = tuple(Places.of(cuts, self.decoder.d_ff, self.device.device) for cuts in self.cuts)
        object.__setattr__(self, "places", found)

    @property
    def taken(self) -> Taken:
        return Taken(self.b.parcel.taken_K, self.b.parcel.share_K)

    def attention(self, layer: int) -> None:
        """As without experts; then those that the token goes to."""
        super().attention(layer)
        router = self.weights.matrix(f"layers/{layer}/ffn/router")
        linear(router, None, self.b.parcel.x_D, self.b.router_X, self.device.tiling)
        moe.choose(self.b.router_X, self.taken)

    def reduce(self, layer: int) -> None:
        if self.layers[layer].rung == "sign":
            return
        down = self.weights.matrix(f"layers/{layer}/predictor/down")
        rank = down.rows // self.decoder.n_experts
        r_KR = self.b.r_R[: rank * len(self.taken)].view(-1, rank)
        moe.reduce(down, self.taken, self.b.parcel.x_D, r_KR, self.device.tiling)

    def predict_cold(self, layer: int) -> None:
        b, room = self.b, self.cuts[layer].cold
        asked = List(b.others_F[:room], b.others_count)
        moe.members(self.taken, self.places[layer], asked, None, cold=True)
        self._select(layer, asked, asked, List(b.parcel.index_F[:room], b.parcel.count))

    def predict_hot(self, layer: int) -> None:
        b, room = self.b, self.cuts[layer].hot
        here = self._members(layer, b.rows_F)
        self._select(layer, List(b.rows_F[:room], here.count), here, List(b.hot_F[:room], b.hot_count))

    def _members(self, layer: int, rows_F: torch.Tensor | None) -> List:
        found = List(self.b.members_F[: self.cuts[layer].hot], self.b.members_count)
        moe.members(self.taken, self.places[layer], found, rows_F, cold=False)
        return found

    def _select(self, layer: int, asked: List, named: List, found: List) -> None:
        """Of neurons that are asked for those that the rung selects, under the names of another list."""
        b, at, how, d = self.b, f"layers/{layer}/predictor/", self.layers[layer], self.decoder
        marks_N = b.marks_F[: len(asked.index_F)]
        if how.rung == "sign":
            signs_FW = self.weights.arrays[f"{at}signs"]
            tile = agree(signs_FW, d.d_model, how.margin, b.parcel.x_D, marks_N, b.counts_F, asked)
        else:
            up, bias_F = self.weights.matrix(f"{at}up"), self.weights.arrays[f"{at}bias"]
            r_KR = b.r_R[: up.columns * len(self.taken)].view(-1, up.columns)
            tile = moe.predict(up, bias_F, r_KR, self.taken, asked, d.d_ff, marks_N, b.counts_F, self.device.tiling)
        close(marks_N, b.counts_F, tile, 0, (found.index_F, None, found.count), (named.index_F, named.count))

    def hot(self, layer: int) -> None:
        """As without experts, over a list in every case: of the rows of the experts taken."""
        b, n, tiling, room = self.b, self.layer_neurons(layer), self.device.tiling, self.cuts[layer].hot
        if not self.selects(layer):
            listed = self._members(layer, None)
        elif layer in self.cache:
            listed = List(b.hot_F[:room], b.hot_count)
        else:
            listed = List(b.parcel.index_F[:room], b.parcel.count)
        kept, h_K = listed, b.h_F[:room]
        tile = ffn_neurons.fire(n, b.parcel.x_D, listed, h_K, b.counts_F, tiling)
        if self.layers[layer].rung != "dense":
            kept, h_K = List(b.kept_F[:room], b.kept_count), b.kept_h_F[:room]
            close(b.h_F[:room], b.counts_F, tile, 0, (b.kept_F, h_K, b.kept_count), (listed.index_F, listed.count))
        moe.weigh(kept, h_K, self.taken, self.places[layer])
        ffn_neurons.add_up(n, kept, h_K, b.sums_SD, tiling)
        b.rows_L2[layer, :1].copy_(listed.count)
        b.rows_L2[layer, 1:].copy_(kept.count)


@dataclass(frozen=True)
class RoutedHost(Host):
    """The CPU's part."""

    cut_LX: Ints = field(init=False)
    base_LX: Ints = field(init=False)
    cold_F: npt.NDArray[np.int32] = field(init=False)
    """Cold rows that were predicted here."""

    def __post_init__(self) -> None:
        room = self.decoder.experts_per_token * self.decoder.d_ff
        object.__setattr__(self, "cut_LX", np.array([cuts.cut_X for cuts in self.cuts], np.int64))
        object.__setattr__(self, "base_LX", np.array([cuts.base_X for cuts in self.cuts], np.int64))
        object.__setattr__(self, "cold_F", np.zeros(room, np.int32))

    def hand_over(self) -> None:
        """The FFN's input and the experts taken, for the GPU."""
        super().hand_over()
        self.given.taken_K[:] = self.b.expert_TK[0]
        self.given.share_K[:] = self.b.route_weight_TK[0]

    def predict(self, layer: int) -> None:
        b, own = self.b, (self.cut_LX[layer], self.base_LX[layer])
        hot, cold = predict_experts(
            self.cfg, self.table_LXW[layer], b.normed_TD[0], *own, b, self.given.index_F, self.cold_F
        )
        self.given.count[0], self.step.listed = hot, cold

    def cold(self, layer: int) -> None:
        if self.cuts[layer].cold:
            given = self.given.taken_K, self.given.share_K
            self._sum(layer, self.b.normed_TD[0], *given, self.step.listed, self.cold_F, self.own_sum)

    def cold_for_gpu(self, layer: int) -> None:
        words = self.taken
        count = int(words.count[0])
        self._sum(layer, words.x_D, words.taken_K, words.share_K, count, words.index_F, self.sum_to_gpu)

    def _sum(
        self, layer: int, x_D: Floats, taken_K: npt.NDArray[np.int32], share_K: Floats, count: int,
        listed_F: npt.NDArray[np.int32], sum_D: Floats,
    ) -> None:  # fmt: skip
        self.b.rows_L2[layer] = cold_sum_experts(
            self.addresses, self.table_LXW[layer], x_D, taken_K, share_K, self.cut_LX[layer], self.predicts(layer),
            count, listed_F, sum_D,
        )  # fmt: skip
