"""The GPU's work for one token, operation by operation; nothing here waits or asks for a number.

x ← x + attention(norm(x))                  attention
handover ← norm(x), selected cold rows      prepare_selector, select_cold, send_handover
sums ← Σ hot h_i down_i                     select_hot, hot_sums
x ← x + sums + the CPU's sum + bias         receive_sum, merge

Legend: D model width, F neurons, N of them, L layers.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer
from pi_runtime.cuda.decode.decoder_parts import DecoderParts, TokenProducts
from pi_runtime.cuda.decode.selectors import Selector, picks, selector_of
from pi_runtime.cuda.kernels import ffn_neurons, residual
from pi_runtime.cuda.kernels.activations import CODES
from pi_runtime.cuda.kernels.compaction import NeuronList, compact
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.handover import PinnedBuffers
from pi_runtime.cuda.memory.weights import DeviceWeights
from pi_runtime.cuda.memory.workspace import Workspace
from pi_runtime.execution.plan_layout import Cuts


@dataclass(frozen=True)
class DeviceOps:
    """One artifact's weights and cache on the GPU, and the memory that its operations work in."""

    decoder: Decoder
    layers: tuple[Layer, ...]
    """How each layer is run."""
    cuts: tuple[Cuts, ...]
    weights: DeviceWeights
    device: Device
    workspace: Workspace
    cache: dict[int, torch.Tensor]
    """(2, G, S, E) for each layer whose attention is on the GPU."""
    pinned: PinnedBuffers

    @cached_property
    def parts(self) -> DecoderParts:
        """What decoding and reading prompts share."""
        return DecoderParts(self.decoder, self.weights, self.workspace, self.cache)

    @cached_property
    def _products(self) -> TokenProducts:
        return TokenProducts(self.device.tiling, self.workspace.partials)

    def receive_token(self) -> None:
        """Fetch the token's id and position from the host."""
        self.workspace.token.copy_(self.pinned.token[:1], non_blocking=True)
        self.workspace.position.copy_(self.pinned.token[1:], non_blocking=True)

    def embed(self) -> None:
        ws = self.workspace
        self.parts.embed(self._products, ws.token, ws.position, 0, ws.narrow_W[None], ws.x_D[None])

    def attention(self, layer: int) -> None:
        """x ← x + attention(norm(x)), and the FFN's input into the handover."""
        ws = self.workspace
        x_1D, normed_1D = ws.x_D[None], ws.handover.x_D[None]
        self.parts.attention(self._products, layer, x_1D, normed_1D, ws.qkv_Q[None], ws.attn_out_O[None])

    def selects(self, layer: int) -> bool:
        """Whether the layer's rung reads only some rows of `first`."""
        return picks(self.layers[layer])

    def selector(self, layer: int) -> Selector:
        return selector_of(self.layers, layer, self.weights, self.workspace, self.device.tiling)

    def prepare_selector(self, layer: int) -> None:
        """Compute what the selection of hot and cold neurons shares."""
        self.selector(layer).prepare(None)

    def select_cold(self, layer: int) -> None:
        """List the selected cold neurons in the handover."""
        cuts, handover = self.cuts[layer], self.workspace.handover
        self._select(layer, cuts.hot, self.decoder.d_ff, NeuronList(handover.index_F, handover.count))

    def select_hot(self, layer: int) -> None:
        """List the selected hot neurons."""
        self._select(layer, 0, self.cuts[layer].hot, self.workspace.hot)

    def _select(self, layer: int, low: int, high: int, found: NeuronList) -> None:
        ws = self.workspace
        marks_N = ws.marks_F[: high - low]
        tile = self.selector(layer).mark_range(low, high, marks_N)
        compact(marks_N, ws.counts_F, tile, found, low=low)

    def send_handover(self, rows: int | None) -> None:
        """Send the FFN's input, and up to so many cold rows, to the host."""
        self.pinned.handover_to_host.first(rows).copy_(self.workspace.handover.first(rows), non_blocking=True)

    def receive_handover(self, rows: int | None) -> None:
        """Fetch the FFN's input, and up to so many hot rows, from the host."""
        self.workspace.handover.first(rows).copy_(self.pinned.handover_to_device.first(rows), non_blocking=True)

    def layer_neurons(self, layer: int) -> ffn_neurons.Neurons:
        """The layer's neurons on the GPU."""
        at, w = f"layers/{layer}/ffn/", self.weights
        return ffn_neurons.Neurons(
            first=w.matrix(f"{at}first"),
            first_bias=w.vector(f"{at}first_bias"),
            rest=w.matrix(f"{at}rest"),
            up_bias=w.vector(f"{at}up_bias"),
            activation=CODES[self.decoder.activation],
            limit=max(self.decoder.threshold, self.layers[layer].threshold),
        )

    def hot_sums(self, layer: int) -> None:
        """sums ← the partial sums of the hot neurons, of the selected ones where the rung selects."""
        ws, n, tiling, room = self.workspace, self.layer_neurons(layer), self.device.tiling, self.cuts[layer].hot
        listed = self._hot_list(layer)
        h_N = ws.h_F[:room]
        tile = ffn_neurons.neuron_activations(n, ws.handover.x_D, listed, h_N, ws.counts_F, tiling)
        kept, h_K = listed, h_N
        if not RUNGS[self.layers[layer].rung].dense:
            kept, h_K = ws.kept.first(room), ws.kept_h_F[:room]
            compact(h_N, ws.counts_F, tile, kept, h_K, within=listed)
        self._weight(layer, kept, h_K)
        ffn_neurons.down_sums(n, kept, h_K, ws.sums_SD, tiling)
        if listed is not None:
            ws.rows_L2[layer, :1].copy_(listed.count)
        if kept is not None:
            ws.rows_L2[layer, 1:].copy_(kept.count)

    def _hot_list(self, layer: int) -> NeuronList | None:
        """The hot neurons to compute; None for all of them."""
        return self._selected_hot(layer) if self.selects(layer) else None

    def _selected_hot(self, layer: int) -> NeuronList:
        """The selected hot neurons: selected here, or received where the predictor is on the host."""
        ws, room = self.workspace, self.cuts[layer].hot
        found = ws.hot if layer in self.cache else NeuronList(ws.handover.index_F, ws.handover.count)
        return found.first(room)

    def _weight(self, layer: int, kept: NeuronList | None, h_K: torch.Tensor) -> None:
        """Multiply activations with the weights of their experts; there is one expert, of weight 1."""

    def receive_sum(self) -> None:
        """Fetch the cold neurons' sum from the host."""
        self.workspace.host_sum_D.copy_(self.pinned.sum_to_device, non_blocking=True)

    def merge(self, layer: int, *, hot: bool, cold: bool) -> None:
        """x ← x + the hot neurons' sums + the cold neurons' sum + the bias."""
        ws = self.workspace
        sums, host_sum = ws.sums_SD if hot else None, ws.host_sum_D if cold else None
        residual.merge(ws.x_D, sums, host_sum, self.weights.vector(f"layers/{layer}/ffn/down_bias"))
        self.parts.norm_after_ffn(layer, ws.x_D[None])

    def send_sum(self) -> None:
        """Send the hot neurons' sum to the host, where the residual is."""
        ws = self.workspace
        ws.host_sum_D.zero_()
        residual.merge(ws.host_sum_D, ws.sums_SD)
        self.pinned.sum_to_host.copy_(ws.host_sum_D, non_blocking=True)

    def send_residual(self) -> None:
        self.pinned.x_to_host.copy_(self.workspace.x_D, non_blocking=True)

    def receive_residual(self) -> None:
        self.workspace.x_D.copy_(self.pinned.x_to_device, non_blocking=True)

    def head(self) -> None:
        """logits = norm(x) Wᵀ + bias, to the host."""
        ws, parts = self.workspace, self.parts
        input_1D = parts.head_input(self._products, ws.x_D[None], ws.handover.x_D[None], ws.narrow_W[None])
        self._products.linear(parts.head, self.weights.vector("head_bias"), input_1D, ws.logits_V[None])
        self.pinned.logits.copy_(ws.logits_V, non_blocking=True)

    def send_rows(self) -> None:
        """Send to the host how many rows were read and kept."""
        self.pinned.rows_L2.copy_(self.workspace.rows_L2, non_blocking=True)
