"""The GPU's work for some tokens, each of its own sequence, operation by operation.

Nothing here waits or asks for a number.

x ← x + attention(norm(x))                  attention
handover ← norm(x), selected cold rows      prepare_selector, select_cold, send_handover
sums ← Σ hot h_i down_i                     select_hot, hot_sums
x ← x + sums + the CPU's sum + bias         receive_sum, merge

In a mixture of experts the router is where the attention is. A token's experts and their weights go with the FFN's
input. Their neurons on the GPU are a list, as selected neurons are. Selected cold rows are named by their rows in the
whole layer (expert · F + neuron), hot ones by their rows on the GPU. Without experts the two are the same.

Rungs that read only some rows of `first` name them by a low-rank predictor (`prepare_selector`).

Shape letters: M tokens, D model width, F neurons of an expert, N of them, K experts of a token, L layers, P pages, G
key-value heads, S positions of a page, E head width.
"""

from dataclasses import dataclass, replace

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer
from pi_runtime.cuda.decode.decoder_parts import DecoderParts
from pi_runtime.cuda.kernels import ffn_neurons, moe, residual
from pi_runtime.cuda.kernels.compaction import NeuronList, compact
from pi_runtime.cuda.kernels.ffn_neurons import CODES
from pi_runtime.cuda.kernels.gathered_sum import gathered_sums
from pi_runtime.cuda.kernels.moe import DeviceCuts, Routing
from pi_runtime.cuda.kernels.row_dot import linear
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.handover import PinnedBuffers
from pi_runtime.cuda.memory.weights import DeviceWeights
from pi_runtime.cuda.memory.workspace import DeviceWorkspace
from pi_runtime.execution.plan_layout import Cuts


