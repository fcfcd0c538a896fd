"""A matplotlib figure as a picture of its own, in the colours of a light page, with its legend below it."""

import io
from collections.abc import Iterable

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pi_compile.report.colours import COLOURS
from pi_compile.report.svg import colour

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
