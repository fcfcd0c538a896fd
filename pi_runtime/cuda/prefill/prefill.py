"""Reads a block of a prompt's tokens, dense: each part where the plan has it, the residual where the attention is.

    y ← Σ hot (GPU)  +  Σ cold (CPU, or streamed to the GPU)          x ← x + y + bias

The CPU works in blocks of `BLOCK_TOKENS`; while it computes the cold neurons, the GPU computes the hot ones.

Shape letters: T tokens, D model width, V vocabulary, N rows of the head, L layers.
"""

import torch

from pi_runtime.artifact.footprint import dense_rows
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.decode.decoder_parts import BlockProducts
from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps
from pi_runtime.cuda.kernels import gemm
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.weight_streaming import WeightStreamer
from pi_runtime.cuda.memory.workspace import narrow_width
from pi_runtime.cuda.plan_layout import GPU
from pi_runtime.cuda.prefill.block_buffers import BlockBuffers
from pi_runtime.cuda.prefill.ffn_blocks import FfnBlocks
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS
from pi_runtime.kernels.forward import after_ffn, attention, embed, head


class Prefill:
    """Reads prompts for one executor, up to `tokens` tokens at once. Use it within `device.stream()`."""

    def __init__(
        self,
        device_ops: DeviceOps,
        host_ops: HostOps,
        plan: Plan,
        device: Device,
        tokens: int,
        streamer: WeightStreamer | None,
        stream_from: int,
    ) -> None:
        self._device_ops, self._host_ops, self._plan, self._device = device_ops, host_ops, plan, device
        self._streamer = streamer
        self._buffers = BlockBuffers.allocate(device_ops.decoder, tokens, device)
        self._ffn = FfnBlocks(device_ops, host_ops, self._buffers, streamer, stream_from)

    @gemm.float32_accumulation()
    def run(self, tokens: Ints) -> None:
        """Run tokens, from the host's step on; the last one's logits are where decoding leaves them."""
        self._last_logits(self._run_layers(tokens), len(tokens))

    @gemm.float32_accumulation()
    def all_logits(self, tokens: Ints, logits_TV: Floats) -> None:
        """Run tokens and write the logits of all of them, in float32 whatever the head's format."""
        side = self._move_residual(self._run_layers(tokens), self._plan.head, len(tokens))
        if side == GPU:
            self._head_on_device(logits_TV)
        else:
            host, x_TD = self._host_ops, self._buffers.host_x_TD.numpy()
            head(host.model.cfg, host.model.ends, host.model.eps, x_TD[: len(tokens)], host.model.workspace, logits_TV)

    def count_firing(self, layer: int, input_TD: Floats) -> int:
        """How many neurons fire on these inputs of the layer's FFN."""
        return self._ffn.count_firing(layer, self._plan.attention[layer], input_TD)

    def _run_layers(self, tokens: Ints) -> str:
        """Run all layers; returns the side that has the residual then."""
        side, count = self._plan.embedding, len(tokens)
        self._device_ops.workspace.position.fill_(self._host_ops.start)
        if side == GPU:
            self._embed_on_device(tokens)
        else:
            self._embed_on_host(tokens)
        for layer, to in enumerate(self._plan.attention):
            side = self._move_residual(side, to, count)
            if side == GPU:
                self._attention_on_device(layer, count)
            else:
                self._attention_on_host(layer, count)
            on_device, on_host = self._ffn.run(layer, side, count)
            if side == GPU:
                self._merge_on_device(layer, count, device_sum=on_device, host_sum=on_host)
            else:
                self._merge_on_host(layer, count, device_sum=on_device, host_sum=on_host)
        return side

    def _embed_on_device(self, tokens: Ints) -> None:
        x_TD, ids_T = self._buffers.x_TD[: len(tokens)], self._buffers.ids_T[: len(tokens)]
        ids_T.copy_(torch.from_numpy(tokens))
        start = self._host_ops.start
        self._device_ops.parts.embed(BlockProducts(), ids_T, None, start, self._narrow(len(tokens)), x_TD)

    def _narrow(self, count: int) -> torch.Tensor:
        """Room for rows of an embedding that is not as wide as the model."""
        return torch.empty(count, narrow_width(self._device_ops.decoder), device=self._buffers.x_TD.device)

    def _embed_on_host(self, tokens: Ints) -> None:
        host, x_TD = self._host_ops, self._buffers.host_x_TD.numpy()
        for low in range(0, len(tokens), BLOCK_TOKENS):
            part = slice(low, min(len(tokens), low + BLOCK_TOKENS))
            embed(host.model.cfg, host.model.ends, tokens[part], host.start + low, host.model.workspace, x_TD[part])

    def _move_residual(self, side: str, to: str, count: int) -> str:
        """Bring the residual from one side to another; returns the side that has it then."""
        b = self._buffers
        if side == GPU and to != GPU:
            b.host_x_TD[:count].copy_(b.x_TD[:count])
        elif side != GPU and to == GPU:
            b.x_TD[:count].copy_(b.host_x_TD[:count], non_blocking=True)
        return to

    def _attention_on_device(self, layer: int, count: int) -> None:
        b = self._buffers
        x_TD, normed_TD, qkv_TQ, out_TO = (t[:count] for t in (b.x_TD, b.normed_TD, b.qkv_TQ, b.attn_out_TO))
        self._device_ops.parts.attention(BlockProducts(), layer, x_TD, normed_TD, qkv_TQ, out_TO)

    def _attention_on_host(self, layer: int, count: int) -> None:
        host, ws = self._host_ops, self._host_ops.model.workspace
        w, cache = host.model.table_LXW[layer, 0], host.cache_L2GSW[layer]
        x_TD, normed_TD = self._buffers.host_x_TD.numpy(), self._buffers.host_normed_TD.numpy()
        for low in range(0, count, BLOCK_TOKENS):
            part = slice(low, min(count, low + BLOCK_TOKENS))
            start = host.start + low
            attention(
                host.model.cfg, w, host.model.eps, host.model.cos_SJ, host.model.sin_SJ, start, cache, x_TD[part], ws
            )
            normed_TD[part] = ws.normed_TD[: part.stop - low]

    def _merge_on_device(self, layer: int, count: int, *, device_sum: bool, host_sum: bool) -> None:
        """x ← x + the sums of both sides + the bias, on the GPU."""
        b, x_TD = self._buffers, self._buffers.x_TD[:count]
        if device_sum:
            x_TD += b.y_TD[:count]
        if host_sum:
            b.y_TD[:count].copy_(b.host_y_TD[:count], non_blocking=True)
            x_TD += b.y_TD[:count]
            self._device.synchronize()  # the host writes into its buffer again
        bias_D = self._device_ops.weights.vector(f"layers/{layer}/ffn/down_bias")
        if bias_D is not None:
            x_TD += bias_D
        self._device_ops.parts.norm_after_ffn(layer, x_TD)

    def _merge_on_host(self, layer: int, count: int, *, device_sum: bool, host_sum: bool) -> None:
        """x ← x + the sums of both sides + the bias, on the CPU."""
        b, host = self._buffers, self._host_ops
        x_TD = b.host_x_TD.numpy()[:count]
        if host_sum:
            x_TD += b.host_y_TD.numpy()[:count]
        if device_sum:
            b.host_y_TD[:count].copy_(b.y_TD[:count])
            x_TD += b.host_y_TD.numpy()[:count]
        after_ffn(host.model.cfg, host.model.table_LXW[layer, 0], host.model.eps, x_TD)

    def _last_logits(self, side: str, count: int) -> None:
        """The last token's logits, where decoding leaves them."""
        device_ops, host_ops, b = self._device_ops, self._host_ops, self._buffers
        if side == GPU:
            device_ops.workspace.x_D.copy_(b.x_TD[count - 1])
        else:
            host_ops.x_1D[0] = b.host_x_TD.numpy()[count - 1]
        if side == GPU and self._plan.head != GPU:
            device_ops.send_residual()
            self._device.synchronize()
            host_ops.receive_residual()
        elif side != GPU and self._plan.head == GPU:
            host_ops.send_residual()
            device_ops.receive_residual()
        if self._plan.head == GPU:
            device_ops.head()
            self._device.synchronize()
        else:
            host_ops.head()

    def _head_on_device(self, logits_TV: Floats) -> None:
        """Logits of all tokens, some rows of the head at a time."""
        parts, count = self._device_ops.parts, len(logits_TV)
        x_TD, normed_TD = self._buffers.x_TD[:count], self._buffers.normed_TD[:count]
        x_TD = parts.head_input(BlockProducts(exact=True), x_TD, normed_TD, self._narrow(count))
        bias_V = self._device_ops.weights.vector("head_bias")
        step, found_TV = dense_rows(count), torch.from_numpy(logits_TV)
        for low in range(0, parts.head.rows, step):
            high = min(parts.head.rows, low + step)
            bias_N = None if bias_V is None else bias_V[low:high]
            found_TV[:, low:high].copy_(gemm.linear(parts.head.slice(low, high), bias_N, x_TD, exact=True))

    def close(self) -> None:
        if self._streamer is not None:
            self._streamer.close()
