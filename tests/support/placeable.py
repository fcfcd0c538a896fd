"""Small machines and models to place, and the best placement by trying all."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.token_time import costs_of, token_time
from pi_compile.cost_model.workload import Workload
from pi_compile.machine.profile import Cpu, Gpu, Link, Machine
from pi_compile.placement.formulation import Assignment, Sizes
from pi_compile.results.activation_profile import LayerWork
from pi_runtime.artifact.sizes import PARTS
from support.synthetic import small_decoder

MUCH = 1 << 40
FORMATS = dict.fromkeys(PARTS, "f16")
RUNGS = (
    LayerWork(rung="dense"),
    LayerWork(rung="gate"),
    LayerWork(rung="predicted", rank=3, read_ppm=1_300_000),
    LayerWork(rung="predicted", rank=9, read_ppm=2_100_000),
)


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
    routed: np.ndarray | None = None,
    **changes: Any,
) -> Workload:
    """A model of `counts` (layers, neurons), sorted here inside each expert."""
    layers_, neurons = counts.shape
    experts = changes.get("n_experts", 1)
    decoder = small_decoder(changes.pop("family", "llama"), n_layers=layers_, d_ff=neurons // experts, **changes)
    by_expert = -np.sort(-counts.astype(np.int64).reshape(layers_, experts, -1), axis=2)
    return Workload(
        decoder=decoder,
        formats=formats,
        tokens=tokens,
        counts=by_expert.reshape(counts.shape),
        routed=routed,
        layers=layers or (LayerWork(rung="gate"),) * layers_,
        context=context,
    )


def random_workload(rng: np.random.Generator, layers: int = 2, groups: int = 2) -> Workload:
    """Any rungs, ranks, formats and head; the last group is short."""
    return workload(
        rng.integers(0, 1000, (layers, 64 * groups - 13)),
        tuple(RUNGS[n] for n in rng.integers(0, 4, layers)),
        family=str(rng.choice(["llama", "opt"])),
        formats=dict.fromkeys(PARTS, str(rng.choice(["f32", "f16", "q8", "q4"]))),
    )


def random_experts(rng: np.random.Generator, layers: int = 2, d_ff: int = 64, **changes: int) -> Workload:
    """Two or three experts, some of which have more of the tokens than others; any rungs and formats."""
    experts = int(rng.integers(2, 4))
    per_token = int(rng.integers(1, experts))
    shares = rng.dirichlet([3.0] * experts, layers) * per_token
    routed = np.minimum(1000, (1000 * shares).astype(np.int64))
    counts = np.repeat(routed, d_ff, axis=1) * rng.random((layers, experts * d_ff))
    return workload(
        counts.astype(np.int64),
        tuple((*RUNGS, LayerWork(rung="predicted", rank=1, read_ppm=1_700_000))[n] for n in rng.integers(0, 5, layers)),
        formats=dict.fromkeys(PARTS, str(rng.choice(["f32", "f16", "q8", "q4"]))),
        routed=routed,
        n_experts=experts,
        experts_per_token=per_token,
        **changes,
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


def every_assignment(work: Workload) -> Iterator[tuple[Any, ...]]:
    """(sides, cuts, embedding, head) of every placement."""
    n, cuts = work.decoder.n_layers, [int(cut) for cut in work.cuts]
    sides = itertools.product((CPU, GPU), repeat=n)
    return itertools.product(sides, itertools.product(cuts, repeat=n), (CPU, GPU), (CPU, GPU))


def brute(work: Workload, m: Machine, vram: int, ram: int) -> Assignment | None:
    """Least time, GPU bytes, RAM; then GPU first and larger cuts, in the order of the stages."""
    costs, sizes, best = costs_of(work, m), Sizes.of(work), None
    for sides, cuts, embedding, head in every_assignment(work):
        assignment = Assignment(sides=sides, cuts=cuts, embedding=embedding, head=head)
        used_ram, used_vram = (sum(part.values()) for part in sizes.used(assignment))
        if used_vram > vram or used_ram > ram:
            continue
        layers = tuple(x for side, cut in zip(sides, cuts, strict=True) for x in (-side, -cut))
        time = token_time(costs, sides, cuts, embedding, head).total
        key = (time, used_vram, used_ram, (-embedding, *layers, -head))
        if best is None or key < best[0]:
            best = (key, assignment)
    return None if best is None else best[1]


def random_budgets(rng: np.random.Generator, work: Workload) -> tuple[int, int]:
    """Bytes of GPU memory and RAM: too little, just enough or plenty."""
    sizes = Sizes.of(work)
    vram = int(rng.integers(0, sizes.all_on_gpu * 11 // 10))
    tight = rng.random() < 0.5
    return vram, sizes.everything - vram + int(rng.integers(0, vram + 1)) if tight else MUCH
