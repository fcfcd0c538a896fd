"""One matplotlib figure as SVG that belongs into a page: small, without fonts, in the colours of the page's style.

Drawn in colours that stand for names, which become `var(--NAME)`: so one figure suits a light page and a dark one.
Never pass text of a file to it: matplotlib reads mathematics between dollars.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from pi_compile.report.style import COLOURS

WIDTH = 4.85
"""Inches of 72 units: at the width of a phone a unit is about a pixel."""
_NAMES = tuple(COLOURS)
_STANDS_FOR = re.compile(r"#fe01([0-9a-f]{2})")
_NUMBER = re.compile(r"-?\d+\.\d+")
_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"


def colour(name: str) -> str:
    """What matplotlib draws in where the page has the colour `name`."""
    return f"#fe01{_NAMES.index(name):02x}"


@contextmanager
def figure(height: float, rows: Sequence[float] = (1,), *, sharex: bool = False) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of `height` inches with axes below each other, and matplotlib's own defaults whatever the user's are."""
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


def svg(drawn: Figure, name: str, title: str, description: str) -> str:
    """The figure as an element for a page. `name` keeps its ids apart from those of other figures."""
    out = io.StringIO()
    drawn.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ET.fromstring(out.getvalue())  # noqa: S314  our own
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
    return _STANDS_FOR.sub(lambda found: f"var(--{_NAMES[int(found[1], 16)]})", text)


def _tidy(element: ET.Element, used: set[str], own: Callable[[str], str]) -> None:
    """No namespaces, no ids that nothing refers to, the page's font, and two decimals."""
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
