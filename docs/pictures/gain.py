"""Draw what one gains, from the figures that the pages state.

python docs/pictures/gain.py > docs/pictures/gain.svg
"""

import re
from pathlib import Path

import jinja2

DOCS = Path(__file__).parents[1]
LEFT, WIDTH, STEP, EDGES = 150, 240, 34, 72
"""Where bars begin, how long the longest is, the distance of two, and what a panel has above and below them."""


def row(page: str, begins: str) -> list[str]:
    """The cells of the first row of a table that begins so, without the first."""
    (line,) = re.findall(rf"^\| {re.escape(begins)} \| (.*) \|$", (DOCS / page).read_text(encoding="utf-8"), re.M)[:1]
    return [cell.strip() for cell in line.split("|")]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def times(begins: str) -> float:
    """How many times as fast the page on a real model says that something is."""
    return float(re.findall(r"([\d.]+) ×", row("tutorials/real-model.md", begins)[0])[0])


def panels() -> list[dict[str, object]]:
    """Title, note, place, and bars: a name, a value, its text, and a style."""
    chat = {
        "eight texts together": times("decoding eight texts"),
        "a letter again": times("a letter written again to somebody else, with drafts"),
        "a second question": times("a second question on a text of 312 tokens"),
    }
    modes, cells = ("dense", "gate", "predicted"), row("tutorials/demo.md", "FFN bytes read per token")
    nbytes = [(mode, number(cell)) for mode, cell in zip(modes, cells, strict=True)]
    rates = {clients: row("how-to/server.md", clients) for clients in ("1 client", "4 clients", "8 clients")}
    speeds = [
        (f"{clients}, {name}", number(cells[at]), cells[at], style)
        for clients, cells in rates.items()
        for name, at, style in (("llama-server", 3, "other"), ("pi-serve", 0, "ours"))
    ]
    own = EDGES + STEP * len(chat)
    return [
        {
            "title": "A published chat model, times as fast",
            "note": "SmolLM2-135M-Instruct, two cores: nox -s showcase",
            "bars": [(name, n, f"{n:g} ×", "ours") for name, n in chat.items()],
            "at": (0, 0),
        },
        {
            "title": "FFN bytes read for a token",
            "note": "the bundled model, f16: nox -s demo",
            "bars": [(mode, n, f"{n / 1e6:.2f} MB", "other" if mode == "dense" else "ours") for mode, n in nbytes],
            "at": (0, own),
        },
        {
            "title": "Tokens a second, all answers",
            "note": "1.2 B, q8, 10 % active, two cores: nox -s bench -- serve",
            "bars": speeds,
            "at": (490, 0),
        },
    ]


TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {{ height }}" role="img" aria-labelledby="title desc" \
font-family="system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="13">
  <title id="title">What one gains</title>
  <desc id="desc">{% for panel in panels %}{{ panel.title }}: \
{% for name, value, text, style in panel.bars %}{{ name }} {{ text }}{{ "; " if not loop.last }}{% endfor %}. \
{% endfor %}</desc>
  <style>
    .ink { fill: #1f2328 } .soft { fill: #59636e; font-size: 12px }
    .head { fill: #1f2328; font-weight: 600; font-size: 15px }
    .other { fill: #8c959f } .ours { fill: #218bff }
    @media (prefers-color-scheme: dark) {
      .ink, .head { fill: #e6edf3 } .soft { fill: #9198a1 } .other { fill: #6e7681 } .ours { fill: #58a6ff }
    }
  </style>
{% for panel in panels %}{% set x, top = panel.at %}{% set most = panel.bars | map(attribute=1) | max %}
  <text class="head" x="{{ x + 12 }}" y="{{ top + 24 }}">{{ panel.title }}</text>
{% for name, value, text, style in panel.bars %}{% set y = top + 44 + step * loop.index0 %}
  <text class="ink" x="{{ x + left }}" y="{{ y + 15 }}" text-anchor="end">{{ name }}</text>
{% set long = (width * value / most) | round(1) %}
  <rect class="{{ style }}" x="{{ x + left + 8 }}" y="{{ y }}" width="{{ long }}" height="22" rx="3"/>
  <text class="ink" x="{{ x + left + 16 + long }}" y="{{ y + 15 }}">{{ text }}</text>
{% endfor %}
  <text class="soft" x="{{ x + 12 }}" y="{{ top + 64 + step * panel.bars | length }}">{{ panel.note }}</text>
{% endfor %}
</svg>
"""


def main() -> None:
    found = panels()
    height = max(panel["at"][1] + EDGES + STEP * len(panel["bars"]) for panel in found)  # type: ignore[index, arg-type]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=True)
    print(environment.from_string(TEMPLATE).render(panels=found, height=height, left=LEFT, width=WIDTH, step=STEP))


if __name__ == "__main__":
    main()
