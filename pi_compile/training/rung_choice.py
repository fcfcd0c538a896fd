"""The choice of rungs: one candidate for each layer, the fastest together that keep the quality budget.

By Lagrangian relaxation: Σ time_l + λ · Σ error_l is least where every layer takes its own least. As the multiplier λ
falls, layers take quicker candidates one by one, which gives a path of choices with rising error. The divergence of the
model is nearly in proportion to the sum of its layers' errors, so a few passes of the tune text find how far along the
path the budget reaches. What is chosen is then measured on the report text. If it costs more than the budget there, it
is chosen again with less to spend, down to nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pi_compile.training.candidates import Candidate
from pi_compile.training.quality import Quality
from pi_runtime.errors import NotMetError

PASSES = 3
"""Most choices that are measured on the tune text, for each format of the predictors."""

Time = Callable[[Candidate], float]
LayerCandidates = Sequence[Sequence[Candidate]]
"""Candidates of each layer."""
Choice = tuple[Candidate, ...]


@dataclass(frozen=True, eq=False)
class RungChoice:
    """A candidate for each layer, and their quality on the tune text."""

    candidates: Choice
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

    Where no choice keeps that, the one with the least error. `on_pass` is called after each of at most `PASSES`
    measurements of each format.
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
    path = _path([[c for c in candidates if c.format in (None, fmt)] for candidates in layers], time)
    found: list[RungChoice] = []
    divergence_of_error = 1.0
    for n in range(PASSES):
        # Without a choice that keeps the budget the last pass is for the least error: no other keeps it better.
        hopeful = most > 0 and (n < PASSES - 1 or any(c.tune.divergence <= most for c in found))
        within = [c for c in path if divergence_of_error * _error(c) <= most] if hopeful else []
        chosen = within[-1] if within else path[0]
        if any(chosen == c.candidates for c in found):
            break
        found.append(RungChoice(chosen, measure(chosen), fmt))
        on_pass()
        if not hopeful:
            break
        if _error(chosen) > 0:
            divergence_of_error = found[-1].tune.divergence / _error(chosen)
    keeping = [c for c in found if c.tune.divergence <= most]
    return min(keeping, key=lambda c: sum(map(time, c.candidates))) if keeping else found[-1]


def _error(choice: Choice) -> float:
    return math.fsum(c.error for c in choice)


def _path(layers: LayerCandidates, time: Time) -> list[Choice]:
    """The choices that are best for some multiplier, from the least error to the least time."""
    hulls = [_hull(candidates, time) for candidates in layers]
    steps = [
        ((time(before) - time(after)) / (after.error - before.error), n, after)
        for n, hull in enumerate(hulls)
        for before, after in pairwise(hull)
    ]
    chosen = [hull[0] for hull in hulls]
    path = [tuple(chosen)]
    # Along a hull the time that an error saves falls, so a layer's steps stay in their order.
    for _, n, after in sorted(steps, key=lambda step: -step[0]):
        chosen[n] = after
        path.append(tuple(chosen))
    return path


def _hull(candidates: Sequence[Candidate], time: Time) -> list[Candidate]:
    """The lower convex hull of a layer's candidates over error and time, from the least error to the least time."""
    hull: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.error, time(c))):
        if hull and time(c) >= time(hull[-1]):
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], c, time):
            hull.pop()
        hull.append(c)
    return hull


def _above(a: Candidate, b: Candidate, c: Candidate, time: Time) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (time(b) - time(a)) * (c.error - a.error) >= (time(c) - time(a)) * (b.error - a.error)


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
