"""From which length of a prompt on it pays to bring cold weights to the GPU instead of computing with them here.

For a block of T tokens, per weight: the link takes b ÷ r seconds for its b bytes however many tokens there are, the CPU
2 T ÷ f seconds for its operations. The GPU's own arithmetic is left out: it has operations to spare.

    T* = b f / (2 r)
"""

import math
import time

import numpy as np
import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import ArraySpec
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.pinned_staging import NBYTES, Staging
from pi_runtime.kernels.benchmarks import product_flops


def crossover_tokens(bytes_per_weight: float, link_bytes_per_s: float, operations_per_s: float) -> int:
    """T*, rounded up; at least 1."""
    return max(1, math.ceil(bytes_per_weight * operations_per_s / (2 * link_bytes_per_s)))


def measured_crossover(decoder: Decoder, fmt: str, threads: int, device: Device) -> int:
    """T* of this machine: half a second, most of it the CPU's products."""
    with device.at_work():
        link = link_bytes_per_s(device)
    row = ArraySpec(fmt, (1, decoder.d_model)).nbytes_with_scales
    return crossover_tokens(row / decoder.d_model, link, product_flops(fmt, threads))


def link_bytes_per_s(device: Device) -> float:
    """Rate at which memory of this process goes up through the pinned buffers; the better of two passes."""
    source = np.ones(4 * NBYTES, np.uint8)
    target = torch.empty(NBYTES, dtype=torch.uint8, device=device.device)
    staging, best = Staging(device), 0.0
    for _ in range(2):
        began = time.perf_counter()
        for start in range(0, len(source), NBYTES):
            staging.send(source[start : start + NBYTES], target)
        device.synchronize()
        best = max(best, len(source) / (time.perf_counter() - began))
    staging.close()
    return best
