"""The number of tokens from which on cold weights are brought to the GPU instead of being computed on the CPU.

For a block of T tokens and one weight of b bytes, the link takes b ÷ r seconds whatever T is, and the CPU takes 2 T ÷ f
seconds for its operations. The GPU's own arithmetic is left out because it has operations to spare.

    T* = b f / (2 r)
"""

import math
import time

import numpy as np
import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import ArraySpec
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.pinned_staging import NBYTES, PinnedStaging
from pi_runtime.kernels.benchmarks import product_flops


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
