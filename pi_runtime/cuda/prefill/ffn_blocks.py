"""FFNs of a block of a prompt's tokens: hot neurons on the GPU, cold ones on the CPU or streamed to the GPU.

    y_t ← Σ_k route_weight_tk (Σ hot + Σ cold neurons of expert_tk)

In a mixture of experts the tokens of each expert are gathered, on both sides. The router is where the attention is;
which tokens go to which expert is brought to the host once a layer. A decoder without experts has one expert, which
takes all tokens with weight 1. Cold weights of an expert are streamed to the GPU if enough tokens go to it (see
`prefill`). Those that come from disk stay on the CPU: each row is read once for a block.

Shape letters: T tokens of the block, K experts of a token, X experts, N tokens of one expert, A of all experts, D model
width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.gpu_buffers import gpu_prompt_block, pinned_prompt_block
from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps
from pi_runtime.cuda.kernels import gemm
from pi_runtime.cuda.memory.devices import Device, allocate, allocate_pinned
from pi_runtime.cuda.memory.weights import WeightStreamer
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.execution.host import token_blocks
from pi_runtime.execution.plan_layout import GPU
from pi_runtime.kernels import moe
from pi_runtime.kernels.ffn.memory import tokens_by_expert


@dataclass(frozen=True)
class BlockBuffers:
    """The residual, the FFN's input and the FFN's sum on both sides; what attention works in on the GPU."""

    ids_T: torch.Tensor
    """int64."""
    x_TD: torch.Tensor
    normed_TD: torch.Tensor
    y_TD: torch.Tensor
    qkv_TQ: torch.Tensor
    attn_out_TO: torch.Tensor
    host_x_TD: torch.Tensor
    """Pinned, as the two that follow."""
    host_normed_TD: torch.Tensor
    host_y_TD: torch.Tensor

    @classmethod
    def allocate(cls, d: Decoder, tokens: int, device: Device) -> "BlockBuffers":
        on_host = allocate_pinned(pinned_prompt_block(d, tokens), device)
        return cls(**allocate(gpu_prompt_block(d, tokens), device), **on_host)


@dataclass(frozen=True)
class Routes:
    """The tokens of a block that go to one expert, in order, and their weights."""

    token_N: Ints
    route_weight_N: Floats


@dataclass(frozen=True)
class ExpertWork:
    """What is to be computed of one expert for a block."""

    expert: int
    tokens: int
    """How many tokens go to it."""
    routes: Routes | None
    """None for all tokens of the block, with weight 1."""
    streamed: bool
    """Whether the cold neurons are streamed to the GPU."""
    on_device: bool
    """Whether the GPU computes the hot neurons, or the cold ones that are streamed."""
    on_host: bool


class FfnBlocks:
    """The FFNs of one executor's prompts."""

    def __init__(
        self,
        device_ops: DeviceOps,
        host_ops: HostOps,
        buffers: BlockBuffers,
        streamer: WeightStreamer | None,
        stream_from: int,
    ) -> None:
        self._device_ops, self._host_ops, self._buffers = device_ops, host_ops, buffers
        self._streamer, self._stream_from = streamer, stream_from

    def run(self, layer: int, side: str, count: int) -> tuple[bool, bool]:
        """Leave the sums of `count` tokens in the buffers' y; the FFN's input is on the side that has the residual.

        Returns whether the GPU has a sum, and whether the CPU has one.
        """
        b = self._buffers
        work = tuple(self._work(layer, side, count))
        on_device, on_host = [w for w in work if w.on_device], [w for w in work if w.on_host]
        if on_device and side != GPU:
            b.normed_TD[:count].copy_(b.host_normed_TD[:count], non_blocking=True)
        if on_host and side == GPU:
            b.host_normed_TD[:count].copy_(b.normed_TD[:count])
        if on_device:
            self._device_sums(layer, on_device, count)
        if on_host:
            self._host_sums(layer, on_host, count)
        return bool(on_device), bool(on_host)

    def _work(self, layer: int, side: str, count: int) -> Iterator[ExpertWork]:
        """The work of each expert that has tokens."""
        d_ff, cuts = self._device_ops.decoder.d_ff, self._device_ops.cuts[layer]
        for expert, routes in self._routes(layer, side, count):
            cut, tokens = cuts.cut_X[expert], count if routes is None else len(routes.token_N)
            streamed = cut < d_ff and self._streamer is not None and tokens >= self._stream_from
            yield ExpertWork(expert, tokens, routes, streamed, cut > 0 or streamed, cut < d_ff and not streamed)

    def _routes(self, layer: int, side: str, count: int) -> Iterator[tuple[int, Routes | None]]:
        """The experts that have tokens, and these tokens."""
        n_experts = self._device_ops.decoder.n_experts
        if n_experts == 1:
            yield 0, None
            return
        route = self._route_on_device if side == GPU else self._route_on_host
        for expert, token_N, route_weight_N in tokens_by_expert(*route(layer, count), n_experts):
            yield expert, Routes(token_N, route_weight_N)

    def _route_on_device(self, layer: int, count: int) -> tuple[Ints, Floats]:
        """(T, K) experts of each token, and their weights."""
        router = self._device_ops.weights.matrix(f"layers/{layer}/ffn/router")
        value_TX = gemm.linear(router, None, self._buffers.normed_TD[:count])
        best = value_TX.sort(dim=1, descending=True, stable=True)  # the lower expert of equal ones first
        d = self._device_ops.decoder
        taken = d.experts_per_token
        weighed_TN = best.values[:, :taken] if d.router_normalised else best.values
        route_weight_TK = weighed_TN.softmax(1)[:, :taken]
        return best.indices[:, :taken].contiguous().cpu().numpy(), route_weight_TK.contiguous().cpu().numpy()

    def _route_on_host(self, layer: int, count: int) -> tuple[Ints, Floats]:
        """(T, K) experts of each token, and their weights."""
        m, taken = self._host_ops.host, self._device_ops.decoder.experts_per_token
        expert_TK, route_weight_TK = np.empty((count, taken), np.int64), np.empty((count, taken), np.float32)
        for part in token_blocks(count):
            ws, tokens = m.workspace, part.stop - part.start
            moe.route(m.cfg, m.table_LX[layer, 0], self._buffers.host_normed_TD.numpy()[part], ws)
            expert_TK[part], route_weight_TK[part] = ws.expert_TK[:tokens], ws.route_weight_TK[:tokens]
        return expert_TK, route_weight_TK

    def _device_sums(self, layer: int, work: Sequence[ExpertWork], count: int) -> None:
        """y ← the sums of the neurons that the GPU computes."""
        normed_TD, y_TD = self._buffers.normed_TD[:count], self._buffers.y_TD[:count]
        y_TD.zero_()
        routes = [w.routes for w in work if w.routes is not None]
        if not routes:
            self._add_expert(layer, work[0], normed_TD, y_TD)
            return
        # All experts' tokens in one copy each: such a copy waits for what the GPU is doing.
        token_A = _to_device(np.concatenate([r.token_N for r in routes]), normed_TD.device)
        route_weight_A = _to_device(np.concatenate([r.route_weight_N for r in routes]), normed_TD.device)
        begin = 0
        for w in work:
            part = slice(begin, begin + w.tokens)
            begin = part.stop
            x_ND = normed_TD[token_A[part]]
            y_ND = torch.zeros_like(x_ND)
            self._add_expert(layer, w, x_ND, y_ND)
            # An expert has a token once, so no two additions meet.
            y_TD.index_add_(0, token_A[part], y_ND.mul_(route_weight_A[part, None]))

    def _add_expert(self, layer: int, work: ExpertWork, x_ND: torch.Tensor, y_ND: torch.Tensor) -> None:
        """y ← y + the hot neurons of one expert, and the cold ones that are streamed."""
        ops, cuts = self._device_ops, self._device_ops.cuts[layer]
        d, cut, low = ops.decoder, cuts.cut_X[work.expert], cuts.base_X[work.expert]
        if cut:
            gemm.add_neurons(ops.layer_neurons(layer).slice(low, low + cut), d, x_ND, y_ND)
        if work.streamed:
            assert self._streamer is not None
            end = (work.expert + 1) * d.d_ff
            for neurons in self._streamer.chunks(layer, end - d.d_ff + cut, end):
                gemm.add_neurons(neurons, d, x_ND, y_ND)

    def _host_sums(self, layer: int, work: Sequence[ExpertWork], count: int) -> None:
        """y ← the sums of the cold neurons, on the CPU."""
        normed_TD, y_TD = (b.numpy()[:count] for b in (self._buffers.host_normed_TD, self._buffers.host_y_TD))
        y_TD[:] = 0
        tokens = ((w.routes.token_N, w.routes.route_weight_N) if w.routes else _all_tokens(count) for w in work)
        taken = [(w.expert, *of) for w, of in zip(work, tokens, strict=True)]
        self._host_ops.rows.add_dense(layer, taken, self._device_ops.cuts[layer].cut_X, normed_TD, y_TD)


def _all_tokens(count: int) -> tuple[Ints, Floats]:
    """All tokens of a block, each with weight 1."""
    return np.arange(count), np.ones(count, np.float32)


def _to_device(numbers: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numbers).to(device)
