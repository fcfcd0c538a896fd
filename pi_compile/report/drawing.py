"""A page's quantities, and its figures: matplotlib's as inline SVG, small, without fonts, in its colours; or as PNG.

Figures are drawn in placeholder colours, which become `var(--NAME)`: so one figure suits a light page and a dark one.
Never pass text of a file to a figure: matplotlib reads mathematics between dollars.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import floor, log10
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from pi_runtime.errors import size

COLOURS = {
    "paper": ("#ffffff", "#14171a"),
    "panel": ("#f6f7f8", "#1c2024"),
    "ink": ("#1b1f23", "#e8eaed"),
    "muted": ("#59626b", "#a3adb7"),
    "line": ("#d5dae0", "#39414a"),
    "accent": ("#0b6e63", "#4fd0bf"),
    "warn": ("#b3261e", "#ff8a80"),
    # Parts of time and of bytes.
    "attention": ("#2f6db5", "#5b9be6"),
    "cache": ("#7fb2e5", "#a9cdf3"),
    "predictor": ("#8a5fb8", "#b792e0"),
    "ffn": ("#d9822b", "#eea04e"),
    "disk": ("#8a7a2e", "#cdb95a"),
    "handover": ("#c23b55", "#ee6f87"),
    "embedding": ("#9aa5b0", "#8b96a1"),
    "head": ("#5f6b76", "#bcc5ce"),
    "scratch": ("#c4cbd2", "#545e68"),
    "process": ("#e3d9c6", "#6b5f4a"),
    # Processors.
    "gpu": ("#17877b", "#3fc0b0"),
    "cpu": ("#a8762a", "#d9a957"),
    # Layers, first to last.
    "layer0": ("#46327e", "#8d7fe0"),
    "layer1": ("#365c8d", "#6aa2ee"),
    "layer2": ("#277f8e", "#45bccb"),
    "layer3": ("#1fa187", "#3fd0a8"),
    "layer4": ("#6aa43a", "#9adf6a"),
    "layer5": ("#b79a00", "#f0d84a"),
}
"""Name: (on a light page, on a dark one)."""
LAYER_COLOURS = tuple(name for name in COLOURS if name.startswith("layer"))


WIDTH = 4.85
"""Width in inches of 72 SVG units: on a phone a unit is about a pixel."""
_NAMES = tuple(COLOURS)
_PLACEHOLDER = re.compile(r"#fe01([0-9a-f]{2})")
_NUMBER = re.compile(r"-?\d+\.\d+")
_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"


def colour(name: str) -> str:
    """The placeholder that matplotlib draws with for the page's colour `name`."""
    return f"#fe01{_NAMES.index(name):02x}"


@contextmanager
def figure(height: float, rows: Sequence[float] = (1,), *, sharex: bool = False) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of `height` inches with axes below each other, by matplotlib's defaults whatever the user's settings."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_style())
        drawn = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(drawn)
        yield drawn, list(drawn.subplots(len(rows), 1, squeeze=False, sharex=sharex, height_ratios=list(rows))[:, 0])


def _style() -> Any:
    muted = colour("muted")
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "pi",
        "path.simplify": True,
        "font.size": 11,
        "text.color": colour("ink"),
        "axes.titlesize": 11,
        "axes.titlecolor": muted,
        "axes.titlelocation": "left",
        "axes.titlepad": 5,
        "axes.edgecolor": colour("line"),
        "axes.labelcolor": muted,
        "axes.facecolor": "none",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": colour("line"),
        "grid.linewidth": 0.6,
        "xtick.color": colour("line"),
        "ytick.color": colour("line"),
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
        "lines.linewidth": 1.6,
    }


