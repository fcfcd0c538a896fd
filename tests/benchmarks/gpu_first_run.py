"""The first half hour on a GPU, in one command: tests, memory to the byte, batches, a timeline, the bench, the tables.

python tests/benchmarks/gpu_first_run.py [--out FOLDER] [--minutes 30] [--go-on] [--docs] [--steps NAME …]
python tests/benchmarks/gpu_first_run.py --tiny --device cpu|emulator

Needs what the bench needs (torch, Triton, numba, NumPy) and, for the tests, pytest, pytest-timeout and hypothesis;
folders with those that are missing go on PYTHONPATH. Everything else, pydantic too, may be missing.

Stops at the first thing that is wrong, or the first target that is missed, and says which; with `--go-on` targets may
be missed. FOLDER gets `first_run.json` after each step, the bench's rows, a timeline and `measured.md`; `--docs` puts
these tables into docs/explanation/gpu.md. What FOLDER has already is not run again, so where a command may not take
half an hour, the same one goes on (`--minutes 9`). Exit codes: 1 wrong, 2 a target missed, 3 no time left.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
from support.gpu_bench import devices, without_pydantic

devices.prepare()
without_pydantic.install()

from support.gpu_bench.first_run import STEPS, FirstRun, WrongError
from support.gpu_bench.measured import tables, written_into
from support.gpu_bench.model import SEVEN, TINY
from support.gpu_bench.targets import MISSED
from support.paths import ROOT

from pi_runtime.errors import PiError

WRONG, TARGET, TIME = 1, 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first-run"))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--device", default="cuda:0", help=devices.HELP)
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, a few tests, one format")
    parser.add_argument("--go-on", action="store_true", help="past targets that are missed")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/explanation/gpu.md")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="run these alone")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    run = FirstRun(a.device, TINY if a.tiny else SEVEN, a.out.resolve(), time.monotonic() + 60 * a.minutes, a.tiny)
    if (file := a.out / "first_run.json").exists():
        run.found |= json.loads(file.read_text())
    run.coming = [name for name in STEPS if name in a.steps and name not in run.found]
    code = 0
    try:
        with devices.opened(a.device) as run.device:
            code = _steps(run, a.go_on)
    except (WrongError, PiError) as error:
        code = WRONG
        print(f"WRONG: {error}", file=sys.stderr, flush=True)
    text = tables(run.found)
    (a.out / "measured.md").write_text(text, encoding="utf-8")
    print(text)
    if a.docs:
        page = ROOT / "docs/explanation/gpu.md"
        page.write_text(written_into(page.read_text(encoding="utf-8"), text), encoding="utf-8")
    sys.exit(code)


def _steps(run: FirstRun, go_on: bool) -> int:
    """Take step after step; returns the exit code."""
    missed = 0
    while run.coming:
        name = run.coming[0]
        if run.left() < 1 and not run.tiny:
            print(f"NO TIME LEFT for {', '.join(run.coming)}: the same command goes on there", file=sys.stderr)
            return TIME
        began = time.monotonic()
        print(f"{name}: {STEPS[name].__doc__}", flush=True)
        run.found[name] = STEPS[name](run)
        (run.out / "first_run.json").write_text(json.dumps(run.found, indent=1))
        print(f"{name}: right, {time.monotonic() - began:.0f} s\n", flush=True)
        del run.coming[0]
        for verdict in run.found[name].get("verdicts", ()):
            if verdict.endswith(MISSED):
                missed += 1
                print(f"TARGET MISSED in {name}: {verdict}", file=sys.stderr, flush=True)
                if not go_on:
                    return TARGET
    return TARGET if missed else 0


if __name__ == "__main__":
    main()
