"""Times offloading, the baseline: accelerate's where it can be imported, else the copy of it."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pi_runtime.cuda.memory.devices import Device
from support.gpu_bench import offload
from support.gpu_bench.model import MemoryArtifact
from support.gpu_bench.running import token_ids


class Model(Protocol):
    """One sequence."""

    resident: int

    def read(self, ids: np.ndarray) -> torch.Tensor: ...


@dataclass(frozen=True)
class Baseline:
    """Offloading of one model's weights."""

    name: str
    open: Callable[[MemoryArtifact, int], Model]
    """Makes a model from an artifact and a budget."""
    after: slice
    """The tokens that it reads before it is timed."""
    checked: bool
    """Whether its logits follow the whole prompt and can be compared with the executor's."""


def find(base: MemoryArtifact, context: int, device: Device) -> Baseline:
    """The baseline for `base`, which is in f16: offloading has no kernels for other formats."""
    # Imported in the bench's time: it takes seconds.
    try:
        from support.gpu_bench import accelerated
    except ImportError:
        return Baseline(
            offload.NAME,
            lambda artifact, budget: offload.Offload(artifact, budget, context, device.device),
            slice(-1, None),  # every token has all the weights copied
            checked=False,
        )
    with device.stream():
        weights = accelerated.named_weights(base, device.device)
    return Baseline(
        accelerated.NAME,
        lambda artifact, budget: accelerated.Accelerated(artifact, weights, budget, context, device.device),
        slice(None),
        checked=True,
    )


def measure(
    baseline: Baseline, artifact: MemoryArtifact, budget: int, device: Device, read: int
) -> tuple[float, int, np.ndarray]:
    """(tokens a second, layers on the GPU, logits) of the four tokens after `read`, as every placement gives them."""
    ids = token_ids(artifact.manifest.decoder.vocab_size)
    with device.stream():
        model = baseline.open(artifact, budget)
        model.read(ids[:read][baseline.after])
        device.synchronize()
        began = time.perf_counter()
        rows = [model.read(ids[n : n + 1]) for n in range(read, read + 4)]
        device.synchronize()
        speed, resident = len(rows) / (time.perf_counter() - began), model.resident
        logits = torch.stack(rows).cpu().numpy()
    del model
    gc.collect()  # accelerate's hooks and their modules hold each other, and with them the GPU's memory
    return speed, resident, logits
