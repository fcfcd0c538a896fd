"""What GPU and CPU do differently for one token in a mixture of experts.

The router is where the attention is. The token's experts and their weights cross with the FFN's input. Selected cold
rows are named by their rows in the whole layer (expert · F + neuron), hot ones by their rows on the GPU.

Legend: X experts, K of them a token, F neurons of an expert, D model width, L layers.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps
from pi_runtime.cuda.kernels import moe
from pi_runtime.cuda.kernels.compaction import NeuronList, compact
from pi_runtime.cuda.kernels.moe import DeviceCuts, Routing
from pi_runtime.cuda.kernels.row_dot import linear
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.kernels.split_ffn import cold_sum_experts, predict_experts


@dataclass(frozen=True)
class MoeDeviceOps(DeviceOps):
    """The GPU's work for one token in a mixture of experts."""

    device_cuts: tuple[DeviceCuts, ...] = field(init=False)

    def __post_init__(self) -> None:
        both = zip(self.cuts, self.workspace.cuts_L2X, strict=True)
        found = tuple(DeviceCuts.of(cuts, self.decoder.d_ff, cuts_2X) for cuts, cuts_2X in both)
        object.__setattr__(self, "device_cuts", found)

    @cached_property
    def routing(self) -> Routing:
        return Routing(self.workspace.handover.expert_K, self.workspace.handover.route_weight_K)

    def attention(self, layer: int) -> None:
        """x ← x + attention(norm(x)); the FFN's input and the token's experts go into the handover."""
        super().attention(layer)
        ws, router = self.workspace, self.weights.matrix(f"layers/{layer}/ffn/router")
        linear(router, None, ws.handover.x_D, ws.router_X, self.device.tiling)
        moe.route(ws.router_X, self.routing)

    def prepare_selector(self, layer: int) -> None:
        self.selector(layer).prepare(self.routing)

    def select_cold(self, layer: int) -> None:
        ws, room = self.workspace, self.cuts[layer].cold
        candidates = ws.expert_cold.first(room)
        moe.list_expert_neurons(self.routing, self.device_cuts[layer], candidates, None, cold=True)
        found = NeuronList(ws.handover.index_F[:room], ws.handover.count)
        self._select_listed(layer, candidates, candidates, found)

    def select_hot(self, layer: int) -> None:
        ws, room = self.workspace, self.cuts[layer].hot
        on_device = self._expert_hot(layer, ws.expert_hot_rows_F)
        candidates = NeuronList(ws.expert_hot_rows_F[:room], on_device.count)
        self._select_listed(layer, candidates, on_device, ws.hot.first(room))

    def _expert_hot(self, layer: int, rows_F: torch.Tensor | None) -> NeuronList:
        """The hot neurons of the token's experts; their rows in the whole layer go to `rows_F`."""
        found = self.workspace.expert_hot.first(self.cuts[layer].hot)
        moe.list_expert_neurons(self.routing, self.device_cuts[layer], found, rows_F, cold=False)
        return found

    def _select_listed(self, layer: int, candidates: NeuronList, named: NeuronList, found: NeuronList) -> None:
        """Select among the candidates, and list each under its index in `named`."""
        ws = self.workspace
        marks_N = ws.marks_F[: candidates.room]
        tile = self.selector(layer).mark_listed(candidates, self.routing, self.decoder.d_ff, marks_N)
        compact(marks_N, ws.counts_F, tile, found, within=named)

    def _hot_list(self, layer: int) -> NeuronList:
        """A list in every case: of all hot neurons of the token's experts where the rung selects none."""
        return self._selected_hot(layer) if self.selects(layer) else self._expert_hot(layer, None)

    def _weight(self, layer: int, kept: NeuronList | None, h_K: torch.Tensor) -> None:
        assert kept is not None
        moe.apply_route_weights(kept, h_K, self.routing, self.device_cuts[layer])


@dataclass(frozen=True)
class MoeHostOps(HostOps):
    """The CPU's work for one token in a mixture of experts."""

    cut_LX: Ints = field(init=False)
    base_LX: Ints = field(init=False)
    cold_F: npt.NDArray[np.int32] = field(init=False)
    """Cold rows that were selected here."""

    def __post_init__(self) -> None:
        room = self.decoder.experts_per_token * self.decoder.d_ff
        object.__setattr__(self, "cut_LX", np.array([cuts.cut_X for cuts in self.cuts], np.int64))
        object.__setattr__(self, "base_LX", np.array([cuts.base_X for cuts in self.cuts], np.int64))
        object.__setattr__(self, "cold_F", np.zeros(room, np.int32))

    def send_handover(self) -> None:
        """Leave the FFN's input and the token's experts for the GPU."""
        super().send_handover()
        self.send.expert_K[:] = self.workspace.expert_TK[0]
        self.send.route_weight_K[:] = self.workspace.route_weight_TK[0]

    def select(self, layer: int) -> None:
        ws, own = self.workspace, (self.cut_LX[layer], self.base_LX[layer])
        hot, cold = predict_experts(
            self.cfg, self.table_LXW[layer], ws.normed_TD[0], *own, ws, self.send.index_F, self.cold_F
        )
        self.send.count[0], self.step.listed = hot, cold

    def cold_sum(self, layer: int) -> None:
        if self.cuts[layer].cold:
            routing = self.send.expert_K, self.send.route_weight_K
            x_D = self.workspace.normed_TD[0]
            self._experts_sum(layer, x_D, *routing, self.step.listed, self.cold_F, self.own_sum)

    def cold_sum_for_device(self, layer: int) -> None:
        recv = self.recv
        count = int(recv.count[0])
        routing = recv.expert_K, recv.route_weight_K
        self._experts_sum(layer, recv.x_D, *routing, count, recv.index_F, self.sum_to_device)

    def _experts_sum(
        self, layer: int, x_D: Floats, expert_K: npt.NDArray[np.int32], route_weight_K: Floats, count: int,
        listed_F: npt.NDArray[np.int32], sum_D: Floats,
    ) -> None:  # fmt: skip
        self.workspace.rows_L2[layer] = cold_sum_experts(
            self.addresses, self.table_LXW[layer], x_D, expert_K, route_weight_K, self.cut_LX[layer],
            self.selects(layer), count, listed_F, sum_D,
        )  # fmt: skip
