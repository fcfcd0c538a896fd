"""The report's figures: of a whole token, by other budgets, and by layer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pi_compile.cost_model import CPU, GPU, PICO
from pi_compile.report.drawing import (
    LAYER_COLOURS,
    bytes_unit,
    colour,
    digits,
    duration,
    duration_unit,
    figure,
    log_axis,
    memory,
    percent,
    rectangles,
    span,
    svg,
)
from pi_compile.report.explanation import Explanation, Floats, busy, tokens_per_s

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


_GAPS = 48
"""With more layers than this there are no gaps between bars."""
_NAMED = 12
"""With more points than this there is no room for a number beside each."""


def curve_figure(e: Explanation) -> Chart:
    """The activation curve of each layer, with its cut."""
    x = np.arange(e.curves.shape[1])
    _, first = np.unique(e.curves, axis=0, return_index=True)
    names = layer_colours(len(e.curves)) if len(first) > 1 else ["accent"] * len(e.curves)
    cuts = 100 * np.array(e.placement.assignment.cuts) / e.work.decoder.neurons
    with figure(3.3) as (drawn, (axis,)):
        axis.plot([0, 100], [0, 100], color=colour("line"), lw=1)
        for n in sorted(first):
            axis.plot(x, 100 * e.curves[n], color=colour(names[n]), lw=1.1)
        on = [n for n, cut in enumerate(cuts) if cut]
        colours = [colour(names[n]) for n in on]
        if on:
            axis.scatter(
                cuts[on],
                100 * e.activations_on_gpu[on],
                c=colours,
                s=20,
                edgecolors=colour("paper"),
                linewidths=0.6,
                zorder=3,
            )
        _shares(axis)
        axis.set_xlim(0, 100.5)
        axis.set_xlabel("hottest neurons of a layer, %")
        axis.set_title("share of the layer’s activations, %")
        axis.grid()
        fifth = e.curves[:, 20]
        share = span(percent(fifth.min()), percent(fifth.max()))
        title, about = (
            "How unevenly neurons fire",
            f"The hottest fifth of a layer’s neurons has {share} of its activations.",
        )
        legend = layer_legend(len(e.curves)) if len(first) > 1 else ()
        return Chart.of(drawn, "curves", title, about, legend)


def cut_figure(e: Explanation) -> Chart | None:
    """The share of each layer on the GPU; None without a GPU."""
    if not e.spec.vram:
        return None
    assignment, n = e.placement.assignment, len(e.placement.assignment.cuts)
    shares = 100 * np.array(assignment.cuts) / e.work.decoder.neurons
    attention = assignment.sides.count(GPU)
    with figure(3.3, (8, 1), sharex=True) as (drawn, (axis, strip)):
        rectangles(axis, _bars(np.zeros(n), shares), "gpu")
        axis.plot(range(n), 100 * e.activations_on_gpu, "o", color=colour("ink"), ms=3 if n <= _GAPS else 2)
        _shares(axis)
        axis.set_title("neurons on the GPU, % of the layer")
        axis.grid(axis="y")
        axis.tick_params(axis="x", length=0)
        for side, name in ((GPU, "gpu"), (CPU, "cpu")):
            on_side = np.array([s == side for s in assignment.sides])
            rectangles(strip, _bars(np.zeros(n), on_side.astype(float)), name)
        strip.set_title("attention with its cache")
        strip.set_yticks([])
        strip.spines["left"].set_visible(False)
        _layer_axis(strip, n)
        title = "What of each layer is on the GPU"
        range_ = span(percent(shares.min() / 100), percent(shares.max() / 100))
        about = (
            f"Of a layer’s neurons {range_}; {percent(e.placement.activations_on_gpu)} of all activations; "
            f"attention of {attention} of {n} layers."
        )
        sides = [("gpu", "", "GPU"), *([("cpu", "", "CPU")] if attention < n else [])]
        legend = (*sides, ("ink", "dot", "activations of the neurons on the GPU"))
        return Chart.of(drawn, "cuts", title, about, legend)


def layer_figure(e: Explanation) -> Chart:
    """The time of each layer by part."""
    layers = e.placement.time.layers
    scale, unit = duration_unit(max(layer.total for layer in layers))
    parts = {
        "attention": [layer.attention for layer in layers],
        "predictor": [layer.predictor for layer in layers],
        "ffn": [layer.ffn for layer in layers],
        "disk": [layer.waiting for layer in layers],
        "hand-over": [layer.handover + layer.crossing for layer in layers],
    }
    with figure(2.9) as (drawn, (axis,)):
        base = np.zeros(len(layers))
        for part, times in parts.items():
            heights = np.array(times) / scale
            rectangles(axis, _bars(base, heights), colour_of(part))
            base = base + heights
        _layer_axis(axis, len(layers))
        axis.set_ylim(0, base.max() * 1.04)
        axis.set_title(f"{unit} a token")
        axis.grid(axis="y")
        slowest = int(np.argmax([layer.total for layer in layers]))
        low, high = min(layer.total for layer in layers), layers[slowest].total
        longest = f"; the slowest is layer {slowest}" if high > low else ""
        title, about = "Time of each layer", f"A layer takes {span(duration(low), duration(high))}{longest}."
        return Chart.of(drawn, "layers", title, about, legend_of(part for part in parts if any(parts[part])))


def balance_figure(e: Explanation) -> Chart | None:
    """The times of both sides of each FFN; None where only one works."""
    layers = e.placement.time.layers
    gpu, cpu = (np.array([getattr(layer, name) for layer in layers]) for name in ("gpu", "cpu"))
    if not gpu.any() or not cpu.any():
        return None
    scale, unit = duration_unit(max(gpu.max(), cpu.max()))
    with figure(2.9) as (drawn, (axis,)):
        edges = np.arange(len(layers) + 1) - 0.5
        axis.fill_between(
            edges, np.append(gpu, gpu[-1]) / scale, step="post", color=colour("gpu"), alpha=0.25, linewidth=0
        )
        for values, name in ((gpu, "gpu"), (cpu, "cpu")):
            axis.stairs(values / scale, edges, baseline=None, color=colour(name), linewidth=1.6)
        _layer_axis(axis, len(layers))
        axis.set_ylim(0, max(gpu.max(), cpu.max()) / scale * 1.06)
        axis.set_title(f"{unit} a token")
        axis.grid(axis="y")
        waits = sum(int(abs(a - b)) for a, b in zip(gpu, cpu, strict=True) if a and b)
        both = sum(1 for a, b in zip(gpu, cpu, strict=True) if a and b)
        about = (
            f"In {both} of {len(layers)} layers both work; one waits for the other {duration(waits)} a token in all."
        )
        title = "The two sides of each FFN"
        return Chart.of(drawn, "balance", title, about, (("gpu", "line", "GPU"), ("cpu", "line", "CPU")))


def rank_figure(e: Explanation) -> Chart | None:
    """Predictor rank by density; None where all layers have the same rank, or none has a predictor."""
    ranked = [(float(d), how.rank, n) for n, (d, how) in enumerate(zip(e.densities, e.work.layers, strict=True))]
    points = [(100 * density, rank, n) for density, rank, n in ranked if rank is not None]
    if len({rank for _, rank, _ in ranked}) < 2:
        return None
    names = layer_colours(len(ranked))
    with figure(2.9) as (drawn, (axis,)):
        axis.scatter(
            [x for x, _, _ in points], [y for _, y, _ in points], c=[colour(names[n]) for _, _, n in points], s=26
        )
        for x, rank, n in points if len(points) <= _NAMED else ():
            axis.annotate(
                str(n), (x, rank), xytext=(5, -11 if n % 2 else 4), textcoords="offset points", color=colour("ink")
            )
        axis.set_xlabel("density: neurons that fire for a token, %")
        axis.set_title("rank of the layer’s predictor")
        axis.set_ylim(0, max(rank for _, rank, _ in points) * 1.12)
        axis.set_xlim(0, max(x for x, _, _ in points) * 1.1)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axis.grid()
        low, high = min(rank for _, rank, _ in points), max(rank for _, rank, _ in points)
        without = len(ranked) - len(points)
        about = f"Ranks {span(str(low), str(high))}" + (f"; {without} layers have no predictor." if without else ".")
        title = "Predictor rank against density"
        legend = layer_legend(len(ranked)) if len(points) > _NAMED else ()
        return Chart.of(drawn, "ranks", title, about, legend)


def layer_colours(layers: int) -> list[str]:
    """A colour name for each layer, first to last."""
    last = len(LAYER_COLOURS) - 1
    return [LAYER_COLOURS[round(n * last / max(layers - 1, 1))] for n in range(layers)]


def layer_legend(layers: int) -> tuple[tuple[str, str, str], ...]:
    """Entries of a legend for the colours of `layer_colours`."""
    names = layer_colours(layers)
    rows: list[tuple[str, str, str]] = []
    for name in dict.fromkeys(names):
        first, last = names.index(name), len(names) - 1 - names[::-1].index(name)
        rows.append((name, "dot", f"{first}" if first == last else f"{first}–{last}"))
    return (("", "", "layers"), *rows)


def _bars(base: Floats, heights: Floats) -> list[tuple[float, float, float, float]]:
    width = 0.84 if len(heights) <= _GAPS else 1.0
    return [(n - width / 2, low, width, high) for n, (low, high) in enumerate(zip(base, heights, strict=True))]


def _layer_axis(axis: Axes, layers: int) -> None:
    axis.set_xlim(-0.6, layers - 0.4)
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _shares(axis: Axes) -> None:
    axis.set_ylim(0, 102)
    axis.set_yticks(range(0, 101, 20))
