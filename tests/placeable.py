"""Small machines and models to place."""

from typing import Any

import numpy as np
from synthetic import small_decoder

from pi_compile.machine_file import Cpu, Gpu, Link, Machine
from pi_compile.shapes import ModelShape
from pi_compile.workload import LayerWork, Workload
from pi_runtime.artifact.sizes import PARTS

FORMATS = dict.fromkeys(PARTS, "f16")


def machine(sync_us: float = 0.0, **changes: Any) -> Machine:
    """40 GB/s beside 400 GB/s."""
    found = Machine(
        name="m",
        source="test",
        cpu=Cpu(name="c", cores=2, ram_gib=8.0, bandwidth_gb_per_s=40.0),
        gpu=Gpu(name="g", vram_gib=8.0, bandwidth_gb_per_s=400.0),
        link=Link(pcie_gb_per_s=16.0, sync_us=sync_us),
    )
    return found.model_copy(update=changes)


def workload(
    counts: np.ndarray,
    layers: tuple[LayerWork, ...] = (),
    *,
    tokens: int = 1000,
    context: int = 16,
    formats: dict[str, str] = FORMATS,
    **shape: Any,
) -> Workload:
    """A model of `counts` (layers, neurons), sorted here."""
    decoder = small_decoder(shape.pop("family", "llama"), n_layers=counts.shape[0], d_ff=counts.shape[1], **shape)
    return Workload(
        shape=ModelShape.of(decoder),
        formats=formats,
        tokens=tokens,
        counts=-np.sort(-counts.astype(np.int64), axis=1),
        layers=layers or (LayerWork(rung="gate"),) * counts.shape[0],
        context=context,
    )


def random_workload(rng: np.random.Generator, layers: int = 2, groups: int = 2) -> Workload:
    """Any rungs, ranks, formats and head; the last group is short."""
    rungs = [
        LayerWork(rung="dense"),
        LayerWork(rung="gate"),
        LayerWork(rung="predicted", rank=3, read_ppm=1_300_000),
        LayerWork(rung="predicted", rank=9, read_ppm=2_100_000),
    ]
    return workload(
        rng.integers(0, 1000, (layers, 64 * groups - 13)),
        tuple(rungs[n] for n in rng.integers(0, 4, layers)),
        family=str(rng.choice(["llama", "opt"])),
        formats=dict.fromkeys(PARTS, str(rng.choice(["f32", "f16", "q8", "q4"]))),
    )


def random_machine(rng: np.random.Generator) -> Machine:
    """GPUs from slower than the CPU to much faster; hand-overs from free to dear."""
    sync = float(rng.choice([0.0, 0.1, 1.0, 20.0]))
    gpu = Gpu(
        name="g",
        vram_gib=1.0,
        bandwidth_gb_per_s=float(rng.choice([30.0, 80.0, 1000.0])),
        launch_us=float(rng.choice([0.0, 0.2])),
    )
    return machine(link=Link(pcie_gb_per_s=float(rng.choice([1.0, 16.0])), sync_us=sync), gpu=gpu)