def rectangles(axis: Axes, boxes: Sequence[tuple[float, float, float, float]], name: str, **options: Any) -> None:
    """Filled boxes (left, bottom, width, height) as one path; those without area are left out."""
    vertices: list[tuple[float, float]] = []
    for left, bottom, width, height in boxes:
        if width and height:
            right, top = left + width, bottom + height
            vertices += [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
    if vertices:
        codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * (len(vertices) // 5)
        options = {"facecolor": colour(name), "linewidth": 0, **options}
        axis.add_patch(PathPatch(Outline(vertices, codes), **options))


def svg(drawn: Figure, name: str, title: str, description: str) -> Markup:
    """The figure as an HTML element. `name` keeps its ids apart from those of other figures."""
    out = io.StringIO()
    drawn.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ET.fromstring(out.getvalue())  # noqa: S314  written above
    for child in [c for c in root if c.tag in (f"{_SVG}metadata", f"{_SVG}defs")]:
        if child.tag.endswith("metadata") or child.find(f"{_SVG}style") is not None:
            root.remove(child)
    text = ET.tostring(root, encoding="unicode")
    used = set(re.findall(r'[("]#([\w.-]+)[)"]', text))
    for element in root.iter():
        _tidy(element, used, lambda key: f"{name}-{key}")
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-labelledby": f"{name}-title {name}-about",
    }
    about = ET.Element("desc", id=f"{name}-about")
    heading = ET.Element("title", id=f"{name}-title")
    heading.text, about.text = title, description
    root[:0] = [heading, about]
    text = ET.tostring(root, encoding="unicode")
    # ElementTree has escaped what is text in it.
    return Markup(_PLACEHOLDER.sub(lambda found: f"var(--{_NAMES[int(found[1], 16)]})", text))  # noqa: S704


def _tidy(element: ET.Element, used: set[str], own: Callable[[str], str]) -> None:
    """Remove namespaces, unused ids and fonts from an element, and round its numbers to two decimals."""
    element.tag = element.tag.removeprefix(_SVG)
    element.text = element.text if element.tag == "text" else None
    element.tail = None
    found = dict(element.attrib)
    element.attrib.clear()
    for key, value in found.items():
        if key == "id" and value in used:
            element.attrib["id"] = own(value)
        elif key == _HREF:
            element.attrib["href"] = "#" + own(value[1:])
        elif key != "id" and not value.startswith("rotate(-0 "):
            text = re.sub(r"font-family: [^;]*;? ?", "", value)
            text = re.sub(r"url\(#([\w.-]+)\)", lambda m: f"url(#{own(m[1])})", text)
            text = _NUMBER.sub(lambda m: f"{round(float(m[0]), 2):g}", text)
            element.attrib[key] = " ".join(text.split())


_FEWEST = 3
"""Numbers that an axis has at least."""
_SCALES = ((10**9, "billion "), (10**6, "million "), (10**3, "thousand "))


def log_axis(axis: Axes, low: float, high: float, margin: float = 1.25) -> None:
    """A logarithmic y axis with plain numbers on it.

    They are 1, 2, 5 of every power of ten, the powers of a long range, or round numbers at even distances of a short
    one.
    """
    steps = (1, 2, 5) if high < 300 * low else (1,)
    low, high = low / margin, high * margin
    powers = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    ticks = [step * 10.0**power for power in powers for step in steps]
    if sum(low <= tick <= high for tick in ticks) < _FEWEST:
        even = MaxNLocator(2 * _FEWEST, steps=[1, 2, 2.5, 5, 10], min_n_ticks=_FEWEST)
        ticks = [tick for tick in even.tick_values(low, high) if low <= tick <= high]
    axis.set_yscale("log")
    axis.set_yticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(low, high)


def count_axis(axis: Axes, what: str, most: float) -> None:
    """An x axis of a count from 0, in the unit that its largest number is easily read in."""
    scale, word = next((found for found in _SCALES if most >= found[0]), (1, ""))
    axis.set_xlim(0, most)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / scale:,.10g}")
    axis.set_xlabel(f"{word}{what}")


_DOTS_PER_INCH = 150
_STYLES = {"line": "-", "dash": "--", "points": ":", "dot": "-"}
_LIGHT = {colour(name): light for name, (light, _) in COLOURS.items()}
_COLOURED = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def png(drawn: Figure, legend: Iterable[tuple[str, str, str]]) -> bytes:
    """The figure as PNG; `legend` has entries as a chart has them. The figure is used up by it."""
    keys = [
        Line2D([], [], color=colour(name) if name else "none", ls=_STYLES.get(mark, "-"), label=label)
        for name, mark, label in legend
    ]
    if keys:
        drawn.legend(handles=keys, loc="outside lower left", ncols=min(4, len(keys)), frameon=False, fontsize="small")
    for artist in drawn.findobj():
        for kind in _COLOURED:
            read, write = getattr(artist, f"get_{kind}", None), getattr(artist, f"set_{kind}", None)
            if read is not None and write is not None and (light := _LIGHT.get(_hex(read()))) is not None:
                write(light)
    out = io.BytesIO()
    FigureCanvasAgg(drawn)
    drawn.savefig(out, format="png", dpi=_DOTS_PER_INCH, facecolor="white")
    return out.getvalue()


def _hex(value: object) -> str:
    """A colour as it is looked up; nothing for several, and for none."""
    try:
        return to_hex(value)  # type: ignore[arg-type]
    except ValueError:
        return ""


GIB = 2**30
NBSP = "\u00a0"
"""Keeps a number and its unit on one line."""


def duration(ps: float) -> str:
    """A time in three digits: 15930000000 → `15.9 ms`."""
    scale, unit = duration_unit(ps)
    return f"{digits(ps / scale)}{NBSP}{unit}"


def duration_unit(ps: float) -> tuple[int, str]:
    """The unit in which a time is easily read: (its picoseconds, its name)."""
    for scale, unit in ((10**12, "s"), (10**9, "ms"), (10**6, "µs")):
        if ps >= scale:
            return scale, unit
    return 10**3, "ns"


def bytes_unit(nbytes: float) -> tuple[int, str]:
    """The unit in which so many bytes are easily read: (its bytes, its name)."""
    return next(((s, u) for s, u in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if nbytes >= s), (1, "B"))


def digits(value: float) -> str:
    """A number in three digits, or all those before the point: `0.0123`, `15.9`, `1,234`."""
    if value == 0:
        return "0"
    places = next((n for n, least in enumerate((100, 10, 1, 0.1, 0.01)) if abs(value) >= least), 5)
    return f"{value:,.{places}f}"


def percent(share: float) -> str:
    """A share in percent: 0.0123 → `1.2 %`; a small one is never shown as 0."""
    if 0 < share < 0.001:
        return f"<{NBSP}0.1{NBSP}%"
    return f"{share * 100:.{0 if share >= 0.1 or share == 0 else 1}f}{NBSP}%"


def memory(nbytes: int) -> str:
    """Bytes in a readable unit, – for none."""
    return "–" if nbytes == 0 else size(nbytes).replace(" ", NBSP)


def span(low: str, high: str) -> str:
    """A range, `30 % to 100 %`, or one value where both are the same."""
    return low if low == high else f"{low} to {high}"
