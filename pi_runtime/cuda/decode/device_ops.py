"""What the GPU does of one token, operation by operation; nothing here waits or asks for a number.

x ← x + attention(norm(x))          attention
parcel ← norm(x), cold rows         predict, hand_over
sums ← Σ hot h_i down_i             hot
x ← x + sums + other + bias         take, merge
"""

from dataclasses import dataclass

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.schema import Layer
from pi_runtime.cuda.kernels import attention, ffn_neurons, residual
from pi_runtime.cuda.kernels.activations import CODES
from pi_runtime.cuda.kernels.compaction import close
from pi_runtime.cuda.kernels.dequantise import unpack
from pi_runtime.cuda.kernels.row_dot import linear
from pi_runtime.cuda.kernels.sign_selection import agree
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.weights import Weights
from pi_runtime.cuda.memory.workspace import Buffers, Parcel, slots_of
from pi_runtime.cuda.plan_layout import Cuts


@dataclass(frozen=True)
class Side:
    """One artifact's part on the GPU, its cache, and the memory it works in."""

    decoder: Decoder
    layers: tuple[Layer, ...]
    """How each layer is run."""
    cuts: tuple[Cuts, ...]
    weights: Weights
    device: Device
    b: Buffers
    cache: dict[int, torch.Tensor]
    """(2, G, S, E) of each layer whose attention is here."""
    mail: "Mail"

    def start(self) -> None:
        """Token and position of this step."""
        self.b.token.copy_(self.mail.token[:1], non_blocking=True)
        self.b.position.copy_(self.mail.token[1:], non_blocking=True)

    def embed(self) -> None:
        x_1D, w = self.b.x_D[None], self.weights
        if self.decoder.d_embedding == self.decoder.d_model:
            unpack(w.matrix("embedding"), self.b.token, 0, x_1D)
        else:
            unpack(w.matrix("embedding"), self.b.token, 0, self.b.narrow_W[None])
            linear(w.matrix("embedding_in"), None, self.b.narrow_W, self.b.x_D, self.device.tiling)
        if self.decoder.positions == "learned":
            unpack(w.matrix("positions"), self.b.position, self.decoder.position_offset, x_1D, add=True)

    def attention(self, layer: int) -> None:
        """x ← x + attention(norm(x)), and the FFN's input into the parcel; see `Decoder` for the forms of a block."""
        b, d, at = self.b, self.decoder, f"layers/{layer}/attention/"
        input_D, x_1D, given_1D = b.parcel.x_D, b.x_D[None], b.parcel.x_D[None]
        if d.block == "post-norm":
            input_D = b.x_D
        else:
            self.norm(f"{at}norm", x_1D, given_1D)
        w, tiling = self.weights, self.device.tiling
        linear(w.matrix(f"{at}qkv"), w.vector(f"{at}qkv_bias"), input_D, b.qkv_Q, tiling)
        if d.block == "parallel" and not d.shared_norm:
            self.norm(f"layers/{layer}/ffn/norm", x_1D, given_1D)
        self.remember(layer, b.qkv_Q[None])
        attention.attend(b.qkv_Q, b.position, self.cache[layer], b.parts, b.mixed_E)
        linear(w.matrix(f"{at}out"), w.vector(f"{at}out_bias"), b.mixed_E, b.x_D, tiling, add=True)
        if d.block == "post-norm":
            self.norm(f"{at}norm", x_1D, x_1D)
            b.parcel.x_D.copy_(b.x_D)
        elif d.block == "sequential":
            self.norm(f"layers/{layer}/ffn/norm", x_1D, given_1D)

    def remember(self, layer: int, qkv_TQ: torch.Tensor) -> None:
        """Norms and angles of queries and keys; keys and values into the cache."""
        b, at = self.b, f"layers/{layer}/attention/"
        q_norm, k_norm = self.weights.vector(f"{at}q_norm"), self.weights.vector(f"{at}k_norm")
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        attention.remember(
            qkv_TQ, b.position, b.cos_SJ, b.sin_SJ, self.cache[layer], norms=norms, eps=self.decoder.norm_eps
        )

    def norm(self, name: str, x_TD: torch.Tensor, y_TD: torch.Tensor) -> None:
        weight, bias = self.weights.vector(f"{name}/weight"), self.weights.vector(f"{name}/bias")
        assert weight is not None
        residual.norm(x_TD, weight, bias, self.decoder.norm_eps, y_TD)

    def selects(self, layer: int) -> bool:
        """Whether the layer's rung reads only some rows of `first`."""
        return self.layers[layer].rung in ("predicted", "sign")

    def reduce(self, layer: int) -> None:
        """The first half of a predictor that has two."""
        if self.layers[layer].rung == "sign":
            return
        down = self.weights.matrix(f"layers/{layer}/predictor/down")
        linear(down, None, self.b.parcel.x_D, self.b.r_R[: down.rows], self.device.tiling)

    def predict(self, layer: int, low: int, high: int, index_F: torch.Tensor, count: torch.Tensor) -> None:
        """List the neurons of [low, high) that are predicted to fire."""
        b, at, how = self.b, f"layers/{layer}/predictor/", self.layers[layer]
        marks_N = b.marks_F[: high - low]
        if how.rung == "sign":
            signs_NW = self.weights.arrays[f"{at}signs"][low:high]
            tile = agree(signs_NW, self.decoder.d_model, how.margin, b.parcel.x_D, marks_N, b.counts_F)
        else:
            up, bias_F = self.weights.matrix(f"{at}up").slice(low, high), self.weights.arrays[f"{at}bias"]
            tile = ffn_neurons.predict(
                up, bias_F[low:high], b.r_R[: up.columns], marks_N, b.counts_F, self.device.tiling
            )
        close(marks_N, b.counts_F, tile, low, (index_F, None, count))

    def predict_cold(self, layer: int) -> None:
        cuts, parcel = self.cuts[layer], self.b.parcel
        self.predict(layer, cuts.hot, self.decoder.d_ff, parcel.index_F[: cuts.cold], parcel.count)

    def predict_hot(self, layer: int) -> None:
        self.predict(layer, 0, self.cuts[layer].hot, self.b.hot_F, self.b.hot_count)

    def hand_over(self, rows: int | None) -> None:
        """The FFN's input, and up to so many cold rows, to the host."""
        self.mail.to_host.first(rows).copy_(self.b.parcel.first(rows), non_blocking=True)

    def receive(self, rows: int | None) -> None:
        """The same from the host, with up to so many hot rows."""
        self.b.parcel.first(rows).copy_(self.mail.to_gpu.first(rows), non_blocking=True)

    def layer_neurons(self, layer: int) -> ffn_neurons.Neurons:
        at, w = f"layers/{layer}/ffn/", self.weights
        return ffn_neurons.Neurons(
            first=w.matrix(f"{at}first"),
            first_bias=w.vector(f"{at}first_bias"),
            rest=w.matrix(f"{at}rest"),
            up_bias=w.vector(f"{at}up_bias"),
            activation=CODES[self.decoder.activation],
            limit=max(self.decoder.threshold, self.layers[layer].threshold),
        )

    def hot(self, layer: int) -> None:
        """The partial sums of the neurons that are here; those predicted are in `hot_F`, or in the parcel received."""
        b, n, tiling = self.b, self.layer_neurons(layer), self.device.tiling
        listed = None
        if self.selects(layer):
            own = layer in self.cache
            listed = ffn_neurons.List(b.hot_F if own else b.parcel.index_F, b.hot_count if own else b.parcel.count)
        h_N = b.h_F[: n.count]
        tile = ffn_neurons.fire(n, b.parcel.x_D, listed, h_N, b.counts_F, tiling)
        kept, h_K = None, h_N
        if self.layers[layer].rung != "dense":
            kept, h_K = ffn_neurons.List(b.kept_F, b.kept_count), b.kept_h_F
            within = None if listed is None else (listed.index_F, listed.count)
            close(h_N, b.counts_F, tile, 0, (b.kept_F, h_K, b.kept_count), within)
        ffn_neurons.add_up(n, kept, h_K, b.sums_SD, tiling)
        if listed is not None:
            b.rows_L2[layer, :1].copy_(listed.count)
        if kept is not None:
            b.rows_L2[layer, 1:].copy_(b.kept_count)

    def take(self) -> None:
        """The cold neurons' sum from the host."""
        self.b.other_D.copy_(self.mail.sum_to_gpu, non_blocking=True)

    def merge(self, layer: int, *, hot: bool, cold: bool) -> None:
        """x ← x + what both sides found + the bias, once."""
        sums, other = self.b.sums_SD if hot else None, self.b.other_D if cold else None
        residual.merge(self.b.x_D, sums, other, self.weights.vector(f"layers/{layer}/ffn/down_bias"))
        if self.decoder.block == "post-norm":
            self.norm(f"layers/{layer}/ffn/norm", self.b.x_D[None], self.b.x_D[None])

    def give_sum(self) -> None:
        """The hot neurons' sum to the host, whose the residual is."""
        self.b.other_D.zero_()
        residual.merge(self.b.other_D, self.b.sums_SD)
        self.mail.sum_to_host.copy_(self.b.other_D, non_blocking=True)

    def cross_out(self) -> None:
        """The residual to the host."""
        self.mail.x_to_host.copy_(self.b.x_D, non_blocking=True)

    def cross_in(self) -> None:
        self.b.x_D.copy_(self.mail.x_to_gpu, non_blocking=True)

    def head(self) -> None:
        """logits = norm(x) Wᵀ, to the host."""
        w, input_D, tiling = self.weights, self.b.x_D, self.device.tiling
        if self.decoder.final_norm:
            input_D = self.b.parcel.x_D
            self.norm("final_norm", self.b.x_D[None], input_D[None])
        if self.decoder.d_embedding != self.decoder.d_model:
            linear(w.matrix("embedding_out"), None, input_D, self.b.narrow_W, tiling)
            input_D = self.b.narrow_W
        matrix = w.matrix("embedding" if self.decoder.tied_head else "head")
        linear(matrix, w.vector("head_bias"), input_D, self.b.logits_V, tiling)
        self.mail.logits.copy_(self.b.logits_V, non_blocking=True)

    def tell_rows(self) -> None:
        """How many rows were read and kept, to the host."""
        self.mail.rows_L2.copy_(self.b.rows_L2, non_blocking=True)


@dataclass(frozen=True)
class Mail:
    """Pinned memory that both sides copy from and to."""

    token: torch.Tensor
    """int64: token, position."""
    to_host: Parcel
    to_gpu: Parcel
    sum_to_host: torch.Tensor
    sum_to_gpu: torch.Tensor
    x_to_host: torch.Tensor
    x_to_gpu: torch.Tensor
    logits: torch.Tensor
    rows_L2: torch.Tensor

    @classmethod
    def of(cls, d: Decoder, device: Device) -> "Mail":
        def floats(count: int) -> torch.Tensor:
            return device.pinned(count, torch.float32)

        def parcel() -> Parcel:
            return Parcel(device.pinned(Parcel.words_of(d), torch.int32), d.d_model, slots_of(d))

        return cls(
            token=device.pinned(2, torch.int64),
            to_host=parcel(),
            to_gpu=parcel(),
            sum_to_host=floats(d.d_model),
            sum_to_gpu=floats(d.d_model),
            x_to_host=floats(d.d_model),
            x_to_gpu=floats(d.d_model),
            logits=floats(d.vocab_size),
            rows_L2=device.pinned(2 * d.n_layers, torch.int32).view(d.n_layers, 2),
        )
