"""Memory for a block of a prompt's tokens, on the GPU and in pinned RAM.

Shape letters: T tokens, D model width, H heads, G key-value heads, E head width, Q = (H + 2 G) E, O = H E.
"""

from dataclasses import dataclass

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.cuda.memory.devices import Device


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
        def on_device(width: int) -> torch.Tensor:
            return torch.zeros(tokens, width, device=device.device)

        def on_host() -> torch.Tensor:
            return device.pinned(tokens * d.d_model, torch.float32).view(tokens, d.d_model)

        return cls(
            ids_T=torch.zeros(tokens, dtype=torch.int64, device=device.device),
            x_TD=on_device(d.d_model),
            normed_TD=on_device(d.d_model),
            y_TD=on_device(d.d_model),
            qkv_TQ=on_device((d.n_heads + 2 * d.n_kv_heads) * d.head_dim),
            attn_out_TO=on_device(d.n_heads * d.head_dim),
            host_x_TD=on_host(),
            host_normed_TD=on_host(),
            host_y_TD=on_host(),
        )
