"""Time, memory and gap of placing all parts at the size of real models, on one thread.

    python tests/benchmarks/placement.py [--only NAME]

Also the time until a budget that fits nothing is refused. Every answer is checked before its figure is printed: bytes
within the budget, time equal to the model of time's, and not above the greedy heuristic's.
"""

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import pytest

from pi_compile.cost_model.workload import Workload
from pi_compile.machine.profile import Machine, find_machine
from pi_compile.placement.formulation import Problem, Sizes
from pi_compile.placement.stage import place
from pi_compile.planning.model_config import find_planned
from pi_compile.results.activation_profile import LayerWork
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.errors import DoesNotFitError

MODELS = {"OPT-6.7B": "facebook/opt-6.7b", "OPT-66B": "facebook/opt-66b", "OPT-175B": "metaseq/OPT-175B"}
TOKENS = 10**6
REFUSED_S = 3.0


def workload(name: str, *, same: bool) -> Workload:
    """Power-law counts of any exponent and predictors of any rank, in f16."""
    decoder, rng = find_planned(name, Path()).decoder, np.random.default_rng(0)
    counts, layers = [], []
    for n in range(decoder.n_layers):
        if n == 0 or not same:
            frequency = np.minimum(1, (20 / np.arange(1, decoder.neurons + 1)) ** rng.uniform(0.5, 1.2))
            how = LayerWork(rung="predicted", rank=64 * int(rng.integers(8, 24)), read_ppm=1_500_000)
        counts.append((TOKENS * frequency).astype(np.int64))
        layers.append(how)
    return Workload(
        decoder=decoder,
        formats=dict.fromkeys(PARTS, "f16"),
        tokens=TOKENS,
        counts=np.array(counts),
        layers=tuple(layers),
        context=2048,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=MODELS)
    only = parser.parse_args().only
    machine = find_machine("pc-high", Path())
    print(f"{'model':9} {'layers':10}  budget  seconds   gap   relaxed   greedy  peak MiB")
    for name, hub in MODELS.items():
        for same in (False, True) if only in (None, name) else ():
            work = workload(hub, same=same)
            whole = Sizes.of(work).all_on_gpu
            for percent in (10, 25, 50, 75):
                began = time.perf_counter()
                found = place(Problem.of(work, machine), whole * percent // 100, 1 << 50)
                seconds = time.perf_counter() - began
                assert sum(found.gpu_bytes.values()) <= whole * percent // 100
                assert found.heuristic is not None
                assert found.bound_ns is not None
                assert found.bound_ns <= found.time.ns <= found.heuristic.ns
                relaxed = 1 - found.bound_ns / found.time.ns
                slower = found.heuristic.total / found.time.total - 1
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
                kind = "identical" if same else "differing"
                figures = f"{seconds:8.2f} {found.gap:5.0f} {relaxed:9.1e} {slower:8.2%} {peak:9}"
                print(f"{name:9} {kind:10} {percent:>6}% {figures}", flush=True)
            refuse(name, work, machine, whole)


def refuse(name: str, work: Workload, machine: Machine, whole: int) -> None:
    """Time until a tenth of the bytes, in GPU memory and RAM together, is refused with the budgets that would do."""
    began = time.perf_counter()
    with pytest.raises(DoesNotFitError, match="bytes of RAM"):
        place(Problem.of(work, machine), whole // 20, whole // 20)
    seconds = time.perf_counter() - began
    print(f"{name:9} a tenth of its bytes refused in {seconds:.2f} s, of at most {REFUSED_S}", flush=True)


if __name__ == "__main__":
    main()
