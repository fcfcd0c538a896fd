"""The choice of rungs: one candidate for each layer, the fastest together that keep the quality budget.

By Lagrangian relaxation: Σ time_l + λ · Σ error_l is least where every layer takes its own least. As the multiplier λ
falls, layers take quicker candidates one by one, which gives a path of choices with rising error. What one costs is
nearly in proportion to the sum of its layers' errors, so a few passes of the tune text find how far along the path the
budget reaches. What is chosen is then measured on the report text. If it costs more than the budget there, it is chosen
again with less to spend, down to nothing.

The quality of a choice on a text is its perplexity, and what each layer reads and loses. The text goes through the
decoder with the choice applied at every position of every layer. It goes in batches of windows, each of which is a task
with a file of its own, and the sums of the batches are added in their order: the result is the same whoever does what.
A file's name is a digest of what it was measured of, so that nothing is measured twice. The dense model is not measured
again: its sums were counted when the text was pushed through it. Shape letters: N windows of the text, B of them at a
time, T tokens each, D model width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.files import read_arrays, write_arrays
from pi_compile.torch_model import SparseFfn
from pi_compile.torch_model import decoder as td
from pi_compile.training.candidates import Candidate
from pi_compile.training.samples import LayerSums, PushedText
from pi_compile.workers import WorkFolder
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.errors import NotMetError


@dataclass(frozen=True, eq=False)
class Quality:
    """One choice of rungs on one text."""

    layers: list[LayerSums]
    losses: torch.Tensor
    """(windows,) mean of −log p of the next token."""
    divergence: float
    """Mean Kullback–Leibler divergence from the next-token distributions of the dense model, in nats.

    To first order it is the rise of the mean log-perplexity. It is never negative, and does not depend on the luck of
    which words the text happens to hold: it ranks choices whose differences of perplexity are noise.
    """

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))

    def increase_over(self, dense: "Quality") -> tuple[float, float]:
        """The relative increase of perplexity, and its standard error over the windows (0 for a single one)."""
        change = self.losses - dense.losses
        error = float(change.std() / math.sqrt(len(change))) if len(change) > 1 else 0.0
        return math.expm1(float(change.mean())), error


@dataclass(frozen=True)
class MeasuredText:
    """A text on which choices of rungs are measured, by all workers together, when it went through the dense model."""

    text: PushedText
    work: WorkFolder

    def measure_dense(self) -> Quality:
        """The quality of the dense model, from its sums and its last states."""
        layers = range(self.text.checkpoint.decoder.n_layers)
        return self._shared("dense", self._measure_dense, lambda _stored: [self.text.sums(n) for n in layers])

    def measure(self, ffn_of: Callable[[int], SparseFfn], choice: str) -> Quality:
        """Push the text through a choice of rungs, which has a name of its own; `ffn_of` gives that of a layer."""
        return self._shared(choice, partial(self._measure, ffn_of), _sums_of_batches)

    def _shared(
        self,
        choice: str,
        measure: Callable[[Mapping[int, str]], None],
        layers: Callable[[Sequence[Mapping[str, npt.NDArray[Any]]]], list[LayerSums]],
    ) -> Quality:
        """Have all batches measured, and put together what was found."""
        names = [f"{self.text.name}-{choice}-{n}.npz" for n in self.text.batches]
        self.work.run_shares(names, lambda some: measure({names.index(name): name for name in some}))
        stored = [read_arrays(self.work.path / name) for name in names]
        tokens = self.text.ids_NT.shape[0] * (self.text.ids_NT.shape[1] - 1)
        return Quality(
            layers=layers(stored),
            losses=torch.from_numpy(np.concatenate([s["losses"] for s in stored])),
            divergence=sum(float(s["divergence"]) for s in stored) / tokens,
        )

    def _measure_dense(self, batches: Mapping[int, str]) -> None:
        d = self.text.checkpoint.decoder
        with torch.inference_mode():
            global_w = td.global_weights(self.text.checkpoint, self.text.device)
            for n, name in batches.items():
                logp = _log_probabilities(d, global_w, self.text.dense_states(n))
                found = {"losses": _losses(logp, self.text.ids(n)), "divergence": np.zeros(())}
                write_arrays(self.work.path / name, found)

    def _measure(self, ffn_of: Callable[[int], SparseFfn], batches: Mapping[int, str]) -> None:
        """Push some batches through all layers, with one layer's weights in memory, and write the file of each."""
        checkpoint, device = self.text.checkpoint, self.text.device
        d = checkpoint.decoder
        with torch.inference_mode():
            global_w = td.global_weights(checkpoint, device)
            states: Sequence[torch.Tensor] = [td.embed(d, global_w, self.text.ids(n).to(device)) for n in batches]
            sums = [[LayerSums.over(d.neurons) for _ in range(d.n_layers)] for _ in batches]
            run_rung = partial(_run_rung, d, lru_cache(1)(ffn_of), sums)
            for layer, after in enumerate(td.layers(d, td.stored_layers(checkpoint, device), states, run_rung)):
                for x, batch_sums in zip(after, sums, strict=True):
                    batch_sums[layer].state += float(x.square().sum())
                states = list(after)
            for (n, name), x, batch_sums in zip(batches.items(), states, sums, strict=True):
                logp = _log_probabilities(d, global_w, x)
                dense = _log_probabilities(d, global_w, self.text.dense_states(n))
                divergence = np.array(float(F.kl_div(logp, dense, log_target=True, reduction="sum")))
                found = {"losses": _losses(logp, self.text.ids(n)), "divergence": divergence}
                write_arrays(self.work.path / name, {**LayerSums.pack(batch_sums), **found})


