"""What a long stage will take, from its products and a short measurement."""

import time
from dataclasses import dataclass

import torch

from pi_runtime.artifact.decoder import Decoder


@dataclass(frozen=True)
class Estimate:
    """What a stage will take."""

    seconds: float
    disk_bytes: int
    memory_bytes: int


def flops_per_s(rows: int, columns: int, out: int, device: str) -> float:
    """Operations a second of a product (rows, columns) · (columns, out) in float32."""
    a, b = torch.ones(rows, columns, device=device), torch.ones(columns, out, device=device)
    (a @ b).sum().item()  # a first product starts libraries, and `item` waits for the device
    began = time.perf_counter()
    for _ in range(3):
        product = a @ b
    product.sum().item()
    return 3 * 2 * a.numel() * out / (time.perf_counter() - began)


def values_per_s(device: str) -> float:
    """Values a second that an operation on each by itself goes through."""
    a = torch.ones(1 << 22, device=device)
    a.sigmoid().sum().item()
    began = time.perf_counter()
    for _ in range(3):
        b = a.sigmoid()
    b.sum().item()
    return 3 * a.numel() / (time.perf_counter() - began)


def layer_parameters(d: Decoder, experts: int) -> int:
    """Weights of one layer with so many experts."""
    attention = (2 * d.n_heads + 2 * d.n_kv_heads) * d.head_dim * d.d_model
    return attention + (3 if d.ffn == "gated" else 2) * experts * d.d_ff * d.d_model
