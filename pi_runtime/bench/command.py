"""`pi-run --bench`: measure, show a bar meanwhile, and print what was found, also where it is interrupted."""

import sys
from collections.abc import Callable
from pathlib import Path

from pi_runtime import console
from pi_runtime.bench.measurement import Bench, BenchSpec
from pi_runtime.bench.rendering import markdown, report, text
from pi_runtime.model import Model


def run_bench(
    path: Path, open_model: Callable[[str], Model], mode: str, spec: BenchSpec, *, as_json: bool, as_markdown: bool
) -> None:
    """Measure an artifact in a mode and dense, and print the result."""
    bench = Bench(path, spec, open_model)
    try:
        with console.progress("measuring", "tests") as bar:
            bench.run(mode, bar)
    finally:
        if bench.rows:
            found = report(path, bench.rows, bench.left_out, device=bench.device, threads=spec.threads)
            if as_json:
                console.print_json(found)
            else:
                sys.stdout.write((markdown if as_markdown else text)(found, bench.rows) + "\n")
        for reason in bench.left_out:
            console.say(f"left out: {reason}")
