"""One placement explained on one HTML page that needs nothing else: no script, no font, no network.

The same explanation gives the same bytes. Everything that comes from a file is escaped, and is never part of a figure.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from html import escape
from importlib.metadata import version
from pathlib import Path

from pi_compile.files import PAGE_MARK
from pi_compile.machine import Cpu, Gpu, Machine
from pi_compile.report.explanation import Budget, Explanation, tokens_per_s
from pi_compile.report.layer_figures import balance_figure, curve_figure, cut_figure, layer_figure, rank_figure
from pi_compile.report.quantities import NBSP, digits, duration, memory, percent, span
from pi_compile.report.style import style_sheet
from pi_compile.report.tables import budget_table, layer_table, part_table
from pi_compile.report.token_figures import WORDS, Chart, budget_figure, memory_figure, token_figure
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.sizes import parameters

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_FIGURES: tuple[Callable[[Explanation], Chart | None], ...] = (
    token_figure,
    memory_figure,
    budget_figure,
    cut_figure,
    curve_figure,
    layer_figure,
    balance_figure,
    rank_figure,
)


def report_page(e: Explanation) -> str:
    """The page as HTML."""
    title = f"{_name(e)} on {e.spec.machine.name}"
    figures = [_figure(chart) for draw in _FIGURES if (chart := draw(e)) is not None]
    sections = [
        _section("In figures", f'<div class="figures">{"".join(figures)}{_ranks(e)}</div>'),
        _section("Bytes by part", part_table(e)),
        _section("Budgets", budget_table(e)),
        _section("Layers", f"<details><summary>All {len(e.work.layers)} layers</summary>{layer_table(e)}</details>"),
        _section("What this is made from", _facts(_inputs(e))),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{PAGE_MARK}'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style></head>\n<body>"
        f'<header><h1>{escape(title)}</h1><p class="answer">{_marked(e)}</p>{_tiles(e)}</header>\n'
        f"<main>{''.join(sections)}</main>\n<footer>{_footer()}</footer></body></html>\n"
    )


def _name(e: Explanation) -> str:
    """The model's name; the end of a path."""
    path = Path(e.spec.model.name)
    return "/".join(path.parts[-2:]) if path.is_absolute() or path.parts[:1] == ("..",) else str(path)


def answer_of(e: Explanation) -> str:
    """The predicted result in plain words."""
    time, p = e.placement.time, e.placement
    part, ps = max(time.parts.items(), key=lambda item: item[1])
    room = f"{memory(p.ram)} of RAM" if not p.vram else f"{memory(p.vram)} of GPU memory and {memory(p.ram)} of RAM"
    words = [
        f"It fits into {room}: {_rate(e)} are predicted, "
        f"{duration(time.total)} each. {percent(ps / time.total)} of that is {WORDS.get(part, part)}."
    ]
    if p.vram:
        others = [_other(e, budget) for budget in (_around(e, 125), _around(e, 75)) if budget is not None]
        words += [f"{' '.join(others)} Whole layers without skipping, as others place them, would give"]
        words += [f"{digits(e.asked.layer_split_tokens_per_s)}."]
    return " ".join(words).replace(NBSP, " ")


def _rate(e: Explanation) -> str:
    return f"{digits(tokens_per_s(e.placement))} tokens a second"


def _marked(e: Explanation) -> str:
    """The answer as HTML."""
    return _whole(escape(answer_of(e)).replace(_rate(e), f"<strong>{_rate(e)}</strong>", 1))


def _whole(text: str) -> str:
    """HTML in which numbers and their units stay on one line."""
    return re.sub(r"(?<=\d) (?=%|(?:[KMGT]i)?B\b|[nµm]?s\b)", NBSP, text)


