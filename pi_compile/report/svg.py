"""A matplotlib figure as inline SVG: small, without fonts, in the colours of the page's style.

Figures are drawn in placeholder colours, which become `var(--NAME)`: so one figure suits a light page and a dark one.
Never pass text of a file to a figure: matplotlib reads mathematics between dollars.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from pi_compile.report.colours import COLOURS

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