@dataclass
class DeviceOps:
    """One artifact's weights and cache on the GPU, and the memory that its operations work in."""

    decoder: Decoder
    layers: tuple[Layer, ...]
    """How each layer is run."""
    cuts: tuple[Cuts, ...]
    weights: DeviceWeights
    device: Device
    workspace: DeviceWorkspace
    cache: dict[int, torch.Tensor]
    """(P, 2, G, S, E) for each layer whose attention is on the GPU."""
    pinned: PinnedBuffers

    def __post_init__(self) -> None:
        d, ws = self.decoder, self.workspace
        self.tokens = len(ws.x_MD)
        tokens = ws.x_MD, ws.handover.x_MD, ws.qkv_MQ, ws.attn_out_MO
        self.parts = DecoderParts(d, self.weights, ws, self.cache, self.device.tiling, ws.partials, *tokens)
        self._routing: Routing | None = None
        """The tokens' experts; None without experts."""
        if d.n_experts > 1:
            self._routing = Routing(ws.handover.expert_MK, ws.handover.route_weight_MK)
            each = zip(self.cuts, ws.cuts_L2X, strict=True)
            self._device_cuts = [DeviceCuts.of(cuts, d.d_ff, cuts_2X) for cuts, cuts_2X in each]

    def for_tokens(self, tokens: int) -> "DeviceOps":
        """The same in the memory of the first tokens alone."""
        return replace(self, workspace=self.workspace.first(tokens), pinned=self.pinned.first(tokens))

    def receive_tokens(self) -> None:
        """Fetch the tokens' ids, positions and tables of pages from the host."""
        self.workspace.token_words.used.copy_(self.pinned.token_words.used, non_blocking=True)

    def embed(self) -> None:
        words = self.workspace.token_words
        self.parts.embed(words.id_M, words.position_M, 0)

    def attention(self, layer: int) -> None:
        """x ← x + attention(norm(x)); the FFN's input, and the tokens' experts, into the handover."""
        self.parts.attention(layer, self.tokens)
        if self._routing is not None:
            ws, router = self.workspace, self.weights.matrix(f"layers/{layer}/ffn/router")
            linear(router, None, ws.handover.x_MD, ws.router_MX, self.device.tiling)
            moe.route(ws.router_MX, self._routing, normalised=self.decoder.router_normalised)

    def prepare_selector(self, layer: int) -> None:
        """Compute what the selection of hot and cold neurons shares: down · x of the predictor."""
        down, x_MD = self.weights.matrix(f"layers/{layer}/predictor/down"), self.workspace.handover.x_MD
        linear(down, None, x_MD, self._reduced(layer), self.device.tiling, expert_MK=self._expert_MK)

    @property
    def _expert_MK(self) -> torch.Tensor | None:
        """The tokens' experts; None without experts."""
        return None if self._routing is None else self._routing.expert_MK

    def _reduced(self, layer: int) -> torch.Tensor:
        """Room for R numbers of each token, or of each of its experts."""
        slots = 1 if self._expert_MK is None else self._expert_MK.shape[1]
        return self.workspace.r_MR[:, : slots * self.weights.matrix(f"layers/{layer}/predictor/up").columns]

    def select_cold(self, layer: int) -> None:
        """List the selected cold neurons in the handover."""
        cuts, ws, d_ff = self.cuts[layer], self.workspace, self.decoder.d_ff
        found = ws.handover.listed(cuts.cold)
        if self._routing is None:
            self._select(layer, cuts.hot, d_ff, found)
            return
        candidates = ws.expert_cold.first(cuts.cold)
        moe.list_expert_neurons(self._routing, self._device_cuts[layer], candidates, None, cold=True)
        self._select(layer, 0, self.decoder.n_experts * d_ff, found, candidates, candidates)

    def select_hot(self, layer: int) -> None:
        """List the selected hot neurons."""
        hot, ws = self.cuts[layer].hot, self.workspace
        if self._routing is None:
            self._select(layer, 0, hot, ws.hot)
            return
        on_device = self._expert_hot(layer, ws.expert_hot_rows_MF)
        candidates = NeuronList.of(ws.expert_hot_rows_MF[:, :hot], on_device.length_M)
        self._select(layer, 0, self.decoder.n_experts * self.decoder.d_ff, ws.hot, candidates, on_device)

    def _select(
        self, layer: int, low: int, high: int, found: NeuronList, candidates: NeuronList | None = None,
        names: NeuronList | None = None,
    ) -> None:  # fmt: skip
        """List the neurons of [low, high) whose score  up · (down · x) + bias  is above 0.

        Of candidates among them, which are rows expert · F + neuron, they are listed by their `names`.
        """
        ws, w, at = self.workspace, self.weights, f"layers/{layer}/predictor/"
        marks_MN = ws.marks_MF[:, : high - low if candidates is None else candidates.room]
        tile = ffn_neurons.predict(
            w.matrix(f"{at}up")[low:high], w.arrays[f"{at}bias"][low:high], self._reduced(layer), marks_MN,
            ws.counts_MF, self.device.tiling, candidates, self._expert_MK, self.decoder.d_ff,
        )  # fmt: skip
        compact(marks_MN, ws.counts_MF, tile, found, low=low, within=names)

    def _expert_hot(self, layer: int, rows_MF: torch.Tensor | None) -> NeuronList:
        """List the hot neurons of the tokens' experts; their rows in the whole layer go to `rows_MF`."""
        assert self._routing is not None
        found = self.workspace.expert_hot.first(self.cuts[layer].hot)
        moe.list_expert_neurons(self._routing, self._device_cuts[layer], found, rows_MF, cold=False)
        return found

    def send_handover(self, rows: int | None) -> None:
        """Send the FFN's input, and at most `rows` cold rows, to the host."""
        self.pinned.handover_to_host.first(rows).copy_(self.workspace.handover.first(rows), non_blocking=True)

    def receive_handover(self, rows: int | None) -> None:
        """Fetch the FFN's input, and at most `rows` hot rows, from the host."""
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
        wanted = self._wanted_hot(layer)
        h_MN = ws.h_MF[:, :room]
        tile = ffn_neurons.neuron_activations(n, ws.handover.x_MD, wanted, h_MN, ws.counts_MF, tiling)
        kept, h_MK = wanted, h_MN
        if not RUNGS[self.layers[layer].rung].dense:
            kept, h_MK = ws.kept.first(room), ws.kept_h_MF[:, :room]
            compact(h_MN, ws.counts_MF, tile, kept, h_MK, within=wanted)
        if self._routing is not None:
            assert kept is not None
            moe.apply_route_weights(kept, h_MK, self._routing, self._device_cuts[layer])
        gathered_sums(n.down, kept, h_MK, ws.sums_MSD, tiling)
        if wanted is not None:
            ws.rows_ML2[:, layer, 0].copy_(wanted.length_M)
        if kept is not None:
            ws.rows_ML2[:, layer, 1].copy_(kept.length_M)

    def _wanted_hot(self, layer: int) -> NeuronList | None:
        """The hot neurons to compute; None for all of the layer's.

        Selected neurons were listed here, or by the host where the predictor is there.
        """
        ws, hot = self.workspace, self.cuts[layer].hot
        if RUNGS[self.layers[layer].rung].picks:
            return ws.hot.first(hot) if layer in self.cache else ws.handover.listed(hot)
        return None if self._routing is None else self._expert_hot(layer, None)

    def receive_sum(self) -> None:
        """Fetch the cold neurons' sum from the host."""
        self.workspace.host_sum_MD.copy_(self.pinned.sum_to_device, non_blocking=True)

    def merge(self, layer: int, *, hot: bool, cold: bool) -> None:
        """x ← x + the hot neurons' sums + the cold neurons' sum + the bias."""
        ws = self.workspace
        sums_MSD, host_sum_MD = ws.sums_MSD if hot else None, ws.host_sum_MD if cold else None
        residual.merge(ws.x_MD, sums_MSD, host_sum_MD, self.weights.vector(f"layers/{layer}/ffn/down_bias"))
        self.parts.norm_after_ffn(layer, self.tokens)

    def send_sum(self) -> None:
        """Send the hot neurons' sum to the host, where the residual is."""
        ws = self.workspace
        ws.host_sum_MD.zero_()
        residual.merge(ws.host_sum_MD, ws.sums_MSD)
        self.pinned.sum_to_host.copy_(ws.host_sum_MD, non_blocking=True)

    def send_residual(self) -> None:
        self.pinned.x_to_host.copy_(self.workspace.x_MD, non_blocking=True)

    def receive_residual(self) -> None:
        self.workspace.x_MD.copy_(self.pinned.x_to_device, non_blocking=True)

    def head(self) -> None:
        """logits = norm(x) Wᵀ + bias, to the host."""
        ws, parts = self.workspace, self.parts
        input_MD, bias_V = parts.head_input(self.tokens), self.weights.vector("head_bias")
        linear(parts.head, bias_V, input_MD, ws.logits_MV, self.device.tiling)
        parts.finish_logits(ws.logits_MV)
        self.pinned.logits_MV.copy_(ws.logits_MV, non_blocking=True)

    def send_rows(self) -> None:
        """Send to the host how many rows were read and kept."""
        self.pinned.rows_ML2.copy_(self.workspace.rows_ML2, non_blocking=True)
