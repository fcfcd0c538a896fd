"""What a long stage takes, estimated from its operations and from short measurements."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.errors import size

PROCESS_BYTES = 450 << 20
"""Memory of a process beside weights and activations.

Measured: 190 MiB when all is imported, 335 when it has read a corpus, 415 when it has an optimiser; the rest is for
what the allocator keeps.
"""


LONG_S = 600.0
"""Nothing that takes longer begins without a word on how to have less."""


@dataclass(frozen=True)
class Estimate:
    """Time, disk and memory that a stage takes."""

    seconds: float
    disk_bytes: int
    memory_bytes: int

    def announced(self, stage: str, tokens: int, workers: int, key: str = "") -> str:
        """What a stage takes, as a sentence; its time is that of all workers who were started together.

        Where it is more than ten minutes, it says how to have less: by fewer tokens too, whose `key` a recipe has.
        """
        memory, disk = size(self.memory_bytes), size(self.disk_bytes)
        each = "" if workers == 1 else f" for each of {workers} workers"
        taken = self.seconds / workers
        text = f"{stage} on {tokens:,} tokens: about {taken:,.0f} s, {memory} of memory{each}, {disk} of disk"
        if taken <= LONG_S:
            return text
        fewer = f"{key} = {int(tokens * LONG_S / taken):_} (about {LONG_S:,.0f} s), " if key else ""
        return f"{text}; for less: {fewer}--workers, --device cuda:0, or none of it: `pi-compile pack --plain`"


def flops_per_s(rows: int, columns: int, out: int, device: str) -> float:
    """Floating-point operations a second of a product (rows, columns) · (columns, out) in float32."""
    a, b = torch.ones(rows, columns, device=device), torch.ones(columns, out, device=device)
    return 2 * a.numel() * out / _seconds(lambda: a @ b)


def values_per_s(device: str) -> float:
    """Values a second of an element-wise operation."""
    a = torch.ones(1 << 22, device=device)
    return a.numel() / _seconds(a.sigmoid)


def _seconds(operation: Callable[[], torch.Tensor]) -> float:
    """The least time of three calls, after one that initialises libraries: others on the machine only add to it."""
    operation()[0].sum().item()  # `item` waits for the device
    found = []
    for _ in range(3):
        began = time.perf_counter()
        operation()[0].sum().item()
        found.append(time.perf_counter() - began)
    return min(found)


def layer_parameters(d: Decoder, experts: int) -> int:
    """Number of weights in one layer with `experts` experts."""
    attention = (d.qkv_width + d.mixed_width) * d.d_model
    if d.latent_rank:
        head = d.head_dim - d.rotary_dim + (d.value_dim or d.head_dim)
        attention += d.n_heads * (d.query_rank * d.head_dim + head * d.latent_rank)
    return attention + (3 if d.ffn == "gated" else 2) * experts * d.d_ff * d.neuron_width


def activation_values(d: Decoder, window: int) -> int:
    """Most numbers of a token that are held at once in a layer, by FFN or attention, in sequences of a window.

    Beside queries, keys and values there are those with their rotation, repeated for each head of queries, and the
    sums. Where heads share a latent, or have sinks, torch computes with all scores at once, and with copies of what it
    multiplies.
    """
    heads, width = d.n_heads, d.n_heads * d.head_dim
    if d.latent_rank:
        attention = heads * (5 * d.cached_width + 2 * window)
    elif d.attention_sinks:
        attention = 6 * width + 3 * heads * window
    else:
        attention = 6 * width
    ffn = (3 if d.ffn == "gated" else 2) * d.neurons + 4 * d.d_model
    return max(ffn, d.qkv_width + attention + 3 * d.d_model)
