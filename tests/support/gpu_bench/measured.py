"""The tables of a first run, and their place in the page about the GPU."""

from collections.abc import Iterable, Mapping
from typing import Any

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def tables(found: Mapping[str, Any]) -> str:
    """All figures of a first run as Markdown."""
    about, batches, line = found["machine"], found["batches"], found["timeline"]
    parts = [
        f"Measured on {about['gpu']}, torch {about['torch']}, Triton {about['triton']}.",
        f"Tests: {found['tests']['tests'].strip('= ')}.",
        _table(("budget", "bytes", "counted", "held", "at most"), _memory(found["memory"]["rows"])),
        _table(("together", "tokens/s"), [(r["together"], f"{r['tokens_per_second']:.1f}") for r in batches["rows"]]),
        f"torch's own dense decoding: {batches['torch_dense_tokens_per_second']:.1f} tokens/s. A token with neurons on "
        f"both sides: {line['us']:.0f} µs, GPU {line['gpu_us']:.0f}, CPU {line['cpu_us']:.0f}.",
        _table(
            ("budget", "mode", "tokens/s", "as `plan` says", "measured ÷ said"),
            [
                (
                    r["budget"],
                    r["mode"],
                    *(f"{r[name]:.1f}" for name in ("decode", "planned")),
                    f"{r['measured/planned']:.2f}",
                )
                for r in found["plan"]["rows"]
            ],
        ),
        _table(
            (
                "model",
                "format",
                "budget",
                "what",
                "tokens/s",
                "measured ÷ predicted",
                "prompt",
                "overlap",
                "hand-over µs",
            ),
            [_row(r) for r in found["bench"]["rows"]],
        ),
        "\n".join(f"- {verdict}" for step in ("plan", "bench") for verdict in found[step]["verdicts"]),
    ]
    return "\n\n".join(parts) + "\n"


def _memory(rows: Iterable[Mapping[str, Any]]) -> Iterable[tuple[object, ...]]:
    return [(r["budget"], *(f"{r[name]:,}" for name in ("bytes", "counted", "held", "peak"))) for r in rows]


def _row(row: Mapping[str, Any]) -> tuple[object, ...]:
    def cell(name: str, form: str) -> str:
        return "" if row.get(name) is None else format(row[name], form)

    figures = (
        ("decode", ".1f"),
        ("measured/predicted", ".2f"),
        ("prefill", ".0f"),
        ("overlap", ".2f"),
        ("handover_us", ".0f"),
    )
    return (f"{row['model']} {row['curve']}", row["format"], row["budget"], row["what"], *(cell(*f) for f in figures))


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def written_into(page: str, text: str) -> str:
    """The page with these tables in place of those that it has."""
    before, _, rest = page.partition(BEGIN)
    assert END in rest, "the page has no place for tables"
    return f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}"
