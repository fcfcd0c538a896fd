"""The choice of rungs: one candidate for each layer, the fastest together that keep the quality budget.

By Lagrangian relaxation: Σ time_l + λ · Σ error_l is least where every layer takes its own least, so there is one
number to search, the multiplier λ. It is raised until the model's divergence on the tune text keeps the budget. What is
chosen is then measured on the report text. If it costs more than the budget there, it is chosen again with less to
spend, down to nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pi_compile.training.candidates import Candidate
from pi_compile.training.quality import Quality
from pi_runtime.errors import NotMetError

LOWEST_EXPONENT, HIGHEST_EXPONENT, BISECTIONS = -1.0, 8.0, 8
"""The multiplier is searched between these powers of ten of the mean time of a layer, by so many bisections."""

Time = Callable[[Candidate], float]
LayerCandidates = Sequence[Sequence[Candidate]]
"""Candidates of each layer."""


@dataclass(frozen=True, eq=False)
class RungChoice:
    """A candidate for each layer, and their quality on the tune text."""

    candidates: tuple[Candidate, ...]
    tune: Quality
    predictor_format: str


def choose_rungs(
    layers: LayerCandidates,
    most: float,
    *,
    formats: Sequence[str],
    time: Time,
    measure: Callable[[Sequence[Candidate]], Quality],
    on_pass: Callable[[], None],
) -> RungChoice:
    """The fastest choice whose divergence on the tune text is at most `most`, with all predictors in one format.

    Where no choice keeps that, the one with the least divergence. `on_pass` is called `BISECTIONS` times for each
    format.
    """
    if not any(c.format for candidates in layers for c in candidates):
        formats = formats[:1]
    found = [_choose_in_format(layers, fmt, most, time, measure, on_pass) for fmt in formats]
    keeping = [choice for choice in found if choice.tune.divergence <= most]
    if not keeping:
        return min(found, key=lambda choice: choice.tune.divergence)
    return min(keeping, key=lambda choice: sum(map(time, choice.candidates)))


def _choose_in_format(
    layers: LayerCandidates,
    fmt: str,
    most: float,
    time: Time,
    measure: Callable[[Sequence[Candidate]], Quality],
    on_pass: Callable[[], None],
) -> RungChoice:
    layers = [[c for c in candidates if c.format in (None, fmt)] for candidates in layers]
    mean_time = max(sum(min(map(time, candidates)) for candidates in layers) / len(layers), 1e-9)
    # No multiplier gives a better choice for quality than the least error in every layer.
    chosen = [min(candidates, key=lambda c: (c.error, time(c))) for candidates in layers]
    quality = last = measure(chosen)
    measured, low, high = chosen, LOWEST_EXPONENT, HIGHEST_EXPONENT
    for _ in range(BISECTIONS if 0 < most >= quality.divergence else 0):
        middle = (low + high) / 2
        relaxed = [_least(candidates, time, mean_time, 10**middle) for candidates in layers]
        if relaxed != measured:
            measured, last = relaxed, measure(relaxed)
        if last.divergence <= most:
            chosen, quality, high = relaxed, last, middle
        else:
            low = middle
        on_pass()
    return RungChoice(tuple(chosen), quality, fmt)


def _least(candidates: Sequence[Candidate], time: Time, mean_time: float, multiplier: float) -> Candidate:
    return min(candidates, key=lambda c: time(c) / mean_time + multiplier * c.error)


def not_met(choice: RungChoice, cost: float, budget: float) -> NotMetError:
    """The error for a budget that no allowed choice keeps."""
    errors = [c.error for c in choice.candidates]
    worst = sorted(range(len(errors)), key=lambda n: -errors[n])[:3]
    names = ", ".join(f"{n} ({choice.candidates[n].layer.rung}, error {errors[n]:.1e})" for n in worst)
    return NotMetError(
        "the quality budget is out of reach with the rungs that [train] rungs allows",
        expected=f"[quality] perplexity_increase = {budget:g} on the report text",
        found=f"{cost:.2e} with the least that each layer can lose; most is lost in layers {names}",
        remedy="allow gate or dense in [train] rungs, or raise [quality] perplexity_increase",
    )
