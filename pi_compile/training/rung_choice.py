"""The choice: one way for each layer, the quickest together that keep the quality budget.

Σ time_l + price · Σ error_l is least where every layer takes its own least, so one number, the price of an error, is
raised until the model's divergence on the tune text keeps the budget. What is chosen is then measured on the report
text, and if it costs more than the budget there, chosen again with less to spend, down to nothing: the gate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pi_compile.training.candidates import Candidate
from pi_compile.training.quality import Verdict
from pi_runtime.errors import NotMetError

TUNE_SHARES = (0.25, 0.0625, 0.0)
"""Parts of the quality budget that may be spent on the tune text, each tried if the report text refuses the one before:
other text costs more. 0 is the least error in every layer."""
LOWEST_PRICE, HIGHEST_PRICE, PRICES = -1.0, 8.0, 8
"""The price of an error is searched between these powers of ten of the exact time, in so many halvings."""

Time = Callable[[Candidate], float]
Options = Sequence[Sequence[Candidate]]


@dataclass(frozen=True, eq=False)
class Choice:
    """A candidate for each layer, and what the tune text says of them."""

    candidates: tuple[Candidate, ...]
    tune: Verdict
    format: str
    """Of its predictors."""


def choose(
    options: Options,
    most: float,
    *,
    formats: Sequence[str],
    time: Time,
    judge: Callable[[Sequence[Candidate]], Verdict],
    stepped: Callable[[], None],
) -> Choice:
    """The quickest choice whose divergence on the tune text is at most `most`, with all predictors in one format.

    Where none is, the one that errs least. `stepped` is called `PRICES` times for each format.
    """
    if not any(c.format for layer in options for c in layer):
        formats = formats[:1]
    found = [_in_format(options, fmt, most, time, judge, stepped) for fmt in formats]
    keeps = [choice for choice in found if choice.tune.divergence <= most]
    if not keeps:
        return min(found, key=lambda choice: choice.tune.divergence)
    return min(keeps, key=lambda choice: sum(map(time, choice.candidates)))


def _in_format(
    options: Options,
    fmt: str,
    most: float,
    time: Time,
    judge: Callable[[Sequence[Candidate]], Verdict],
    stepped: Callable[[], None],
) -> Choice:
    options = [[c for c in layer if c.format in (None, fmt)] for layer in options]
    unit = max(sum(min(time(c) for c in layer) for layer in options) / len(options), 1e-9)
    # At no price is there a better choice for quality than the least error in every layer.
    chosen = [min(layer, key=lambda c: (c.error, time(c))) for layer in options]
    verdict = last = judge(chosen)
    judged, low, high = chosen, LOWEST_PRICE, HIGHEST_PRICE
    for _ in range(PRICES if 0 < most >= verdict.divergence else 0):
        price = 10 ** ((low + high) / 2)
        cheaper = [_cheapest(layer, time, unit, price) for layer in options]
        if cheaper != judged:
            judged, last = cheaper, judge(cheaper)
        if last.divergence <= most:
            chosen, verdict, high = cheaper, last, (low + high) / 2
        else:
            low = (low + high) / 2
        stepped()
    return Choice(tuple(chosen), verdict, fmt)


def _cheapest(layer: Sequence[Candidate], time: Time, unit: float, price: float) -> Candidate:
    return min(layer, key=lambda c: time(c) / unit + price * c.error)


def not_met(choice: Choice, cost: float, budget: float) -> NotMetError:
    """The error for a budget that no allowed choice keeps."""
    errors = [c.error for c in choice.candidates]
    worst = sorted(range(len(errors)), key=lambda n: -errors[n])[:3]
    listed = ", ".join(f"{n} ({choice.candidates[n].rung}, error {errors[n]:.1e})" for n in worst)
    return NotMetError(
        "the quality budget is out of reach with the rungs that [train] rungs allows",
        expected=f"[quality] perplexity_increase = {budget:g} on the report text",
        found=f"{cost:.2e} with the least that each layer can lose; most is lost in layers {listed}",
        remedy="allow gate or dense in [train] rungs, or raise [quality] perplexity_increase",
    )
