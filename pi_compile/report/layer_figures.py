"""The report's figures by layer: activation curves, cuts, time, balance of the two sides, predictor ranks."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pi_compile.cost_model import CPU, GPU
from pi_compile.report.drawing import LAYER_COLOURS, colour, figure, rectangles
from pi_compile.report.explanation import Explanation, Floats
from pi_compile.report.quantities import duration, duration_unit, percent, span
from pi_compile.report.token_figures import Chart, colour_of, legend_of

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
