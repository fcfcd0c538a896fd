"""Rows as text and as JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sparse_model import Activity

from side_by_side.rounds import FailedRow, MeasuredRow, Row

_HEAD = (
    f"{'engine':13}{'format':7}{'isa':9}{'mode':16}{'density':>8}{'rows':>7} {'phase':8}{'length':>6}"
    f"{'tokens/s':>10}{'× llama.cpp':>12}{'MB/token':>10}{'GB/s':>7}{'stream':>7}{'of limit':>9}{'with KV':>8}"
)


def print_rows(rows: Sequence[Row]) -> None:
    print(_HEAD)
    for r in rows:
        failed = isinstance(r, FailedRow)
        shares = " " * 15 if failed else f"{r.density:8.3f}{r.read:7.3f}"
        figures = f"  {r.failure}" if failed else _figures(r)
        print(f"{r.engine:13}{r.format:7}{r.isa or '':9}{r.mode:16}{shares} {r.phase:8}{r.tokens:6}{figures}")
    for engine, version, build in dict.fromkeys((r.engine, r.version, r.build) for r in rows if r.version or r.build):
        print(f"{engine}: {version or 'unknown version'}, build: {build or 'unknown'}")
    sys.stdout.flush()


def _figures(r: MeasuredRow) -> str:
    ratio = "" if r.ratio_to_llama_cpp is None else f"{r.ratio_to_llama_cpp:.2f}"
    rate = r.tokens_per_s * r.bytes_per_token / 1e9
    return (
        f"{r.tokens_per_s:10.1f}{ratio:>12}{r.bytes_per_token / 1e6:10.1f}{rate:7.1f}{r.bandwidth / 1e9:7.1f}"
        f"{r.share_of_limit:9.2f}{r.share_with_cache:8.2f}"
    )


def print_activity(what: str, a: Activity) -> None:
    low, high = min(a.density_L), max(a.density_L)
    print(f"{what}: density {sum(a.density_L) / len(a.density_L):.4f} (layers {low:.4f} to {high:.4f}),", end=" ")
    print(f"overlap of consecutive tokens {a.overlap:.3f} (independent draws {a.overlap_independent:.3f}),", end=" ")
    print(f"mean run {a.run_length:.2f} (independent {a.run_length_independent:.2f});", end=" ")
    print(f"predictor: recall {a.recall:.4f}, rows named ÷ active {a.read_over_active:.2f}", flush=True)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
