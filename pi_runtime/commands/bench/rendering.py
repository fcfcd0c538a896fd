"""A benchmark's result: as plain values, as text, and as a table in Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pi_runtime import console
from pi_runtime.artifact.reader import Artifact
from pi_runtime.commands.bench.beside import LlamaCpp
from pi_runtime.commands.bench.measurement import Row
from pi_runtime.errors import size
from pi_runtime.execution.devices import processor_name
from pi_runtime.kernels.codegen.isa import ISA

CURVE = "curve"
"""The name of the column with bars."""
COLUMNS = """\
× alone: over one sequence. × dense: over dense in turns, median (least to greatest)."""
"""What the columns of rows mean."""


def report(path: Path, **figures: Any) -> dict[str, Any]:
    """The artifact and the machine, then the figures."""
    with Artifact.open(path) as artifact:
        described = {"artifact": str(path), "bytes": artifact.nbytes, "digest": artifact.digest}
    return {**described, "processor": processor_name(), "isa": ISA.name, **figures}


def values(row: Row, dense: Row | None) -> dict[str, Any]:
    """A row as plain values; `dense` is the dense one of its test."""
    return {
        "mode": row.mode,
        "phase": row.phase,
        "batch": row.batch,
        "tokens": row.tokens,
        "repetitions": len(row.seconds),
        "tokens_per_s": row.tokens_per_s,
        "tokens_per_s_deviation": row.deviation,
        "seconds": row.seconds,
        "times_dense": None if dense is None else row.times(dense),
    }


def with_dense(rows: Sequence[Row]) -> list[tuple[Row, Row | None]]:
    """Each row with the dense one of the same test, where there is one."""
    dense = {(row.phase, row.batch, row.tokens): row for row in rows if row.mode == "dense"}
    return [(row, dense.get((row.phase, row.batch, row.tokens))) for row in rows]


def slower_than_dense(rows: Sequence[Row]) -> list[str]:
    """Modes of this artifact that decode one sequence more slowly than dense in every turn."""
    alone = [(row, dense) for row, dense in with_dense(rows) if (row.phase, row.batch) == ("decode", 1)]
    ours = [(row, dense) for row, dense in alone if dense and row.mode != LlamaCpp.mode]
    return [row.mode for row, dense in ours if row.times(dense)[2] < 1]


def text(found: Mapping[str, Any], cells: Sequence[Mapping[str, str]]) -> str:
    """The result for a terminal."""
    facts = [(key, value) for key, value in _facts(found) if value]
    table = console.text_of(console.facts(facts), *([console.table(cells, left=[CURVE])] if cells else []))
    return f"{table}\n\n{COLUMNS}" if "rows" in found else table


def markdown(found: Mapping[str, Any], cells: Sequence[Mapping[str, str]]) -> str:
    """The result as a line of facts and a table, to paste somewhere."""
    head = ", ".join(value for _, value in _facts(found) if value)
    if not cells:
        return head
    lines = [list(cells[0]), ["---", "---", *("---:" for _ in list(cells[0])[2:])]]
    lines += [[str(value) for value in row.values()] for row in cells]
    return "\n".join([head, "", *(f"| {' | '.join(line)} |" for line in lines)])


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("artifact", f"{Path(found['artifact']).name}, {size(found['bytes'])}, digest {found['digest'][:16]}"),
        ("processor", f"{found['processor']}, {found['isa']}, threads: {found['threads']}"),
        ("device", found["device"] if found["device"] != "cpu" else ""),
    ]


def cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows of a table, every value as it is shown."""
    alone = {row.mode: row.tokens_per_s for row in rows if row.phase == "decode" and row.batch == 1}
    found = []
    for row, dense in with_dense(rows):
        decodes = row.phase == "decode"
        ratio = row.tokens_per_s / alone[row.mode] if decodes and row.mode in alone else None
        found.append(
            {
                "mode": row.mode,
                "test": f"decode × {row.batch}" if decodes else f"prompt of {row.tokens}",
                "tokens/s": f"{row.tokens_per_s:.1f}" + ("" if row.deviation is None else f" ± {row.deviation:.1f}"),
                "× alone": "–" if ratio is None else f"{ratio:.2f}",
                "× dense": "–" if dense in (None, row) else "{:.2f} ({:.2f} to {:.2f})".format(*row.times(dense)),
                "ms": f"{1e3 * sum(row.seconds) / len(row.seconds):.1f}",
                "runs": str(len(row.seconds)),
            }
        )
    return found
