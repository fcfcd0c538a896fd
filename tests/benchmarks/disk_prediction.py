"""Runs from disk beside what placing predicts of them: speed, share of rows found in memory, bytes read by a token.

    python tests/benchmarks/disk_prediction.py --layers 6 --shares 0.5,0.25,0.1 [--machine mine.toml]

The model is that of `disk.py`. Which rows its predictors name is recorded: counts, and persistence between tokens. Rows
that are named count as firing, so predicted bytes are too many where a run reads `rest` in a second phase. Without
--machine this one is measured, with the disk that the artifact is on; speeds compare only then.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.disk import CONTEXT, decode
from benchmarks.disk_policies import recorded
from support.bench_model import SHAPE, VOCABULARY
from support.disk_models import from_disk
from support.row_traces import counts, persistence
from support.sparse_model import Spec, build
from support.synthetic import small_decoder

from pi_compile.cost_model import Workload
from pi_compile.machine import Machine, find_machine
from pi_compile.machine.measurement import measure_machine
from pi_compile.placement import Problem, all_cpu
from pi_compile.placement.three_tiers import ThreeTiers
from pi_compile.results import LayerWork
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.disk.ram_plan import RamPlan


def workload(path: Path, tokens: int) -> Workload:
    """The artifact as it is run, with what was recorded of its predictors: what they name counts as what fires."""
    with Artifact.open(path) as artifact:
        m = artifact.manifest
    traces = recorded(path, tokens)
    return Workload(
        decoder=m.decoder,
        formats=m.formats,
        tokens=tokens,
        counts=np.stack([counts(trace, m.decoder.neurons) for trace in traces]),
        persistence=np.array([persistence(trace, m.decoder.neurons) for trace in traces]),
        layers=tuple(LayerWork(rung=layer.rung, rank=layer.rank) for layer in m.layers),
        context=CONTEXT,
    )


def predicted(problem: Problem, plan: RamPlan) -> tuple[float, float, float]:
    """Tokens a second, share of rows found, and bytes a token of a run with this division."""
    assert problem.rows is not None
    slots = list(zip(plan.first_L, plan.rest_L, strict=True))
    rows = tuple(
        problem.rows.divided(n, rest.pinned, rest.cached, first.pinned == problem.work.decoder.neurons)
        for n, (first, rest) in enumerate(slots)
    )
    time = ThreeTiers(problem, problem.rows, 0).time(all_cpu(len(rows)), rows)
    needed, missed = sum(row.needed for row in rows), sum(row.missed for row in rows)
    return 1e12 / time.total, 1 - missed / needed, sum(row.read for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, help="one that is there; else one is built")
    parser.add_argument("--machine", help="a machine profile with a disk; else this one is measured")
    parser.add_argument("--format", default="f16")
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shares", default="0.5,0.25,0.1")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = a.artifact or Path(folder) / "model.pi"
        if a.artifact is None:
            decoder = small_decoder(
                n_layers=a.layers, d_model=a.d_model, d_ff=a.d_ff, n_heads=a.heads, n_kv_heads=a.heads // 4,
                head_dim=a.d_model // a.heads, vocab_size=VOCABULARY, context_length=CONTEXT,
            )  # fmt: skip
            formats = {**dict.fromkeys(PARTS, a.format), "predictor": "q4"}
            build(Spec(decoder=decoder, formats=formats, density=0.1, rank=a.d_model // 4), {1.5: path})
        machine: Machine = find_machine(a.machine, Path()) if a.machine else measure_machine(path.parent)
        problem = Problem.of(workload(path, 96), without_gpu(machine))
        for share in map(float, a.shares.split(",")):
            with from_disk(path, share, "predicted", context=CONTEXT, threads=a.threads) as model:
                rate, found, nbytes = predicted(problem, model.executor.plan)
                walls, _, disk = decode(model, a.tokens, 8)
            assert disk is not None
            assert disk.bytes_per_token is not None
            print(
                f"{share:5.0%}  tokens/s {1 / walls.mean():6.2f}, predicted {rate:6.2f}"
                f" ({rate * walls.mean() - 1:+.0%})  "
                f"found {disk.hit_rate:.3f}, predicted {found:.3f}  "
                f"MB a token {disk.bytes_per_token / 1e6:6.2f}, predicted {nbytes / 1e6:6.2f}",
                flush=True,
            )


def without_gpu(machine: Machine) -> Machine:
    """The machine without its GPU, which runs from disk leave out."""
    return machine.model_copy(update={"gpu": None, "link": None})


if __name__ == "__main__":
    main()