def _around(e: Explanation, share: int) -> Budget | None:
    """The budget that is so many percent of the one asked for."""
    return next((b for b in e.budgets if b.vram == e.spec.vram * share // 100), None)


def _other(e: Explanation, other: Budget) -> str:
    name = "A quarter more GPU memory" if other.vram > e.spec.vram else "A quarter less"
    if other.placement is None:
        return f"{name} would not fit."
    gain = tokens_per_s(other.placement) / tokens_per_s(e.placement) - 1
    if abs(gain) < 0.0005:
        return f"{name} would change nothing."
    change = f"{'+' if gain > 0 else '−'}{percent(abs(gain))}"
    return f"{name} would give {digits(tokens_per_s(other.placement))} ({change})."


def _tiles(e: Explanation) -> str:
    p = e.placement
    share = sum(p.assignment.cuts) / e.work.counts.size
    tiles = [
        ("Answering", f"{digits(tokens_per_s(p))}{NBSP}tokens/s", f"{duration(p.time.total)} a token"),
        ("Reading a prompt", f"{digits(e.asked.prefill_tokens_per_s or 0)}{NBSP}tokens/s", "dense, in blocks"),
    ]
    if p.vram:
        tiles.append(_use("GPU memory", sum(p.gpu_bytes.values()), p.vram))
    tiles.append(_use("RAM", sum(p.ram_bytes.values()), p.ram))
    if p.vram:
        tiles.append(("On the GPU", percent(p.activations_on_gpu), f"of activations, by {percent(share)} of neurons"))
    cells = (
        f"<div><dt>{name}</dt><dd>{value.partition(NBSP)[0]} <span>{value.partition(NBSP)[2]}</span>"
        f"<small>{more}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _use(name: str, used: int, budget: int) -> tuple[str, str, str]:
    return name, memory(used), f"{percent(used / budget)} of {memory(budget)}"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>\n"


def _figure(chart: Chart) -> str:
    marks = "".join(f"<li>{_mark(name, shape) if name else ''}{label}</li>" for name, shape, label in chart.legend)
    legend = f'<ul class="key">{marks}</ul>' if marks else ""
    return f"<figure><h3>{chart.title}</h3>{legend}{chart.svg}<figcaption>{chart.caption}</figcaption></figure>"


def _mark(name: str, shape: str) -> str:
    drawn = "border-color" if shape in ("line", "dash", "points") else "background"
    return f'<i class="{shape}" style="{drawn}:var(--{name})"></i>'


def _ranks(e: Explanation) -> str:
    """A sentence in place of the figure of ranks, where all ranks are equal."""
    ranks = {how.rank for how in e.work.layers}
    if len(ranks) > 1 or None in ranks:
        return ""
    how = "as trained" if e.activation.layers else "by rule, because none is trained"
    shown = span(percent(e.densities.min()), percent(e.densities.max()))
    said = f"Predictors are of rank {ranks.pop()} in every layer, {how}, at a density of {shown}."
    return f"<figure><h3>Predictor rank against density</h3><figcaption>{said}</figcaption></figure>"


def _inputs(e: Explanation) -> Iterable[tuple[str, str]]:
    spec, p = e.spec, e.placement
    yield "Model", f"{spec.model.name}, {parameters(spec.model.decoder) / 1e9:,.3g} billion parameters"
    yield "Number formats", ", ".join(f"{WORDS.get(part, part)} {fmt}" for part, fmt in spec.formats.items())
    yield "Context", f"{spec.context:,} positions; the cache is taken as half full"
    density = float(e.work.counts.mean() / e.work.tokens)
    yield "How neurons fire", f"{percent(density)} of them for a token; {e.activation.source}"
    yield "FFN", _rungs(e)
    yield "Machine", f"{spec.machine.name}: {spec.machine.source}"
    yield from _rates(spec.machine, dict.fromkeys(spec.formats.values()))
    yield "Objective", f"{p.objective}; {_proof(e)}"
    yield "Digest", p.digest


def _rungs(e: Explanation) -> str:
    counts = Counter(how.rung for how in e.work.layers)
    ranks = [how.rank for how in e.work.layers if how.rank is not None]
    text = ", ".join(f"{counts[rung]} layers {rung}" for rung in RUNGS if counts[rung])
    how = "as trained" if e.activation.layers else "by rule"
    return f"{text}; predictors of rank {span(str(min(ranks)), str(max(ranks)))}, {how}" if ranks else text


def _rates(machine: Machine, formats: Iterable[str]) -> Iterable[tuple[str, str]]:
    yield "CPU and RAM", _processor(machine.cpu, machine.cpu.ram_gib, formats)
    if machine.gpu is not None and machine.link is not None:
        yield "GPU", _processor(machine.gpu, machine.gpu.vram_gib, formats)
        yield "Link", f"{machine.link.pcie_gb_per_s:g} GB/s one way, {machine.link.sync_us:g} µs for a hand-over"


def _processor(section: Cpu | Gpu, gib: float, formats: Iterable[str]) -> str:
    text = f"{section.name}; {gib:g} GiB at {section.bandwidth_gb_per_s:g} GB/s"
    for how, rates in (
        ("matrices in", dict(section.format_gb_per_s)),
        ("gathered rows in", dict(section.gather_gb_per_s)),
    ):
        text += "".join(f", {how} {fmt} at {rates[fmt]:g} GB/s" for fmt in formats if fmt in rates)
    return text


def _proof(e: Explanation) -> str:
    p = e.placement
    if p.gap is None:
        return "another objective than time"
    heuristic = "" if p.heuristic is None else f"; the greedy heuristic reaches {duration(p.heuristic.total)} a token"
    return f"proven optimal: no placement of this form within these budgets is predicted faster{heuristic}"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f'<dl class="facts">{"".join(rows)}</dl>'


def _footer() -> str:
    return (
        f"Written by pi-compile report, pi-toolchain {escape(version('pi-toolchain'))}. Times are predictions by the "
        "model of docs/placement.md. 1 GiB is 2³⁰ bytes, 1 GB/s is 10⁹ bytes a second."
    )
