"""Reads a block of a prompt's tokens, dense: each part where the plan has it, the residual where the attention is.

    y ← Σ hot (GPU)  +  Σ cold (CPU, or streamed to the GPU)          x ← x + y + bias

The operations are those of the plan's schedule. The CPU works in blocks of `BLOCK_TOKENS`; while it computes the cold
neurons, the GPU computes the hot ones.

Shape letters: T tokens, D model width, V vocabulary, N rows of the head, L layers.

The number of tokens from which on cold weights are brought to the GPU instead of being computed on the CPU.

For a block of T tokens and one weight of b bytes, the link takes b ÷ r seconds whatever T is, and the CPU takes 2 T ÷ f
seconds for its operations. The GPU's own arithmetic is left out because it has operations to spare.

    T* = b f / (2 r)
"""

import math
import time
from dataclasses import replace

import numpy as np
import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import dense_rows
from pi_runtime.artifact.schema import Plan
from pi_runtime.artifact.sizes import ArraySpec
from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps
from pi_runtime.cuda.kernels import gemm
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.weights import NBYTES, PinnedStaging, WeightStreamer
from pi_runtime.cuda.prefill.ffn_blocks import BlockBuffers, FfnBlocks
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.execution.ops import CpuOps
from pi_runtime.execution.plan_layout import CPU, GPU
from pi_runtime.execution.rows import Piece
from pi_runtime.execution.schedule import schedule_of
from pi_runtime.kernels.benchmarks import product_flops
from pi_runtime.kernels.codegen.threads import advance_progress
from pi_runtime.kernels.forward import head


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
        self._device_ops, self._streamer = device_ops, streamer
        buffers = BlockBuffers.allocate(device_ops.decoder, tokens, device_ops.device)
        self._ffn = FfnBlocks(device_ops, host_ops, buffers, streamer, stream_from)
        self._on_device = DeviceBlock(device_ops, host_ops, buffers, self._ffn)
        self._on_host = HostBlock(host_ops, buffers, self._ffn)
        self._schedule = schedule_of(plan)

    @gemm.float32_accumulation()
    def run(self, tokens: Ints) -> None:
        """Run tokens from position `HostOps.start` on; the last one's logits are where decoding leaves them."""
        self._run(tokens, slice(len(tokens) - 1, len(tokens)), None)

    @gemm.float32_accumulation()
    def all_logits(self, tokens: Ints, logits_TV: Floats) -> None:
        """Run tokens and write the logits of all of them, in float32 whatever the head's format."""
        self._run(tokens, slice(len(tokens)), logits_TV)

    def _run(self, tokens: Ints, wanted: slice, logits_TV: Floats | None) -> None:
        self._device_ops.receive_tokens()  # the first one's position, and the table of pages
        self._on_device.take_block(tokens, wanted, logits_TV)
        self._on_host.take_block(tokens, wanted, logits_TV)
        for operation in self._schedule:
            operation.run({GPU: self._on_device, CPU: self._on_host})
            advance_progress()

    def close(self) -> None:
        if self._streamer is not None:
            self._streamer.close()


class DeviceBlock:
    """The operations of a block of tokens on the GPU."""

    def __init__(self, device_ops: DeviceOps, host_ops: HostOps, b: BlockBuffers, ffn: FfnBlocks) -> None:
        self._device_ops, self._host_ops, self._buffers, self._ffn = device_ops, host_ops, b, ffn
        self._parts = replace(
            device_ops.parts,
            partials=None,
            x_TD=b.x_TD,
            normed_TD=b.normed_TD,
            qkv_TQ=b.qkv_TQ,
            attn_out_TO=b.attn_out_TO,
        )

    def take_block(self, tokens: Ints, wanted: slice, logits_TV: Floats | None) -> None:
        """Go on with these tokens; of those that are `wanted` the logits go to `logits_TV`, or to decoding's place."""
        self._tokens, self._count, self._wanted, self._logits_TV = tokens, len(tokens), wanted, logits_TV

    def embed(self, _layer: int) -> None:
        ids_T = self._buffers.ids_T[: self._count]
        ids_T.copy_(torch.from_numpy(self._tokens))
        self._parts.embed(ids_T, None, self._host_ops.start)

    def move(self, layer: int) -> None:
        """Bring the residual from the CPU."""
        b, rows = self._buffers, _moved(layer, self._device_ops.decoder.n_layers, self._count, self._wanted)
        b.x_TD[rows].copy_(b.host_x_TD[rows], non_blocking=True)

    def attention(self, layer: int) -> None:
        self._parts.attention(layer, self._count)

    def ffn(self, layer: int) -> None:
        """Both sides' sums, each in its buffer."""
        self._sums = self._ffn.run(layer, GPU, self._count)

    def after_ffn(self, layer: int) -> None:
        """x ← x + the sums of both sides + the bias."""
        b, count, (device_sum, host_sum) = self._buffers, self._count, self._sums
        x_TD = b.x_TD[:count]
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

    def head(self, _layer: int) -> None:
        """The wanted tokens' logits."""
        device_ops = self._device_ops
        if self._logits_TV is None:
            device_ops.workspace.x_MD.copy_(self._buffers.x_TD[self._wanted])
            device_ops.head()
            device_ops.device.synchronize()
        else:
            self._all_logits(self._logits_TV)

    def _all_logits(self, logits_TV: Floats) -> None:
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


