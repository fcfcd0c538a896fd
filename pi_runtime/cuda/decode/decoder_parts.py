"""Embedding, attention and head on the GPU, for T ≥ 1 tokens: decoding and reading prompts share them.

    x ← embedding[token] + positions             embed
    x ← x + attention(norm(x))                   attention, which also leaves the FFN's input
    norm(x), as the head's matrix takes it       head_input

One token and a block of tokens differ in how they multiply with stored matrices and how they attend (`Products`).

Shape letters: T tokens, D model width, W width of the embedding, N rows of a matrix, H heads, G key-value heads, E head
width, Q = (H + 2 G) E, O = H E, S positions that the cache holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.cuda.kernels import attention, gemm, residual, row_dot
from pi_runtime.cuda.kernels.attention import AttentionPartials
from pi_runtime.cuda.kernels.dequantise import dequantise_rows
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.memory.weights import DeviceWeights
from pi_runtime.cuda.memory.workspace import Workspace


@dataclass(frozen=True)
class TokenProducts:
    """One token by the kernels of decoding; nothing is allocated, so that graphs can be captured."""

    tiling: Tiling
    partials: AttentionPartials

    def linear(
        self, m: DeviceMatrix, bias_N: torch.Tensor | None, x_TD: torch.Tensor, y_TN: torch.Tensor, *, add: bool = False
    ) -> None:
        """y ← x Wᵀ + bias, or y ← y + x Wᵀ + bias."""
        row_dot.linear(m, bias_N, x_TD[0], y_TN[0], self.tiling, add=add)

    def attend(
        self, qkv_TQ: torch.Tensor, position: torch.Tensor, cache_2GSE: torch.Tensor, out_TO: torch.Tensor
    ) -> None:
        """out ← attention over the positions up to the token's own, `position`."""
        attention.attend(qkv_TQ[0], position, cache_2GSE, self.partials, out_TO[0])


@dataclass(frozen=True)
class BlockProducts:
    """A block of tokens by torch's dense products."""

    exact: bool = False
    """Whether products are in float32 whatever the weights' format."""

    def linear(
        self, m: DeviceMatrix, bias_N: torch.Tensor | None, x_TD: torch.Tensor, y_TN: torch.Tensor, *, add: bool = False
    ) -> None:
        """y ← x Wᵀ + bias, or y ← y + x Wᵀ + bias."""
        found_TN = gemm.linear(m, bias_N, x_TD, exact=self.exact)
        if add:
            y_TN += found_TN
        else:
            y_TN.copy_(found_TN)

    def attend(
        self, qkv_TQ: torch.Tensor, position: torch.Tensor, cache_2GSE: torch.Tensor, out_TO: torch.Tensor
    ) -> None:
        """out ← attention of each token over the positions up to its own, the first token being at `position`."""
        attention.attend_block(qkv_TQ, position, cache_2GSE, out_TO)


Products = TokenProducts | BlockProducts
"""How tokens are multiplied with a stored matrix, and how they attend."""


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder that are the same for one token and for a block, with their weights and cache."""

    decoder: Decoder
    weights: DeviceWeights
    workspace: Workspace
    cache: Mapping[int, torch.Tensor]
    """(2, G, S, E) for each layer whose attention is on the GPU."""

    def embed(
        self, products: Products, ids_T: torch.Tensor, positions_T: torch.Tensor | None, start: int,
        narrow_TW: torch.Tensor, x_TD: torch.Tensor,
    ) -> None:  # fmt: skip
        """x ← embeddings of the tokens, at positions start + positions_T, or at start on without `positions_T`."""
        d, w = self.decoder, self.weights
        if d.d_embedding == d.d_model:
            dequantise_rows(w.matrix("embedding"), ids_T, 0, x_TD)
        else:
            dequantise_rows(w.matrix("embedding"), ids_T, 0, narrow_TW)
            products.linear(w.matrix("embedding_in"), None, narrow_TW, x_TD)
        if d.positions == "learned":
            dequantise_rows(w.matrix("positions"), positions_T, d.position_offset + start, x_TD, add=True)

    def attention(
        self, products: Products, layer: int, x_TD: torch.Tensor, normed_TD: torch.Tensor, qkv_TQ: torch.Tensor,
        out_TO: torch.Tensor,
    ) -> None:  # fmt: skip
        """x ← x + attention(norm(x)), and normed ← the FFN's input; see `Decoder` for the forms of a block."""
        d, w, at, ffn_norm = self.decoder, self.weights, f"layers/{layer}/attention/", f"layers/{layer}/ffn/norm"
        input_TD = x_TD
        if d.block != "post-norm":
            self.norm(f"{at}norm", x_TD, normed_TD)
            input_TD = normed_TD
        products.linear(w.matrix(f"{at}qkv"), w.vector(f"{at}qkv_bias"), input_TD, qkv_TQ)
        if d.block == "parallel" and not d.shared_norm:
            self.norm(ffn_norm, x_TD, normed_TD)
        self._store_kv(layer, qkv_TQ)
        products.attend(qkv_TQ, self.workspace.position, self.cache[layer], out_TO)
        products.linear(w.matrix(f"{at}out"), w.vector(f"{at}out_bias"), out_TO, x_TD, add=True)
        if d.block == "post-norm":
            self.norm(f"{at}norm", x_TD, x_TD)
            normed_TD.copy_(x_TD)
        elif d.block == "sequential":
            self.norm(ffn_norm, x_TD, normed_TD)

    def _store_kv(self, layer: int, qkv_TQ: torch.Tensor) -> None:
        """Norms and angles of queries and keys; keys and values into the cache."""
        ws, at = self.workspace, f"layers/{layer}/attention/"
        q_norm, k_norm = self.weights.vector(f"{at}q_norm"), self.weights.vector(f"{at}k_norm")
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        eps = self.decoder.norm_eps
        attention.store_kv(qkv_TQ, ws.position, ws.cos_SJ, ws.sin_SJ, self.cache[layer], norms=norms, eps=eps)

    def norm_after_ffn(self, layer: int, x_TD: torch.Tensor) -> None:
        """x ← norm(x), in blocks that have their norms behind."""
        if self.decoder.block == "post-norm":
            self.norm(f"layers/{layer}/ffn/norm", x_TD, x_TD)

    def head_input(
        self, products: Products, x_TD: torch.Tensor, normed_TD: torch.Tensor, narrow_TW: torch.Tensor
    ) -> torch.Tensor:
        """The vectors that the head's matrix is multiplied with: x, or `normed` or `narrow`, which are then written."""
        d = self.decoder
        if d.final_norm:
            self.norm("final_norm", x_TD, normed_TD)
            x_TD = normed_TD
        if d.d_embedding == d.d_model:
            return x_TD
        products.linear(self.weights.matrix("embedding_out"), None, x_TD, narrow_TW)
        return narrow_TW

    @property
    def head(self) -> DeviceMatrix:
        return self.weights.matrix("embedding" if self.decoder.tied_head else "head")

    def norm(self, name: str, x_TD: torch.Tensor, y_TD: torch.Tensor) -> None:
        weight, bias = self.weights.vector(f"{name}/weight"), self.weights.vector(f"{name}/bias")
        assert weight is not None
        residual.norm(x_TD, weight, bias, self.decoder.norm_eps, y_TD)
