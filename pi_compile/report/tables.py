"""The report's tables: bytes by part, budgets, layers."""

from collections.abc import Iterable, Sequence
from html import escape

from pi_compile.cost_model import CPU
from pi_compile.report.explanation import Explanation, tokens_per_s
from pi_compile.report.quantities import digits, duration_unit, memory, percent
from pi_compile.report.token_figures import PART_COLOURS, WORDS

_SIDES = {True: "CPU", False: "GPU"}


def table(title: str, head: Sequence[str], rows: Iterable[str], foot: Iterable[str] = ()) -> str:
    """A table in a box of its own that scrolls where the page is narrow."""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    below = "".join(foot)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody>"
        f"{f'<tfoot>{below}</tfoot>' if below else ''}</table></div>"
    )


def row(name: str, cells: Iterable[str], *, asked: bool = False) -> str:
    """A row of a table; its cells are HTML."""
    mark = ' class="asked" aria-current="true"' if asked else ""
    return f'<tr{mark}><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def number(value: int, text: str) -> str:
    """A cell with its exact value for machines."""
    return f'<data value="{value}">{escape(text)}</data>'


def part_table(e: Explanation) -> str:
    """Bytes of each part in both memories, and their share of the budget."""
    p = e.placement
    gpu, ram = p.gpu_bytes, p.ram_bytes
    sides = [(gpu, p.vram), (ram, p.ram)] if p.vram else [(ram, p.ram)]
    names = [(side, f"of {side} budget") for side in (("GPU", "RAM") if p.vram else ("RAM",))]
    rows = [
        row(WORDS.get(part, part), (cell for held, budget in sides for cell in _share(held[part], budget)))
        for part in PART_COLOURS
    ]
    totals = [(sum(held.values()), budget) for held, budget in sides]
    foot = [
        row("all", (cell for used, budget in totals for cell in _share(used, budget))),
        row("budget", (cell for _, budget in totals for cell in _share(budget, budget))),
        row("free", (cell for used, budget in totals for cell in _share(budget - used, budget))),
    ]
    return table("Bytes by part", ["part", *(name for pair in names for name in pair)], rows, foot)


def _share(nbytes: int, budget: int) -> tuple[str, str]:
    return number(nbytes, memory(nbytes)), percent(nbytes / budget) if nbytes else "–"


def budget_table(e: Explanation) -> str:
    """The speeds for each budget; the one that is explained is marked."""
    gpu = bool(e.spec.vram)
    head = ["decode, tokens/s", "prefill, tokens/s", "PowerInfer’s rule", "whole layers, dense", "RAM used"]
    head = ["GPU budget" if gpu else "RAM budget", *head]
    head += ["GPU used", "attention on GPU", "activations on GPU"] if gpu else []
    rows = []
    for b in e.budgets:
        p = b.placement
        rates = [digits(b.powerinfer_tokens_per_s), digits(b.layer_split_tokens_per_s)]
        if p is None:
            cells = ["does not fit", "–", *rates, *["–"] * (4 if gpu else 1)]
        else:
            used_gpu, used_ram = (sum(held.values()) for held in (p.gpu_bytes, p.ram_bytes))
            layers = f"{len(p.assignment.sides) - p.assignment.sides.count(CPU)} of {len(p.assignment.sides)} layers"
            on_gpu = [memory(used_gpu), layers, percent(p.activations_on_gpu)] if gpu else []
            cells = [digits(tokens_per_s(p)), digits(b.prefill_tokens_per_s or 0), *rates, memory(used_ram), *on_gpu]
        rows.append(row((memory(b.vram) if b.vram else "none") if gpu else memory(b.ram), cells, asked=b.asked))
    return table("What other budgets would give", head, rows)


def layer_table(e: Explanation) -> str:
    """One row a layer, with the predicted times; they sum to the time of a token."""
    time, assignment = e.placement.time, e.placement.assignment
    scale, unit = duration_unit(max(layer.total for layer in time.layers))
    head = ["layer", "attention on", "neurons on GPU", "share", "of activations", "density", "rung", "rank"]
    head += [f"{name}, {unit}" for name in ("attention", "predictor", "FFN GPU", "FFN CPU", "hand-over", "layer")]

    def shown(ps: int) -> str:
        return number(ps, digits(ps / scale) if ps else "–")

    rows = []
    for n, (how, layer) in enumerate(zip(e.work.layers, time.layers, strict=True)):
        cut = assignment.cuts[n]
        cells = [
            _SIDES[assignment.sides[n] == CPU],
            f"{cut:,}",
            percent(cut / e.work.decoder.neurons),
            percent(float(e.activations_on_gpu[n])),
            percent(float(e.densities[n])),
            escape(how.rung),
            "–" if how.rank is None else f"{how.rank:,}",
        ]
        times = (layer.attention, layer.predictor, layer.gpu, layer.cpu, layer.handover + layer.crossing, layer.total)
        rows.append(row(str(n), [*cells, *map(shown, times)]))
    blank = [""] * (len(head) - 2)
    foot = [
        row("embedding and head", [*blank, shown(time.embedding + time.head)]),
        row("a token", [*blank, shown(time.total)]),
    ]
    return table("Layers", head, rows, foot)
