"""What a long stage takes, estimated from its operations and from short measurements."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pi_runtime.artifact.decoder import Decoder

PROCESS_BYTES = 300 << 20
"""Memory of a process that has imported torch and has done nothing yet."""


@dataclass(frozen=True)
class Estimate:
    """Time, disk and memory that a stage takes."""

    seconds: float
    disk_bytes: int
    memory_bytes: int


def flops_per_s(rows: int, columns: int, out: int, device: str) -> float:
    """Floating-point operations a second of a product (rows, columns) · (columns, out) in float32."""
    a, b = torch.ones(rows, columns, device=device), torch.ones(columns, out, device=device)
    return 2 * a.numel() * out / _seconds(lambda: a @ b)


def values_per_s(device: str) -> float:
    """Values a second of an element-wise operation."""
    a = torch.ones(1 << 22, device=device)
    return a.numel() / _seconds(a.sigmoid)


def _seconds(operation: Callable[[], torch.Tensor]) -> float:
    """Mean time of three calls, after one that initialises libraries."""
    operation().sum().item()  # `item` waits for the device
    began = time.perf_counter()
    for _ in range(3):
        result = operation()
    result.sum().item()
    return (time.perf_counter() - began) / 3


def layer_parameters(d: Decoder, experts: int) -> int:
    """Number of weights in one layer with `experts` experts."""
    attention = (2 * d.n_heads + 2 * d.n_kv_heads) * d.head_dim * d.d_model
    return attention + (3 if d.ffn == "gated" else 2) * experts * d.d_ff * d.d_model
