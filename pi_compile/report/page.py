"""One placement explained on one HTML page that needs nothing else: no script, no font, no network.

The page is the template `templates/page.html.jinja`. The same explanation gives the same bytes. Everything that comes
from a file is escaped, and is never part of a figure.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pi_compile.cost_model import CPU
from pi_compile.report.drawing import COLOURS, NBSP, digits, duration, duration_unit, memory, percent, span
from pi_compile.report.explanation import Budget, Explanation, busy, tokens_per_s
from pi_compile.report.figures import (
    PARTS_SHOWN,
    balance_figure,
    budget_figure,
    curve_figure,
    cut_figure,
    layer_figure,
    memory_figure,
    ram_figure,
    rank_figure,
    token_figure,
    word,
)
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.sizes import parameters

PAGE_MARK = '<meta name="generator" content="pi-compile report">'
"""A line among the first bytes of a page."""


def report_page(e: Explanation) -> str:
    """The page as HTML."""
    return rendered(
        "pi_compile.report",
        "page.html.jinja",
        (digits, duration, duration_unit, memory, percent, tokens_per_s, word),
        e=e,
        busy=busy(e.placement),
        CPU=CPU,
        title=f"{_name(e)} on {e.spec.machine.name}",
        answer=_answer(e),
        rate=_rate(e),
        token=token_figure(e),
        memory_use=memory_figure(e),
        budgets=budget_figure(e),
        ram_budgets=ram_figure(e),
        cuts=cut_figure(e),
        curves=curve_figure(e),
        layers=layer_figure(e),
        balance=balance_figure(e),
        ranks=rank_figure(e),
        rank_sentence=_rank_sentence(e),
        rungs=_rungs(e),
        parameters=parameters(e.spec.model.decoder),
        parts=PARTS_SHOWN,
        page_mark=Markup(PAGE_MARK),  # noqa: S704  a constant
    )


def rendered(package: str, template: str, filters: Iterable[Callable[..., Any]], **values: Any) -> str:
    """A page of a package, in the style of the report's."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("pi_compile.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {f.__name__: f for f in filters}
    return environment.get_template(template).render(colours=COLOURS, version=version("pi-toolchain"), **values)


def answer_of(e: Explanation) -> str:
    """The predicted result in plain words."""
    return _answer(e).replace(NBSP, " ")


def _name(e: Explanation) -> str:
    """The model's name; for a path outside the working folder, its last two parts."""
    path = Path(e.spec.model.name)
    return "/".join(path.parts[-2:]) if path.is_absolute() or path.parts[:1] == ("..",) else str(path)


def _answer(e: Explanation) -> str:
    """The answer with numbers and their units on one line."""
    time, p = e.placement.time, e.placement
    part, ps = max(time.parts.items(), key=lambda item: item[1])
    room = f"{memory(p.ram)} of RAM" if not p.vram else f"{memory(p.vram)} of GPU memory and {memory(p.ram)} of RAM"
    words = [
        f"It fits into {room}: {_rate(e)} are predicted, "
        f"{duration(time.total)} each. {percent(ps / time.total)} of that is {word(part)}."
    ]
    if p.vram:
        words += [_other(e, b) for share in (125, 75) for b in e.budgets if b.vram == e.spec.vram * share // 100]
        words += ["Whole layers without skipping, as others place them, would give"]
        words += [f"{digits(e.asked.layer_split_tokens_per_s)}."]
    return " ".join(words)


def _rate(e: Explanation) -> str:
    return f"{digits(tokens_per_s(e.placement))} tokens a second"


def _other(e: Explanation, other: Budget) -> str:
    """What a budget near the one asked for would give."""
    name = "A quarter more GPU memory" if other.vram > e.spec.vram else "A quarter less"
    if other.placement is None:
        return f"{name} would not fit."
    gain = tokens_per_s(other.placement) / tokens_per_s(e.placement) - 1
    if abs(gain) < 0.0005:
        return f"{name} would change nothing."
    change = f"{'+' if gain > 0 else '−'}{percent(abs(gain))}"
    return f"{name} would give {digits(tokens_per_s(other.placement))} ({change})."


def _rank_sentence(e: Explanation) -> str:
    """A sentence in place of the figure of ranks where all ranks are equal, else empty."""
    ranks = {how.rank for how in e.work.layers}
    if len(ranks) > 1 or None in ranks:
        return ""
    how = "as trained" if e.trained else "by rule, because none is trained"
    shown = span(percent(e.densities.min()), percent(e.densities.max()))
    return f"Predictors are of rank {ranks.pop()} in every layer, {how}, at a density of {shown}."


def _rungs(e: Explanation) -> str:
    """How many layers are on each rung, and the ranks of their predictors."""
    counts = Counter(how.rung for how in e.work.layers)
    ranks = [how.rank for how in e.work.layers if how.rank is not None]
    text = ", ".join(f"{counts[rung]} layers {rung}" for rung in RUNGS if counts[rung])
    how = "as trained" if e.trained else "by rule"
    return f"{text}; predictors of rank {span(str(min(ranks)), str(max(ranks)))}, {how}" if ranks else text
