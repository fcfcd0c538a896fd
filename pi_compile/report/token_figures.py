"""The report's figures of a whole token: time by part, bytes by part, and what other budgets would give."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pi_compile.cost_model import PICO
from pi_compile.report.drawing import colour, figure, log_axis, rectangles, svg
from pi_compile.report.explanation import Explanation, busy, tokens_per_s
from pi_compile.report.quantities import bytes_unit, digits, duration, duration_unit, memory

_COLOURS = {"hand-over": "handover", "embedding and head": "head"}
"""Colours of parts that are not named like the part."""
PARTS_SHOWN = ("embedding", "attention", "cache", "predictor", "ffn", "head", "scratch", "process")
"""Parts of a memory in the order in which the page shows them."""
_WORDS = {"ffn": "FFN", "disk": "waiting for the disk", "cache": "key-value cache", "scratch": "buffers"}
"""Names of parts for readers, where they differ from the keys."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with its title and legend; the page's template has its caption."""

    title: str
    svg: Markup
    about: str
    """What it shows, in a sentence."""
    legend: tuple[tuple[str, str, str], ...] = ()
    """Entries (colour, class of the mark in the style sheet, meaning); the first two may be empty."""
    drawn: Figure

    @classmethod
    def of(cls, drawn: Figure, name: str, title: str, about: str, legend: Iterable[tuple[str, str, str]] = ()) -> Self:
        """The chart of a figure that is drawn; `name` keeps its ids apart from those of others on the page."""
        return cls(title=title, svg=svg(drawn, name, title, about), about=about, legend=tuple(legend), drawn=drawn)


def word(part: str) -> str:
    """The name of a part for readers."""
    return _WORDS.get(part, part)


def colour_of(part: str) -> str:
    """The name of a part's colour."""
    return _COLOURS.get(part, part)


def legend_of(parts: Iterable[str]) -> tuple[tuple[str, str, str], ...]:
    """The legend of these parts."""
    return tuple((colour_of(part), "", word(part)) for part in parts)


def token_figure(e: Explanation) -> Chart:
    """The time of a token by part, and the time for which each processor works."""
    time = e.placement.time
    scale, unit = duration_unit(time.total)
    rows = {"token": time.parts, **{name: parts for name, parts in busy(e.placement).items() if any(parts.values())}}
    with figure(0.62 + 0.38 * len(rows)) as (drawn, (axis,)):
        for n, parts in enumerate(rows.values()):
            _stack(axis, n, {part: ps / scale for part, ps in parts.items()})
        _rows(axis, list(rows))
        axis.set_xlim(0, max(sum(parts.values()) for parts in rows.values()) / scale * 1.02)
        axis.set_xlabel(unit)
        shown = ", ".join(f"{word(part)} {duration(ps)}" for part, ps in time.parts.items() if ps)
        title, about = "Where a token’s time goes", f"A token takes {duration(time.total)}: {shown}."
        return Chart.of(drawn, "token", title, about, legend_of(part for part, ps in time.parts.items() if ps))


def memory_figure(e: Explanation) -> Chart:
    """Bytes of both memories beside their budgets, each in its own scale."""
    p = e.placement
    bars = [("GPU", p.gpu_by_part, p.vram), ("RAM", p.ram_by_part, p.ram)]
    bars = [bar for bar in bars if bar[2]]
    used = "; ".join(f"{name} {memory(sum(parts.values()))} of {memory(budget)}" for name, parts, budget in bars)
    with figure(0.85 * len(bars) + 0.1, [1] * len(bars)) as (drawn, axes):
        for axis, (name, parts, budget) in zip(axes, bars, strict=True):
            scale, unit = bytes_unit(budget)
            rectangles(axis, [(0, -0.36, budget / scale, 0.72)], "panel", edgecolor=colour("muted"), linewidth=0.8)
            _stack(axis, 0, {part: n / scale for part, n in parts.items()})
            _rows(axis, [f"{name}\n{unit}"])
            axis.set_xlim(0, budget / scale * 1.005)
        title, about = "What memory is full of", f"Used: {used}."
        legend = legend_of(part for part in PARTS_SHOWN if p.gpu_by_part[part] + p.ram_by_part[part])
        return Chart.of(drawn, "memory", title, about, legend)


