"""Blocks of a prompt's tokens, dense: each part where the plan has it, the residual where the layer's attention is.

    y ← Σ hot (GPU)  +  Σ cold (CPU, or streamed to the GPU)          x ← x + y + bias

The CPU works in blocks of `BLOCK_TOKENS`; while it is at the cold neurons, the GPU is at the hot ones. From a number of
tokens on (see `crossover`) cold weights are brought to the GPU instead.
"""

import numpy as np
import torch

from pi_runtime.artifact.footprint import dense_rows
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.decode.device_ops import Side
from pi_runtime.cuda.decode.host_ops import Host
from pi_runtime.cuda.kernels import attention, gemm
from pi_runtime.cuda.kernels.dequantise import unpack
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.weight_streaming import Streamer
from pi_runtime.cuda.plan_layout import GPU
from pi_runtime.execution.cpu import Floats, Ints
from pi_runtime.kernels import ffn
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS
from pi_runtime.kernels.forward import after_ffn, embed, head
from pi_runtime.kernels.forward import attention as attention_here


class Prefill:
    """One executor's way of reading prompts, up to `tokens` at once. Use it within `device.at_work()`."""

    def __init__(
        self,
        side: Side,
        host: Host,
        plan: Plan,
        device: Device,
        tokens: int,
        streamer: Streamer | None,
        stream_from: int,
    ) -> None:
        self._side, self._host, self._plan, self._device = side, host, plan, device
        self._streamer, self._stream_from = streamer, stream_from
        d = side.decoder
        qkv = (d.n_heads + 2 * d.n_kv_heads) * d.head_dim

        def there(width: int) -> torch.Tensor:
            return torch.zeros(tokens, width, device=device.device)

        def here(width: int) -> torch.Tensor:
            return device.pinned(tokens * width, torch.float32).view(tokens, width)

        self._x_TD, self._normed_TD, self._y_TD = there(d.d_model), there(d.d_model), there(d.d_model)
        self._qkv_TQ, self._mixed_TE = there(qkv), there(d.n_heads * d.head_dim)
        self._ids_T = torch.zeros(tokens, dtype=torch.int64, device=device.device)
        self._here_x_TD, self._here_normed_TD, self._here_y_TD = here(d.d_model), here(d.d_model), here(d.d_model)

    @gemm.summed_in_float32()
    def run(self, tokens: Ints) -> None:
        """Tokens at the host's step on, through all layers; the last one's logits where the decoder leaves them."""
        self._last(self._through(tokens), len(tokens))

    @gemm.summed_in_float32()
    def every(self, tokens: Ints, logits_TV: Floats) -> None:
        """As `run`, with all tokens' logits, in float32 whatever the head's format."""
        where = self._cross(self._through(tokens), self._plan.head, len(tokens))
        if where == GPU:
            self._heads_there(logits_TV)
        else:
            h, x_TD = self._host, self._here_x_TD.numpy()
            head(h.cfg, h.ends, h.eps, x_TD[: len(tokens)], h.b, logits_TV)

    def fires(self, layer: int, given_TD: Floats) -> int:
        """Neurons that fire on inputs of the layer's FFN, each counted where the plan has it."""
        h, cut, every, count = self._host, self._side.cuts[layer].hot, self._side.decoder.d_ff, len(given_TD)
        tally_3, there = np.zeros(3, np.int64), torch.zeros(())
        if cut:
            normed_TD = self._normed_TD[:count]
            normed_TD.copy_(torch.from_numpy(given_TD))
            there = gemm.fires(self._side.layer_neurons(layer), self._side.decoder, normed_TD)
        if cut < every:
            y_TD = self._here_y_TD.numpy()[:count]
            ffn.block(h.cfg, h.table_LXW[layer, 0], given_TD, cut, every, True, h.b, tally_3, y_TD)
        return int(tally_3[0]) + int(there)

    def _through(self, tokens: Ints) -> str:
        """All layers; returns where the residual is then."""
        where, count = self._plan.embedding, len(tokens)
        self._side.b.position.fill_(self._host.step.start)
        if where == GPU:
            self._embed_there(tokens)
        else:
            self._embed_here(tokens)
        for layer, to in enumerate(self._plan.attention):
            where = self._cross(where, to, count)
            if where == GPU:
                self._attention_there(layer, count)
            else:
                self._attention_here(layer, count)
            self._ffn(layer, where, count)
        return where

    def _embed_there(self, tokens: Ints) -> None:
        side, x_TD = self._side, self._x_TD[: len(tokens)]
        ids_T = self._ids_T[: len(tokens)]
        ids_T.copy_(torch.from_numpy(tokens))
        w = side.weights
        if side.decoder.d_embedding == side.decoder.d_model:
            unpack(w.matrix("embedding"), ids_T, 0, x_TD)
        else:
            narrow_TW = torch.empty(len(tokens), side.decoder.d_embedding, device=x_TD.device)
            unpack(w.matrix("embedding"), ids_T, 0, narrow_TW)
            x_TD.copy_(gemm.product(w.matrix("embedding_in"), None, narrow_TW))
        if side.decoder.positions == "learned":
            first = side.decoder.position_offset + self._host.step.start
            unpack(w.matrix("positions"), None, first, x_TD, add=True)

    def _embed_here(self, tokens: Ints) -> None:
        h, x_TD = self._host, self._here_x_TD.numpy()
        for low in range(0, len(tokens), BLOCK_TOKENS):
            part = slice(low, min(len(tokens), low + BLOCK_TOKENS))
            embed(h.cfg, h.ends, tokens[part], h.step.start + low, h.b, x_TD[part])

    def _cross(self, where: str, to: str, count: int) -> str:
        if where == GPU and to != GPU:
            self._here_x_TD[:count].copy_(self._x_TD[:count])
        elif where != GPU and to == GPU:
            self._x_TD[:count].copy_(self._here_x_TD[:count], non_blocking=True)
        return to

    def _attention_there(self, layer: int, count: int) -> None:
        """As `Side.attention`, for a block."""
        side, d, at = self._side, self._side.decoder, f"layers/{layer}/attention/"
        w, x_TD, normed_TD = side.weights, self._x_TD[:count], self._normed_TD[:count]
        qkv_TQ, mixed_TE, ffn_norm = self._qkv_TQ[:count], self._mixed_TE[:count], f"layers/{layer}/ffn/norm"
        if d.block == "post-norm":
            normed_TD.copy_(x_TD)
        else:
            side.norm(f"{at}norm", x_TD, normed_TD)
        qkv_TQ.copy_(gemm.product(w.matrix(f"{at}qkv"), w.vector(f"{at}qkv_bias"), normed_TD))
        if d.block == "parallel" and not d.shared_norm:
            side.norm(ffn_norm, x_TD, normed_TD)
        side.remember(layer, qkv_TQ)
        attention.attend_block(qkv_TQ, side.b.position, side.cache[layer], mixed_TE)
        x_TD += gemm.product(w.matrix(f"{at}out"), w.vector(f"{at}out_bias"), mixed_TE)
        if d.block == "post-norm":
            side.norm(f"{at}norm", x_TD, x_TD)
            normed_TD.copy_(x_TD)
        elif d.block == "sequential":
            side.norm(ffn_norm, x_TD, normed_TD)

    def _attention_here(self, layer: int, count: int) -> None:
        h, w = self._host, self._host.table_LXW[layer, 0]
        cache = h.step.cache_L2GSW[layer]
        x_TD, normed_TD = self._here_x_TD.numpy(), self._here_normed_TD.numpy()
        for low in range(0, count, BLOCK_TOKENS):
            part = slice(low, min(count, low + BLOCK_TOKENS))
            start = h.step.start + low
            attention_here(h.cfg, w, h.eps, h.cos_SJ, h.sin_SJ, start, cache, x_TD[part], h.b)
            normed_TD[part] = h.b.normed_TD[: part.stop - low]

    def _ffn(self, layer: int, where: str, count: int) -> None:
        side, cut, every = self._side, self._side.cuts[layer].hot, self._side.decoder.d_ff
        streamed = cut < every and self._streamer is not None and count >= self._stream_from
        there, here = cut > 0 or streamed, cut < every and not streamed
        normed_TD, y_TD = self._normed_TD[:count], self._y_TD[:count]
        if there and where != GPU:
            normed_TD.copy_(self._here_normed_TD[:count], non_blocking=True)
        if here and where == GPU:
            self._here_normed_TD[:count].copy_(normed_TD)
        if there:
            y_TD.zero_()
        if cut:
            gemm.add_neurons(side.layer_neurons(layer), side.decoder, normed_TD, y_TD)
        if streamed:
            assert self._streamer is not None
            for neurons in self._streamer.pieces(layer, cut, every):
                gemm.add_neurons(neurons, side.decoder, normed_TD, y_TD)
        if here:
            self._cold(layer, count)
        if where == GPU:
            self._merge_there(layer, count, there=there, here=here)
        else:
            self._merge_here(layer, count, there=there, here=here)

    def _cold(self, layer: int, count: int) -> None:
        """The cold neurons' sums on the CPU."""
        h, w = self._host, self._host.table_LXW[layer, 0]
        normed_TD, y_TD = self._here_normed_TD.numpy(), self._here_y_TD.numpy()
        y_TD[:count] = 0
        for low in range(0, count, BLOCK_TOKENS):
            part = slice(low, min(count, low + BLOCK_TOKENS))
            cut, every = h.cuts[layer].hot, h.decoder.d_ff
            ffn.block(h.cfg, w, normed_TD[part], cut, every, False, h.b, h.b.tally_L3[layer], y_TD[part])

    def _merge_there(self, layer: int, count: int, *, there: bool, here: bool) -> None:
        x_TD = self._x_TD[:count]
        if there:
            x_TD += self._y_TD[:count]
        if here:
            self._y_TD[:count].copy_(self._here_y_TD[:count], non_blocking=True)
            x_TD += self._y_TD[:count]
            self._device.synchronize()  # the host writes there again
        bias_D = self._side.weights.vector(f"layers/{layer}/ffn/down_bias")
        if bias_D is not None:
            x_TD += bias_D
        if self._side.decoder.block == "post-norm":
            self._side.norm(f"layers/{layer}/ffn/norm", x_TD, x_TD)

    def _merge_here(self, layer: int, count: int, *, there: bool, here: bool) -> None:
        x_TD, w = self._here_x_TD.numpy()[:count], self._host.table_LXW[layer, 0]
        if here:
            x_TD += self._here_y_TD.numpy()[:count]
        if there:
            self._here_y_TD[:count].copy_(self._y_TD[:count])
            x_TD += self._here_y_TD.numpy()[:count]
        after_ffn(self._host.cfg, w, self._host.eps, x_TD)

    def _last(self, where: str, count: int) -> None:
        """The last token's logits, where the decoder leaves them."""
        side, host = self._side, self._host
        if where == GPU:
            side.b.x_D.copy_(self._x_TD[count - 1])
        else:
            host.x_1D[0] = self._here_x_TD.numpy()[count - 1]
        if where == GPU and self._plan.head != GPU:
            side.cross_out()
            self._device.synchronize()
            host.cross_in()
        elif where != GPU and self._plan.head == GPU:
            host.cross_out()
            side.cross_in()
        if self._plan.head == GPU:
            side.head()
            self._device.synchronize()
        else:
            host.head()

    def _heads_there(self, logits_TV: Floats) -> None:
        """As `Side.head`, for a block, some rows of the head at a time."""
        side, count, d = self._side, len(logits_TV), self._side.decoder
        x_TD, w = self._x_TD[:count], side.weights
        if d.final_norm:
            side.norm("final_norm", x_TD, self._normed_TD[:count])
            x_TD = self._normed_TD[:count]
        if d.d_embedding != d.d_model:
            x_TD = gemm.product(w.matrix("embedding_out"), None, x_TD, exact=True)
        rows, bias_V = w.matrix("embedding" if d.tied_head else "head"), w.vector("head_bias")
        step, found_TV = dense_rows(count), torch.from_numpy(logits_TV)
        for low in range(0, d.vocab_size, step):
            high = min(d.vocab_size, low + step)
            bias_N = None if bias_V is None else bias_V[low:high]
            found_TV[:, low:high].copy_(gemm.product(rows.slice(low, high), bias_N, x_TD, exact=True))

    def close(self) -> None:
        if self._streamer is not None:
            self._streamer.close()
