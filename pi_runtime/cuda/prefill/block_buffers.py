"""Memory for a block of a prompt's tokens, on the GPU and in pinned RAM.

Shape letters: T tokens, D model width, H heads, G key-value heads, E head width, Q = (H + 2 G) E, O = H E.
"""

from dataclasses import dataclass

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.gpu_buffers import gpu_prompt_block, pinned_prompt_block
from pi_runtime.cuda.memory.devices import Device, allocate, allocate_pinned


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
