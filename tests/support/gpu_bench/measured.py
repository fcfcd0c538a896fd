"""The tables of a first run, and their place in the page about the GPU."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def tables(found: Mapping[str, Any]) -> str:
    """The figures of the steps that a first run has taken, as Markdown."""
    parts = [part(found[step]) for step, part in _PARTS.items() if step in found]
    if rows := [_row(r) for step in found if step.startswith("bench") for r in found[step]["rows"]]:
        parts.append(_table(_BENCH, rows))
    if verdicts := [v for of_step in found.values() for v in of_step.get("verdicts", ())]:
        parts.append("\n".join(f"- {verdict}" for verdict in verdicts))
    return "\n\n".join(parts or ["Nothing yet."]) + "\n"


def _machine(about: Mapping[str, Any]) -> str:
    return f"Measured on {about['gpu']}, torch {about['torch']}, Triton {about['triton']}."


def _memory(found: Mapping[str, Any]) -> str:
    names = ("bytes", "counted", "held", "peak")
    rows = [(r["budget"], *(f"{r[name]:,}" for name in names)) for r in found["rows"]]
    return _table(("budget", "bytes", "counted", "held", "at most"), rows)


def _batches(found: Mapping[str, Any]) -> str:
    rows = [(r["together"], f"{r['tokens_per_second']:.1f}") for r in found["rows"]]
    peer = f"torch's own dense decoding: {found['torch_dense_tokens_per_second']:.1f} tokens/s."
    return _table(("together", "tokens/s"), rows) + "\n\n" + peer


def _timeline(line: Mapping[str, Any]) -> str:
    overlap = "" if line["overlap"] is None else f", overlap {line['overlap']:.2f}"
    return (
        f"A token with neurons on both sides: {line['us']:.0f} µs, GPU {line['gpu_us']:.0f}, CPU {line['cpu_us']:.0f}"
        f"{overlap}."
    )


def _plan(found: Mapping[str, Any]) -> str:
    figures = (("decode", ".1f"), ("planned", ".1f"), ("measured/planned", ".2f"))
    rows = [(r["budget"], r["mode"], *(format(r[name], form) for name, form in figures)) for r in found["rows"]]
    return _table(("budget", "mode", "tokens/s", "as `plan` says", "measured ÷ said"), rows)


_PARTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "machine": _machine,
    "tests": lambda found: f"Tests: {found['tests'].strip('= ')}.",
    "memory": _memory,
    "batches": _batches,
    "timeline": _timeline,
    "plan": _plan,
}
_BENCH = (
    "model", "format", "budget", "what", "tokens/s", "measured ÷ predicted", "prompt", "overlap", "hand-over µs",
)  # fmt: skip


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
