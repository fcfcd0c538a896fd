"""The first half hour on a GPU, in one command: tests, memory to the byte, batches, a timeline, the bench, the tables.

python tests/benchmarks/gpu_first_run.py [--out FOLDER] [--minutes 30] [--docs] [--device cpu --tiny]

Needs what the bench needs (torch, Triton, numba, NumPy), pydantic for what `plan` says, and, for the tests, pytest,
pytest-timeout and hypothesis; folders with those that are missing go on PYTHONPATH.
Stops at the first thing that is wrong and says what. FOLDER gets `first_run.json` after each step, the bench's rows, a
timeline and `measured.md`; `--docs` puts these tables into docs/explanation/gpu.md. A target that is missed is no
reason to stop: it is in the tables, and the command then ends with 1.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
os.environ.setdefault("GOMP_SPINCOUNT", "100000")
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.gpu_bench.first_run import STEPS, FirstRun, WrongError
from support.gpu_bench.measured import tables, written_into
from support.gpu_bench.model import SEVEN, TINY
from support.gpu_interpreter import Interpreted
from support.paths import ROOT

from pi_runtime.cuda.memory.devices import Cuda, Device
from pi_runtime.errors import PiError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first-run"))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu: Triton's interpreter, to try the command")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, a few tests, one format")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/explanation/gpu.md")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * a.minutes
    try:
        device: Device = Interpreted() if a.device == "cpu" else Cuda(int(a.device.partition(":")[2] or 0))
        size = TINY if a.tiny else SEVEN
        run = FirstRun(device, size, size.context, 4 if a.tiny else 24, a.out.resolve(), deadline, a.tiny)
        for name, step in STEPS.items():
            began = time.monotonic()
            print(f"{name}: {step.__doc__}", flush=True)
            run.found[name] = step(run)
            (a.out / "first_run.json").write_text(json.dumps(run.found, indent=1))
            print(f"{name}: right, {time.monotonic() - began:.0f} s\n", flush=True)
    except (WrongError, PiError) as error:
        sys.exit(f"WRONG: {error}")
    text = tables(run.found)
    (a.out / "measured.md").write_text(text, encoding="utf-8")
    print(text)
    if a.docs:
        page = ROOT / "docs/explanation/gpu.md"
        page.write_text(written_into(page.read_text(encoding="utf-8"), text), encoding="utf-8")
    if missed := [
        line for step in ("plan", "bench") for line in run.found[step]["verdicts"] if line.endswith("missed")
    ]:
        sys.exit(f"{len(missed)} targets are missed")


if __name__ == "__main__":
    main()