class HostBlock(CpuOps):
    """The operations of a block of tokens on the CPU."""

    def __init__(self, host_ops: HostOps, buffers: BlockBuffers, ffn: FfnBlocks) -> None:
        piece = Piece(host_ops.host.workspace, buffers.host_x_TD.numpy(), buffers.host_normed_TD.numpy())
        super().__init__(host_ops.host, host_ops.rows, piece)
        self._host_ops, self._buffers, self._ffn = host_ops, buffers, ffn

    def take_block(self, tokens: Ints, wanted: slice, logits_TV: Floats | None) -> None:
        """Go on with these tokens; see `DeviceBlock.take_block`."""
        self.take_piece(tokens, self._host_ops.start, self._host_ops.cache)
        self._wanted, self._logits_TV = wanted, logits_TV

    def move(self, layer: int) -> None:
        """Bring the residual from the GPU."""
        b, rows = self._buffers, _moved(layer, len(self.host.table_LX), len(self.x_TD), self._wanted)
        b.host_x_TD[rows].copy_(b.x_TD[rows])

    def ffn(self, layer: int) -> None:
        """Both sides' sums, each in its buffer."""
        self._sums = self._ffn.run(layer, CPU, len(self.x_TD))

    def after_ffn(self, layer: int) -> None:
        """x ← x + the sums of both sides + the bias."""
        b, x_TD, (device_sum, host_sum) = self._buffers, self.x_TD, self._sums
        count = len(x_TD)
        if host_sum:
            x_TD += b.host_y_TD.numpy()[:count]
        if device_sum:
            b.host_y_TD[:count].copy_(b.y_TD[:count])
            x_TD += b.host_y_TD.numpy()[:count]
        super().after_ffn(layer)

    def head(self, layer: int) -> None:
        """The wanted tokens' logits."""
        m, x_ND = self.host, self.x_TD[self._wanted]
        if self._logits_TV is None:
            self._host_ops.x_TD[:] = x_ND
            self._host_ops.head(layer)
        else:
            head(m.cfg, m.ends, m.eps, x_ND, m.workspace, self._logits_TV)


def _moved(layer: int, layers: int, count: int, wanted: slice) -> slice:
    """The tokens whose residual is moved before a layer; before the head, behind the last layer, those wanted there."""
    return wanted if layer == layers else slice(count)


def crossover_tokens(bytes_per_weight: float, link_bytes_per_s: float, operations_per_s: float) -> int:
    """T*, rounded up; at least 1."""
    return max(1, math.ceil(bytes_per_weight * operations_per_s / (2 * link_bytes_per_s)))


def measured_crossover(decoder: Decoder, fmt: str, threads: int, device: Device) -> int:
    """Measure T* on this machine. It takes half a second, most of it for the CPU's products."""
    with device.stream():
        link = link_bytes_per_s(device)
    row = ArraySpec(fmt, (1, decoder.d_model)).nbytes_with_scales
    return crossover_tokens(row / decoder.d_model, link, product_flops(fmt, threads))


def link_bytes_per_s(device: Device) -> float:
    """Rate at which this process sends memory to the GPU through the pinned buffers; the better of two passes."""
    source = np.ones(4 * NBYTES, np.uint8)
    target = torch.empty(NBYTES, dtype=torch.uint8, device=device.device)
    staging, best = PinnedStaging(device), 0.0
    for _ in range(2):
        began = time.perf_counter()
        for start in range(0, len(source), NBYTES):
            staging.send(source[start : start + NBYTES], target)
        device.synchronize()
        best = max(best, len(source) / (time.perf_counter() - began))
    staging.close()
    return best
