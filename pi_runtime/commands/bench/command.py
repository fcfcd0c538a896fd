"""`pi-run --bench`: measure, show a bar meanwhile, and print what was found, also where it is interrupted."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pi_runtime import console
from pi_runtime.commands.bench import ram_sweep, rendering
from pi_runtime.commands.bench.beside import LlamaCpp
from pi_runtime.commands.bench.measurement import Bench, BenchSpec
from pi_runtime.commands.bench.ram_sweep import BudgetRow
from pi_runtime.engine.model import Model


def run_bench(
    path: Path,
    open_model: Callable[[str], Model],
    mode: str,
    spec: BenchSpec,
    *,
    beside: Path | None,
    as_json: bool,
    as_markdown: bool,
) -> None:
    """Measure an artifact in a mode and dense, and llama.cpp with the file `beside`, and print the result."""
    bench = Bench(path, spec, open_model, None if beside is None else partial(LlamaCpp, beside))
    try:
        with console.progress("measuring", "tests") as bar:
            bench.run(mode, bar)
    finally:
        if bench.rows:
            rows = [rendering.values(*pair) for pair in rendering.with_dense(bench.rows)]
            figures = {"device": bench.device, "threads": spec.threads, "rows": rows, "left_out": bench.left_out}
            _print(rendering.report(path, **figures), rendering.cells(bench.rows), as_json, as_markdown)
        for slow in rendering.slower_than_dense(bench.rows):
            console.say(f"dense is quicker than {slow} here: --mode dense")
        for reason in bench.left_out:
            console.say(f"left out: {reason}")


def run_sweep(
    path: Path, open_model: Callable[[int], Model], most: int, spec: BenchSpec, *, as_json: bool, as_markdown: bool
) -> None:
    """Measure decoding within budgets of memory up to `most`, and print the curve."""
    rows: list[BudgetRow] = []
    try:
        with console.progress("measuring", "budgets") as bar:
            ram_sweep.sweep(open_model, most, spec.limit_s or float("inf"), bar, rows)
    finally:
        if rows:
            figures = {"device": "cpu", "threads": spec.threads, "budgets": [ram_sweep.values(row) for row in rows]}
            _print(rendering.report(path, **figures, left_out=[]), ram_sweep.cells(rows), as_json, as_markdown)


def _print(found: Mapping[str, Any], cells: Sequence[Mapping[str, str]], as_json: bool, as_markdown: bool) -> None:
    if as_json:
        console.print_json(found)
    else:
        sys.stdout.write((rendering.markdown if as_markdown else rendering.text)(found, cells) + "\n")