def _sums_of_batches(stored: Sequence[Mapping[str, npt.NDArray[Any]]]) -> list[LayerSums]:
    """The sums of each layer, of which a file has all layers for one batch."""
    return [reduce(add, sums) for sums in zip(*map(LayerSums.unpack, stored), strict=True)]


def _log_probabilities(d: Decoder, global_w: td.NamedTensors, x: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all tokens but the first of each window, (B, T − 1, vocabulary)."""
    return td.logits(d, global_w, x)[:, :-1].log_softmax(-1)


def _losses(logp: torch.Tensor, ids_BT: torch.Tensor) -> npt.NDArray[Any]:
    """Mean of −log p of the next token in each window, (B,)."""
    next_ids = ids_BT[:, 1:].to(logp.device)
    return F.nll_loss(logp.transpose(1, 2), next_ids, reduction="none").double().mean(1).numpy(force=True)


def _run_rung(
    d: Decoder, ffn_of: Callable[[int], SparseFfn], sums: Sequence[Sequence[LayerSums]],
    layer: int, batch: int, w: td.NamedTensors, inputs: torch.Tensor, h: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The neuron values that a layer's rung keeps; adds to the sums."""
    read, kept = ffn_of(layer).apply(d, w, inputs, h)
    sums[batch][layer].add(h, kept, read, w)
    return kept


PASSES, CLOSE = 4, 0.85
"""Most choices that are measured on the tune text, for each format of the predictors, and the share of the budget that
is aimed at after one that cost too much."""

Time = Callable[[Candidate], float]
LayerCandidates = Sequence[Sequence[Candidate]]
"""Candidates of each layer."""
Choice = tuple[Candidate, ...]
Measure = Callable[[Sequence[Candidate]], tuple[float, Quality]]
"""What a choice is expected to cost on other text, and its quality on the tune text."""


@dataclass(frozen=True, eq=False)
class RungChoice:
    """A candidate for each layer, what they are expected to cost, and their quality on the tune text."""

    candidates: Choice
    predictor_format: str
    cost: float
    tune: Quality


def choose_rungs(
    layers: LayerCandidates,
    most: float,
    *,
    formats: Sequence[str],
    time: Time,
    measure: Measure,
    on_pass: Callable[[], None],
) -> RungChoice:
    """The fastest choice that is expected to cost at most `most`, with all predictors in one format.

    Where no choice keeps that, the one with the least error. `on_pass` is called after each of at most `PASSES`
    measurements of each format.
    """
    if not any(c.format for candidates in layers for c in candidates):
        formats = formats[:1]
    found = [_choose_in_format(layers, fmt, most, time, measure, on_pass) for fmt in formats]
    keeping = [choice for choice in found if choice.cost <= most]
    if not keeping:
        return min(found, key=lambda choice: choice.cost)
    return min(keeping, key=lambda choice: sum(map(time, choice.candidates)))


def _choose_in_format(
    layers: LayerCandidates,
    fmt: str,
    most: float,
    time: Time,
    measure: Measure,
    on_pass: Callable[[], None],
) -> RungChoice:
    path = _path([[c for c in candidates if c.format in (None, fmt)] for candidates in layers], time)
    found: list[RungChoice] = []
    cost_of_error, aim = 1.0, most
    for n in range(PASSES):
        # Without a choice that keeps the budget the last pass is for the least error: no other keeps it better.
        hopeful = most > 0 and (n < PASSES - 1 or any(c.cost <= most for c in found))
        within = [c for c in path if cost_of_error * _error(c) <= aim] if hopeful else []
        chosen = within[-1] if within else path[0]
        if any(chosen == c.candidates for c in found):
            break
        found.append(RungChoice(chosen, fmt, *measure(chosen)))
        on_pass()
        if not hopeful:
            break
        aim, cost = most, found[-1].cost
        if cost > most:
            aim, path = CLOSE * most, path[: path.index(chosen)] or path[:1]  # what errs more would not keep it either
        if _error(chosen) > 0:
            cost_of_error = cost / _error(chosen)
    keeping = [c for c in found if c.cost <= most]
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
