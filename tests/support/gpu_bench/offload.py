"""Dense decoding by torch; layers that do not fit are copied to the GPU for every token, as accelerate's offload does.

Whole layers stay on the GPU as long as the largest one fits beside them. The others are in pageable RAM and are copied
when their turn comes. This replaces accelerate where it or transformers is missing (see `accelerated`), and is the
plain definition that the executor's logits are compared with.
"""

import numpy as np
import torch

from pi_runtime.artifact.schema import Manifest
from support.gpu_bench.model import MemoryArtifact

NAME = "copy of accelerate's offload, dense"
_NAMES = ("attention/qkv", "attention/out", "ffn/first", "ffn/rest", "ffn/first_bias")


def layer_bytes(manifest: Manifest) -> int:
    """Bytes that are copied for a layer that does not stay."""
    return sum(manifest.arrays[f"layers/0/{name}"].nbytes for name in _NAMES)


def resident_layers(manifest: Manifest, budget: int, context: int) -> int:
    """How many layers stay on the GPU, beside embedding, head, the cache and the layer that is computed."""
    d, size = manifest.decoder, layer_bytes(manifest)
    ends = sum(manifest.arrays[name].nbytes for name in ("embedding", "head"))
    cache = 2 * d.n_layers * context * d.d_model * 2
    return min(d.n_layers, max(0, (budget - cache - ends - size) // size))


class Offload:
    """One sequence of at most `context` tokens."""

    def __init__(self, artifact: MemoryArtifact, budget: int, context: int, device: torch.device) -> None:
        d = artifact.manifest.decoder
        self.d, self.device, self.dtype = d, device, torch.float16 if device.type == "cuda" else torch.float32
        names = [[f"layers/{n}/{name}" for name in _NAMES] for n in range(d.n_layers)]
        in_ram = [[torch.from_numpy(artifact.array(name)) for name in layer] for layer in names]
        ends = [torch.from_numpy(artifact.array(name)) for name in ("embedding", "head")]
        self.resident = resident_layers(artifact.manifest, budget, context)
        self.layers = [[t.to(device) for t in w] if n < self.resident else w for n, w in enumerate(in_ram)]
        self.embedding, self.head = (t.to(device) for t in ends)
        self.cache = torch.zeros(d.n_layers, 2, d.n_heads, context, d.head_dim, dtype=self.dtype, device=device)
        angles = torch.outer(torch.arange(context).float(), torch.tensor(d.rotary_frequencies)).to(device)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.length = 0

    def read(self, ids: np.ndarray) -> torch.Tensor:
        """Logits (V,) after the last of these tokens."""
        return [self.step(int(token)) for token in ids][-1]

    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        """Logits (V,) after this token."""
        d, at = self.d, self.length
        x_D = self.embedding[token].float()
        for n, stored in enumerate(self.layers):
            qkv, out, first, rest, bias = (w.to(self.device) for w in stored)
            heads = self._mv(qkv, self._norm(x_D)).view(3, d.n_heads, d.head_dim).float()
            q_HE, k_HE = self._rotate(heads[0], at), self._rotate(heads[1], at)
            self.cache[n, 0, :, at], self.cache[n, 1, :, at] = k_HE.to(self.dtype), heads[2].to(self.dtype)
            k_HSE, v_HSE = self.cache[n, :, :, : at + 1]
            mixed = torch.nn.functional.scaled_dot_product_attention(q_HE[:, None].to(self.dtype), k_HSE, v_HSE)
            x_D = x_D + self._mv(out, mixed.reshape(-1)).float()
            normed_D = self._norm(x_D)
            h_F = torch.relu(self._mv(first, normed_D).float() + bias) * self._mv(rest[:, 0], normed_D).float()
            x_D = x_D + self._mv(rest[:, 1].T, h_F).float()
        self.length += 1
        return self._mv(self.head, self._norm(x_D)).float()

    def _norm(self, x_D: torch.Tensor) -> torch.Tensor:
        return x_D * torch.rsqrt(x_D.square().mean() + self.d.norm_eps)

    def _mv(self, w_ND: torch.Tensor, x_D: torch.Tensor) -> torch.Tensor:
        return w_ND.to(self.dtype) @ x_D.to(self.dtype)

    def _rotate(self, x_HE: torch.Tensor, at: int) -> torch.Tensor:
        a, b = x_HE.chunk(2, -1)
        cos, sin = self.cos[at], self.sin[at]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
