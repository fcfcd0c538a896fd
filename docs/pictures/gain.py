"""Draw the first screen's picture, and write its table, of the figures in gain.toml.

python docs/pictures/gain.py            # writes gain.svg and the table in README.md
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import jinja2

PICTURES = Path(__file__).parent
README = PICTURES.parents[1] / "README.md"
BEGIN, END = "<!-- gain: begin -->\n", "<!-- gain: end -->\n"
LEFT, WIDTH, STEP, EDGES = 250, 150, 30, 76
"""Where bars begin, how long the longest is, the distance of two, and what a panel has above and below them."""


def figures() -> dict[str, Any]:
    return tomllib.loads((PICTURES / "gain.toml").read_text(encoding="utf-8"))


def table(found: dict[str, Any]) -> str:
    """The table of README.md: a row for what a reader has, with the range of its bars."""
    lines = ["| you have | you get; × is llama.cpp's speed |", "| --- | --- |"]
    for row in found["row"]:
        bars = [bar for number in row.get("panels", []) for bar in found["panel"][number]["bars"]]
        lines.append(f"| {row['have']} | {filled(row['get'], bars)} |")
    return "\n".join(lines) + f"\n\n{found['source']}\n"


def filled(text: str, bars: list[tuple[str, float]]) -> str:
    """The text with the range of the bars that each of its braces names."""
    return re.sub(r"{(.+?)}", lambda name: span(bars, name[1]), text)


def span(bars: list[tuple[str, float]], ends: str) -> str:
    """The least and the most of the bars whose names end with one of the words."""
    values = [value for name, value in bars if name.endswith(tuple(ends.split("|")))]
    return f"{min(values):g} to {max(values):g}"


def written(page: str, found: dict[str, Any]) -> str:
    """The page with its table anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table(found)}{END}{rest.partition(END)[2]}"


TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {{ height }}" role="img" aria-labelledby="title desc" \
font-family="system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="13">
  <title id="title">Times llama.cpp's speed; the line is llama.cpp</title>
  <desc id="desc">{% for panel in panels %}{{ panel.title }} ({{ panel.note }}): \
{% for name, value in panel.bars %}{{ name }} {{ value }}{{ "; " if not loop.last }}{% endfor %}. \
{% endfor %}</desc>
  <style>
    .ink { fill: #1f2328 } .soft { fill: #59636e; font-size: 12px } .line { stroke: #59636e; stroke-width: 1.5 }
    .head { fill: #1f2328; font-weight: 600; font-size: 15px }
    .less { fill: #bc4c00 } .more { fill: #218bff }
    @media (prefers-color-scheme: dark) {
      .ink, .head { fill: #e6edf3 } .soft { fill: #9198a1 } .line { stroke: #9198a1 }
      .less { fill: #db6d28 } .more { fill: #58a6ff }
    }
  </style>
{% for panel in panels %}{% set most = panel.bars | map(attribute=1) | max %}
  <text class="head" x="{{ panel.x + 12 }}" y="{{ panel.y + 24 }}">{{ panel.title }}</text>
{% for name, value in panel.bars %}{% set y = panel.y + 44 + step * loop.index0 %}
  <text class="ink" x="{{ panel.x + left }}" y="{{ y + 15 }}" text-anchor="end">{{ name }}</text>
{% set long = (width * value / most) | round(1) %}
  <rect class="{{ "less" if value < 1 else "more" }}" x="{{ panel.x + left + 8 }}" y="{{ y }}" width="{{ long }}" \
height="20" rx="3"/>
  <text class="ink" x="{{ panel.x + left + 16 + [long, width / most] | max }}" y="{{ y + 15 }}">{{ value }} ×</text>
{% endfor %}
{% set one = (panel.x + left + 8 + width / most) | round(1) %}{% set end = panel.y + 36 + step * panel.bars | length %}
  <line class="line" x1="{{ one }}" y1="{{ panel.y + 38 }}" x2="{{ one }}" y2="{{ end }}"/>
  <text class="soft" x="{{ panel.x + 12 }}" y="{{ end + 24 }}">the line: llama.cpp · {{ panel.note }}</text>
{% endfor %}
</svg>
"""


def drawing(found: dict[str, Any]) -> str:
    """The picture: real files on the left, the others on the right, each with a line where llama.cpp is."""
    panels, ends = [], {0: 0, 480: 0}
    for panel in found["panel"]:
        x = 0 if "isa" in panel else 480
        panels.append({**panel, "x": x, "y": ends[x]})
        ends[x] += EDGES + STEP * len(panel["bars"])
    height = max(ends.values())
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=True)
    template = environment.from_string(TEMPLATE)
    return template.render(panels=panels, height=height, left=LEFT, width=WIDTH, step=STEP) + "\n"


def main() -> None:
    found = figures()
    (PICTURES / "gain.svg").write_text(drawing(found), encoding="utf-8")
    README.write_text(written(README.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
