"""Embedding, attention and head on the GPU, for T ≥ 1 tokens: decoding and reading prompts share them.

    x ← embedding[token] + positions             embed
    x ← x + attention(norm(x))                   attention, which also leaves the FFN's input
    norm(x), as the head's matrix takes it       head_input

Single tokens of some sequences go through the kernels of decoding, which allocate nothing, so that graphs can be
captured. A block of one sequence's tokens goes through torch's dense products. The two also differ in the memory that
they work in.

Shape letters: T tokens, D model width, W width of the embedding, H heads, G key-value heads, E head width,
Q = (H + 2 G) E, O = H E, N rows of a matrix, or pages that the cache has, S positions of a page.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.cuda.kernels import attention, gemm, residual, row_dot
from pi_runtime.cuda.kernels.attention import AttentionPartials, Places
from pi_runtime.cuda.kernels.dequantise import dequantise_rows
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.memory.weights import DeviceWeights
from pi_runtime.cuda.memory.workspace import DeviceWorkspace


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder that are the same for single tokens and for a block, with the memory of their tokens."""

    decoder: Decoder
    weights: DeviceWeights
    workspace: DeviceWorkspace
    cache: Mapping[int, torch.Tensor]
    """(N, 2, G, S, E) for each layer whose attention is on the GPU."""
    tiling: Tiling
    partials: AttentionPartials | None
    """What the attention of single tokens works in; None where tokens come in blocks."""
    x_TD: torch.Tensor
    """The residual of as many tokens as there is room for."""
    normed_TD: torch.Tensor
    """The FFN's input."""
    qkv_TQ: torch.Tensor
    attn_out_TO: torch.Tensor
    exact: bool = False
    """Whether the products of a block are in float32 whatever the weights' format."""

    def embed(self, ids_T: torch.Tensor, positions_T: torch.Tensor | None, start: int) -> None:
        """x ← embeddings of the tokens, at positions start + positions_T; without `positions_T`, from start on."""
        d, w, x_TD = self.decoder, self.weights, self.x_TD[: len(ids_T)]
        if d.d_embedding == d.d_model:
            dequantise_rows(w.matrix("embedding"), ids_T, 0, x_TD)
        else:
            narrow_TW = self._narrow(len(ids_T))
            dequantise_rows(w.matrix("embedding"), ids_T, 0, narrow_TW)
            self._linear("embedding_in", narrow_TW, x_TD)
        if d.embedding_scale != 1:
            x_TD.mul_(d.embedding_scale)
        if d.positions == "learned":
            dequantise_rows(w.matrix("positions"), positions_T, d.position_offset + start, x_TD, add=True)
        if d.embedding_norm:
            self._norm("embedding_norm", x_TD, x_TD)

    def _narrow(self, tokens: int) -> torch.Tensor:
        """Room for rows of an embedding that is not as wide as the model."""
        narrow_MW = self.workspace.narrow_MW
        if tokens <= len(narrow_MW):
            return narrow_MW[:tokens]
        return torch.empty(tokens, narrow_MW.shape[1], device=narrow_MW.device)

    def attention(self, layer: int, tokens: int) -> None:
        """x ← x + attention(norm(x)), and normed ← the FFN's input; see `Decoder` for the forms of a block."""
        d, at, ffn_norm = self.decoder, f"layers/{layer}/attention/", f"layers/{layer}/ffn/norm"
        x_TD, normed_TD, qkv_TQ, out_TO = (
            t[:tokens] for t in (self.x_TD, self.normed_TD, self.qkv_TQ, self.attn_out_TO)
        )
        input_TD = x_TD
        if d.block in ("sequential", "parallel"):
            self._norm(f"{at}norm", x_TD, normed_TD)
            input_TD = normed_TD
        self._linear(f"{at}qkv", input_TD, qkv_TQ)
        if d.block == "parallel" and not d.shared_norm:
            self._norm(ffn_norm, x_TD, normed_TD)
        self._store_kv(layer, qkv_TQ)
        if self.partials is None:
            attention.attend_block(qkv_TQ, self._places, self.cache[layer], out_TO)
        else:
            attention.attend(qkv_TQ, self._places, self.cache[layer], self.partials, out_TO)
        if d.block == "reordered":
            self._linear(f"{at}out", out_TO, normed_TD)
            self._norm(f"{at}norm", normed_TD, normed_TD)
            normed_TD += x_TD
            x_TD.zero_()  # the FFN's sum is normed alone
            return
        self._linear(f"{at}out", out_TO, x_TD, add=True)
        if d.block == "post-norm":
            self._norm(f"{at}norm", x_TD, x_TD)
            normed_TD.copy_(x_TD)
        elif d.block == "sequential":
            self._norm(ffn_norm, x_TD, normed_TD)

    @property
    def _places(self) -> Places:
        words = self.workspace.token_words
        return Places.of(words.position_M, words.table_ML)

    def _store_kv(self, layer: int, qkv_TQ: torch.Tensor) -> None:
        """Norms and angles of queries and keys; keys and values into the cache."""
        ws, at = self.workspace, f"layers/{layer}/attention/"
        q_norm, k_norm = self.weights.vector(f"{at}q_norm"), self.weights.vector(f"{at}k_norm")
        norms, eps = None if q_norm is None or k_norm is None else (q_norm, k_norm), self.decoder.norm_eps
        if norms is not None and self.decoder.joint_qk_norm:
            queries, keys = map(len, norms)
            for weight, x_TN in zip(norms, qkv_TQ[:, : queries + keys].split([queries, keys], 1), strict=True):
                residual.norm(x_TN, weight, None, eps, x_TN)
            norms = None
        rotated = layer not in self.decoder.unrotated_layers
        cos_SJ, sin_SJ = ws.cos_SJ if rotated else None, ws.sin_SJ if rotated else None
        attention.store_kv(qkv_TQ, self._places, cos_SJ, sin_SJ, self.cache[layer], norms=norms, eps=eps)

    def norm_after_ffn(self, layer: int, tokens: int) -> None:
        """x ← norm(x) where the decoder normalises after each part, plus the FFN's input where that is the residual."""
        block, x_TD = self.decoder.block, self.x_TD[:tokens]
        if block in ("post-norm", "reordered"):
            self._norm(f"layers/{layer}/ffn/norm", x_TD, x_TD)
        if block == "reordered":
            x_TD += self.normed_TD[:tokens]

    def head_input(self, tokens: int) -> torch.Tensor:
        """The vectors that the head's matrix is multiplied with; `normed` may be overwritten."""
        d, x_TD = self.decoder, self.x_TD[:tokens]
        if d.final_norm:
            self._norm("final_norm", x_TD, self.normed_TD[:tokens])
            x_TD = self.normed_TD[:tokens]
        if d.d_embedding == d.d_model:
            return x_TD
        narrow_TW = self._narrow(tokens)
        self._linear("embedding_out", x_TD, narrow_TW)
        return narrow_TW

    def finish_logits(self, logits_TV: torch.Tensor) -> None:
        """z ← s z, or c tanh(s z / c) with a cap c."""
        scale, cap = self.decoder.logit_scale, self.decoder.logit_softcap
        if scale != 1:
            logits_TV.mul_(scale)
        if cap > 0:
            logits_TV.div_(cap).tanh_().mul_(cap)

    @property
    def head(self) -> DeviceMatrix:
        return self.weights.matrix("embedding" if self.decoder.tied_head else "head")

    def _linear(self, name: str, x_TD: torch.Tensor, y_TN: torch.Tensor, *, add: bool = False) -> None:
        """y ← x Wᵀ + bias, or y ← y + x Wᵀ + bias."""
        m, bias_N = self.weights.matrix(name), self.weights.vector(f"{name}_bias")
        if self.partials is not None:
            row_dot.linear(m, bias_N, x_TD, y_TN, self.tiling, add=add)
        elif add:
            y_TN += gemm.linear(m, bias_N, x_TD, exact=self.exact)
        else:
            y_TN.copy_(gemm.linear(m, bias_N, x_TD, exact=self.exact))

    def _norm(self, name: str, x_TD: torch.Tensor, y_TD: torch.Tensor) -> None:
        weight, bias = self.weights.vector(f"{name}/weight"), self.weights.vector(f"{name}/bias")
        assert weight is not None
        residual.norm(x_TD, weight, bias, self.decoder.norm_eps, y_TD)