def budget_figure(e: Explanation) -> Chart | None:
    """Predicted time of a token by GPU budget; None without a GPU."""
    # A budget beyond what takes everything changes nothing.
    shown = [replace(b, vram=min(b.vram, e.all_on_gpu)) for b in e.budgets if b.vram <= e.all_on_gpu or b.asked]
    fitting = [(b.vram, b.placement) for b in shown if b.placement is not None]
    if not e.spec.vram or len(fitting) < 2:
        return None
    scale, unit = bytes_unit(e.all_on_gpu)
    ours = [(vram / scale, placement.time.total) for vram, placement in fitting]
    split = [(b.vram / scale, PICO / b.layer_split_tokens_per_s) for b in shown if b.placement is not None]
    power = [(b.vram / scale, PICO / b.powerinfer_tokens_per_s) for b in shown if b.placement is not None]
    every = [ps for line in (ours, split, power) for _, ps in line]
    time_scale, time_unit = duration_unit(min(every))
    asked = next((b.vram / scale, e.placement.time.total / time_scale) for b in shown if b.asked)
    with figure(3.1) as (drawn, (axis,)):
        lost = [b.vram / scale for b in shown if b.placement is None]
        if lost:
            axis.axvspan(0, max(lost), color=colour("warn"), alpha=0.18, lw=0)
        axis.axvline(asked[0], color=colour("accent"), lw=0.9)
        for line, name, style in ((split, "muted", "--"), (power, "predictor", ":"), (ours, "accent", "-")):
            axis.plot([x for x, _ in line], [ps / time_scale for _, ps in line], style, color=colour(name))
        axis.plot([x for x, _ in ours], [ps / time_scale for _, ps in ours], "o", color=colour("accent"), ms=3.6)
        axis.plot(*asked, "o", color=colour("accent"), ms=9, mfc="none", mew=1.6)
        log_axis(axis, min(every) / time_scale, max(every) / time_scale)
        axis.set_xlim(0, e.all_on_gpu / scale * 1.03)
        axis.set_xlabel(f"GPU memory that may be used, {unit}")
        axis.set_title(f"{time_unit} a token")
        axis.grid(axis="y")
        title, about = "What other budgets would give", _speeds(e)
        legend = [("accent", "line", "this placement"), ("predictor", "points", "PowerInfer’s rule")]
        legend += [("muted", "dash", "whole layers, dense")]
        legend += [("warn", "pale", "does not fit into memory")] if lost else []
        return Chart.of(drawn, "budgets", title, about, legend)


def ram_figure(e: Explanation) -> Chart | None:
    """Predicted speed on the CPU alone by RAM budget; None for a machine without a disk."""
    if not e.ram_budgets:
        return None
    scale, unit = bytes_unit(e.ram_budgets[-1].ram)
    budgets = [p.ram / scale for p in e.ram_budgets]
    rates = [tokens_per_s(p) for p in e.ram_budgets]
    with figure(3.1) as (drawn, (axis,)):
        axis.plot(budgets, rates, "-", color=colour("accent"))
        axis.plot(budgets[:-1], rates[:-1], "o", color=colour("accent"), ms=3.6)
        axis.plot(budgets[-1], rates[-1], "o", color=colour("accent"), ms=7, mfc="none", mew=1.6)
        axis.set_xlim(0, budgets[-1] * 1.03)
        axis.set_ylim(0, max(rates) * 1.08)
        axis.set_xlabel(f"RAM that may be used, {unit}")
        axis.set_title("tokens a second, on the CPU alone")
        axis.grid(axis="y")
        shown = (f"{digits(tokens_per_s(p))} tokens/s with {memory(p.ram)}" for p in e.ram_budgets)
        title, about = "What less RAM would give", f"{'; '.join(shown)}."
        legend = (("accent", "line", "with rows on disk"), ("accent", "dot", "ring: all in memory"))
        return Chart.of(drawn, "ram", title, about, legend)


def _speeds(e: Explanation) -> str:
    """Speeds at the budget and around it, in words."""
    rates = [
        f"{digits(tokens_per_s(b.placement))} tokens/s with {memory(b.vram) if b.vram else 'the CPU alone'}"
        for b in e.budgets
        if b.placement is not None
    ]
    return f"{'; '.join(rates)}."


def _stack(axis: Axes, row: float, parts: Mapping[str, float]) -> None:
    """One bar from left to right, with hairlines of paper between its parts."""
    at = 0.0
    for part, length in parts.items():
        rectangles(axis, [(at, row - 0.36, length, 0.72)], colour_of(part), edgecolor=colour("paper"), linewidth=0.6)
        at += length


def _rows(axis: Axes, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0, labelcolor=colour("ink"))
    axis.spines["left"].set_visible(False)
