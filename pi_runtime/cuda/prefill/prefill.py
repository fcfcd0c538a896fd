"""Reads a block of a prompt's tokens, dense: each part where the plan has it, the residual where the attention is.

    y ← Σ hot (GPU)  +  Σ cold (CPU, or streamed to the GPU)          x ← x + y + bias

The CPU works in blocks of `BLOCK_TOKENS`; while it computes the cold neurons, the GPU computes the hot ones.

Shape letters: T tokens, D model width, V vocabulary, N rows of the head, L layers.
"""

from dataclasses import replace

import numpy as np
import torch

from pi_runtime.artifact.footprint import dense_rows
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps, token_blocks
from pi_runtime.cuda.kernels import gemm
from pi_runtime.cuda.memory.weight_streaming import WeightStreamer
from pi_runtime.cuda.prefill.block_buffers import BlockBuffers
from pi_runtime.cuda.prefill.ffn_blocks import FfnBlocks
from pi_runtime.execution.cpu import positions_of
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.execution.plan_layout import GPU
from pi_runtime.kernels.codegen import progress
from pi_runtime.kernels.forward import after_ffn, attention, embed, head


class Prefill:
    """Reads prompts for one executor, up to `tokens` tokens at once. Use it within `device.stream()`."""

    def __init__(
        self,
        device_ops: DeviceOps,
        host_ops: HostOps,
        plan: Plan,
        tokens: int,
        streamer: WeightStreamer | None,
        stream_from: int,
    ) -> None:
        self._device_ops, self._host_ops, self._plan, self._streamer = device_ops, host_ops, plan, streamer
        self._buffers = b = BlockBuffers.allocate(device_ops.decoder, tokens, device_ops.device)
        self._parts = replace(
            device_ops.parts,
            partials=None,
            x_TD=b.x_TD,
            normed_TD=b.normed_TD,
            qkv_TQ=b.qkv_TQ,
            attn_out_TO=b.attn_out_TO,
        )
        self._ffn = FfnBlocks(device_ops, host_ops, b, streamer, stream_from)

    @gemm.float32_accumulation()
    def run(self, tokens: Ints) -> None:
        """Run tokens from position `HostOps.start` on; the last one's logits are where decoding leaves them."""
        self._last_logits(self._run_layers(tokens), len(tokens))

    @gemm.float32_accumulation()
    def all_logits(self, tokens: Ints, logits_TV: Floats) -> None:
        """Run tokens and write the logits of all of them, in float32 whatever the head's format."""
        side = self._move_residual(self._run_layers(tokens), self._plan.head, slice(len(tokens)))
        if side == GPU:
            self._head_on_device(logits_TV)
        else:
            m, x_TD = self._host_ops.model, self._buffers.host_x_TD.numpy()
            head(m.cfg, m.ends, m.eps, x_TD[: len(tokens)], m.workspace, logits_TV)

    def count_firing(self, layer: int, input_TD: Floats) -> int:
        """How many neurons fire on these inputs of the layer's FFN."""
        return self._ffn.count_firing(layer, self._plan.attention[layer], input_TD)

    def _run_layers(self, tokens: Ints) -> str:
        """Run all layers; returns the side that has the residual then."""
        side, count = self._plan.embedding, len(tokens)
        self._device_ops.receive_tokens()  # the first one's position, and the table of pages
        if side == GPU:
            ids_T = self._buffers.ids_T[:count]
            ids_T.copy_(torch.from_numpy(tokens))
            self._parts.embed(ids_T, None, self._host_ops.start)
        else:
            self._embed_on_host(tokens)
        for layer, to in enumerate(self._plan.attention):
            side = self._move_residual(side, to, slice(count))
            attend = self._parts.attention if side == GPU else self._attention_on_host
            attend(layer, count)
            on_device, on_host = self._ffn.run(layer, side, count)
            merge = self._merge_on_device if side == GPU else self._merge_on_host
            merge(layer, count, device_sum=on_device, host_sum=on_host)
            progress.advance()
        return side

    def _embed_on_host(self, tokens: Ints) -> None:
        m, start, x_TD = self._host_ops.model, self._host_ops.start, self._buffers.host_x_TD.numpy()
        for part in token_blocks(len(tokens)):
            position_T = np.arange(start + part.start, start + part.stop)
            embed(m.cfg, m.ends, m.eps, tokens[part], position_T, m.workspace, x_TD[part])

    def _move_residual(self, side: str, to: str, rows: slice) -> str:
        """Bring these tokens' residual from one side to another; returns the side that has it then."""
        b = self._buffers
        if side == GPU and to != GPU:
            b.host_x_TD[rows].copy_(b.x_TD[rows])
        elif side != GPU and to == GPU:
            b.x_TD[rows].copy_(b.host_x_TD[rows], non_blocking=True)
        return to

    def _attention_on_host(self, layer: int, count: int) -> None:
        host, m, ws = self._host_ops, self._host_ops.model, self._host_ops.model.workspace
        w = m.table_LX[layer, 0]
        x_TD, normed_TD = self._buffers.host_x_TD.numpy(), self._buffers.host_normed_TD.numpy()
        for part in token_blocks(count):
            at = positions_of([(part.stop - part.start, host.start + part.start, host.cache)])
            attention(m.cfg, w, m.eps, m.cos_SJ, m.sin_SJ, at, layer, x_TD[part], ws)
            normed_TD[part] = ws.normed_TD[: part.stop - part.start]

    def _merge_on_device(self, layer: int, count: int, *, device_sum: bool, host_sum: bool) -> None:
        """x ← x + the sums of both sides + the bias, on the GPU."""
        b, x_TD = self._buffers, self._buffers.x_TD[:count]
        if device_sum:
            x_TD += b.y_TD[:count]
        if host_sum:
            b.y_TD[:count].copy_(b.host_y_TD[:count], non_blocking=True)
            x_TD += b.y_TD[:count]
            self._device_ops.device.synchronize()  # the host writes into its buffer again
        bias_D = self._device_ops.weights.vector(f"layers/{layer}/ffn/down_bias")
        if bias_D is not None:
            x_TD += bias_D
        self._parts.norm_after_ffn(layer, count)

    def _merge_on_host(self, layer: int, count: int, *, device_sum: bool, host_sum: bool) -> None:
        """x ← x + the sums of both sides + the bias, on the CPU."""
        b, m = self._buffers, self._host_ops.model
        x_TD = b.host_x_TD.numpy()[:count]
        if host_sum:
            x_TD += b.host_y_TD.numpy()[:count]
        if device_sum:
            b.host_y_TD[:count].copy_(b.y_TD[:count])
            x_TD += b.host_y_TD.numpy()[:count]
        after_ffn(m.cfg, m.table_LX[layer, 0], m.eps, b.host_normed_TD.numpy()[:count], x_TD)

    def _last_logits(self, side: str, count: int) -> None:
        """The last token's logits, where decoding leaves them."""
        device_ops, host_ops, b = self._device_ops, self._host_ops, self._buffers
        if self._move_residual(side, self._plan.head, slice(count - 1, count)) == GPU:
            device_ops.workspace.x_MD.copy_(b.x_TD[count - 1 : count])
            device_ops.head()
            device_ops.device.synchronize()
        else:
            host_ops.x_MD[:] = b.host_x_TD.numpy()[count - 1]
            host_ops.head()

    def _head_on_device(self, logits_TV: Floats) -> None:
        """Logits of all tokens, some rows of the head at a time."""
        count, matrix = len(logits_TV), self._parts.head
        x_TD = replace(self._parts, exact=True).head_input(count)
        bias_V = self._device_ops.weights.vector("head_bias")
        step, found_TV = dense_rows(count), torch.from_numpy(logits_TV)
        for low in range(0, matrix.rows, step):
            high = min(matrix.rows, low + step)
            bias_N = None if bias_V is None else bias_V[low:high]
            found_TV[:, low:high].copy_(gemm.linear(matrix[low:high], bias_N, x_TD, exact=True))
        self._parts.finish_logits(found_TV)

    def close(self) -> None:
        if self._streamer is not None:
            self._streamer.close()
