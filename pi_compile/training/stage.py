"""Train: a rung for each layer, with a predictor where one pays, the fastest under one quality budget.

For each layer, its FFN inputs on the fit and tune texts are computed, and candidates are found (`candidates`). Then one
candidate is chosen for each layer, by predicted time on the recipe's processor (`rung_choice`). The reported figures
are measured on a third text, and the budget must hold there too.

Any number of workers share the tasks: the candidates of a layer, a batch of windows on its way through a layer, and a
batch on its way through a choice. All workers come to the same choice, each by itself, from what all have measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.checkpoint import Checkpoint
from pi_compile.files import json_digest
from pi_compile.results import ActivationProfile, Matrices, PredictorSet, PredictorsOnDisk
from pi_compile.torch_model import ResidentLayers, SparseFfn, computing_with
from pi_compile.torch_model import decoder as td
from pi_compile.training.candidates import Candidate, TrainSpec, searches_for
from pi_compile.training.layer_search import LayerSearch
from pi_compile.training.rung_choice import LayerCandidates, MeasuredText, Quality, RungChoice, choose_rungs, not_met
from pi_compile.training.samples import LayerSums, PushedText
from pi_compile.training.work_estimate import ProgressMeter, TrainingWork
from pi_compile.workers import WorkFolder
from pi_runtime.artifact.rungs import DENSE, RUNGS
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import FfnBytes
from pi_runtime.errors import NotMetError

LUCK, UNLIKE = 1.28, 0.1
"""Standard errors that one of ten means lies beyond, and how far apart what one choice costs on texts of a kind is."""
REFUSED_FRACTIONS = (1.0, 0.25, 0.0)
"""Shares of the budget that are spent, the next where the report text refuses a choice; 0: least error everywhere."""

Tokens = npt.NDArray[np.integer]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Three disjoint token streams."""

    fit: Tokens
    tune: Tokens
    report: Tokens


def training_work(checkpoint: Checkpoint, profile: ActivationProfile, texts: Texts, spec: TrainSpec) -> TrainingWork:
    """The work of a training, to estimate its time from."""
    tokens = (len(texts.fit), len(texts.tune), len(texts.report))
    return TrainingWork.of(checkpoint.decoder, spec, float(profile.density().mean()), *tokens)


def train_predictors(
    checkpoint: Checkpoint,
    profile: ActivationProfile,
    texts: Texts,
    spec: TrainSpec,
    *,
    work: WorkFolder,
    inputs: str,
    progress: Progress,
) -> PredictorSet:
    """Train predictors, choose rungs and report their quality, with all workers that have the same folder to work in.

    What an earlier run with the same `inputs` left there is reused. Predictors are read from the folder when they are
    needed. Raises NotMetError if the allowed rungs cannot keep the quality budget.
    """
    meter = ProgressMeter(training_work(checkpoint, profile, texts, spec), progress)
    run = _Training(checkpoint, profile, texts, spec, work, meter, ResidentLayers(checkpoint, spec.device))
    with computing_with(spec.threads):
        run.find_candidates()
        choice, report = run.choose()
    increase, error = report.increase_over(run.dense_report)
    perplexity = {
        "tune_dense": run.dense_tune.perplexity,
        "tune": choice.tune.perplexity,
        "tune_divergence": choice.tune.divergence,
        "report_dense": run.dense_report.perplexity,
        "report": report.perplexity,
        "report_divergence": report.divergence,
        "increase": increase,
        "standard_error": error,
    }
    neuron = run.ffn_bytes(choice.predictor_format)
    layers = [c.layer for c in choice.candidates]
    meter.end()
    return PredictorSet(
        rows=tuple(s.row(neuron, spec.processor, layer) for s, layer in zip(report.layers, layers, strict=True)),
        predictors=PredictorsOnDisk(len(layers), lambda n: run.predictor(n, choice.candidates[n])),
        predictor_format=choice.predictor_format,
        counts=tuple(_counts(s, layer) for s, layer in zip(choice.tune.layers, layers, strict=True)),
        counted_tokens=choice.tune.layers[0].tokens,
        perplexity=perplexity,
        inputs=inputs,
    )


def _counts(sums: LayerSums, layer: Layer) -> npt.NDArray[np.uint64] | None:
    """Tokens for which each neuron fired, on a rung that decides by the activation itself; None on other rungs."""
    return None if layer.kind.exact or layer.kind.picks else sums.fired.numpy().astype(np.uint64)


@dataclass(frozen=True)
class _Training:
    """One training, and what it has found so far."""

    checkpoint: Checkpoint
    profile: ActivationProfile
    texts: Texts
    spec: TrainSpec
    work: WorkFolder
    meter: ProgressMeter
    resident: ResidentLayers
    found: dict[int, list[Candidate]] = field(default_factory=dict)

    def ffn_bytes(self, predictor_format: str) -> FfnBytes:
        return FfnBytes(self.checkpoint.decoder, self.spec.ffn_format, predictor_format)

    def windows(self, tokens: Tokens) -> torch.Tensor:
        return td.windows(tokens, self.checkpoint.decoder.within_context(self.spec.window))

    # Layer by layer.

    @cached_property
    def searches(self) -> list[LayerSearch]:
        """The search of each layer; none where no rung needs one."""
        if not searches_for(self.spec.rungs, self.checkpoint.decoder):
            return []
        density, top_share = self.profile.density(), self.profile.cumulative_curve(5)[:, 1]
        return [
            LayerSearch(
                n=n,
                d=self.checkpoint.decoder,
                density=float(density[n]),
                top_share=float(top_share[n]),
                resident=self.resident,
                fit=self.fit,
                tune=self.tune,
                spec=self.spec,
                folder=self.work.path,
                is_split=self.meter.work.splits,
                on_step=self.meter.step_done,
            )
            for n in self.checkpoint.decoder.ffn_layers
        ]

    @cached_property
    def fit(self) -> PushedText:
        return self._pushed("fit", keeps_inputs=True)

    @cached_property
    def tune(self) -> PushedText:
        """The part of the tune text on which rungs are chosen."""
        searches = searches_for(self.spec.rungs, self.checkpoint.decoder)
        return self._pushed("tune", slice(self._chosen_by), keeps_inputs=bool(searches), counts=True)

    @cached_property
    def check(self) -> PushedText:
        """The rest of the tune text, which says how much more a choice costs on text it was not made for."""
        return self._pushed("tune", slice(-self._checked_by, None), "check", counts=True)

    @property
    def _checked_by(self) -> int:
        """Windows of the tune text by which a choice is corrected: a quarter; where there is one it does both."""
        return max(1, len(self.windows(self.texts.tune)) // 4)

    @property
    def _chosen_by(self) -> int:
        """Windows of the tune text by which rungs are chosen."""
        return max(1, len(self.windows(self.texts.tune)) - self._checked_by)

    @cached_property
    def report(self) -> PushedText:
        return self._pushed("report", counts=True)

    def _pushed(self, text: str, part: slice = slice(None), name: str = "", **keeps: bool) -> PushedText:
        ids_NT, name = self.windows(getattr(self.texts, text))[part], name or text
        return PushedText(self.checkpoint, self.resident, ids_NT, name, self.work.path, self.spec.device, **keeps)

    def find_candidates(self) -> None:
        """Push the texts through the dense model, and have the candidates of all layers found.

        A layer's search is preferred to pushing text on. The report text goes first: then a single worker needs the
        layer no more when it has searched.
        """
        texts = [self.report, self.check, self.tune, *([self.fit] if self.searches else [])]
        tasks: dict[str, Callable[[], None]] = {}
        needs: dict[str, list[str]] = {}
        for search in self.searches:
            tasks |= search.tasks()
            needs |= search.needs()
        for n in range(self.checkpoint.decoder.n_layers):
            for text in texts:
                tasks |= text.tasks(n)
                needs |= text.needs(n)
        # A layer is done when its search is; without searches, when the text is through it.
        layers = [set(search.tasks()) for search in self.searches] or [
            set(self.tune.tasks(n)) for n in range(self.checkpoint.decoder.n_layers)
        ]
        self.work.run(
            tasks, needs, lambda done: self.meter.layers_done(sum(len(layer & done) / len(layer) for layer in layers))
        )
        self.resident.weights(range(0))  # frees those of the last layer
        self.found.update({search.n: search.candidates() for search in self.searches})

    # The choice.

    @cached_property
    def dense_tune(self) -> Quality:
        return self._measured(self.tune).measure_dense()

    @cached_property
    def dense_check(self) -> Quality:
        return self._measured(self.check).measure_dense()

    @cached_property
    def dense_report(self) -> Quality:
        return self._measured(self.report).measure_dense()

    def choose(self) -> tuple[RungChoice, Quality]:
        """The choice that keeps the budget on the report text, and its quality there. Raises NotMetError."""
        layers = [self._allowed(n, sums) for n, sums in enumerate(self.dense_tune.layers)]
        dense, budget = self.dense_report, self.spec.perplexity_increase
        for fraction in REFUSED_FRACTIONS:
            choice = self._choice(layers, fraction * budget)
            report = self._measure(self.report, choice.candidates)
            # The divergence is what the increase would be without the luck of which words the text happens to hold.
            cost = max(report.increase_over(dense)[0], report.divergence)
            if cost <= budget:
                return choice, report
        raise not_met(choice, cost, budget)

    def _expected(self, chosen: Sequence[Candidate]) -> tuple[float, Quality]:
        """The cost that nine of ten other texts as long as the tune text stay below, and the quality where one chooses.

        The divergence on the part of the tune text that the choice was not made for, or the increase of perplexity on
        all of it where that is more; and luck: `LUCK` standard errors, but no more than half as much again, for short
        texts say little of either.
        """
        tune, check = self._measure(self.tune, chosen), self._measure(self.check, chosen)
        whole, dense = (
            replace(rest, losses=torch.cat((part.losses, rest.losses)))
            for part, rest in ((tune, check), (self.dense_tune, self.dense_check))
        )
        increase, error = whole.increase_over(dense)
        cost = max(check.divergence, increase)
        return cost + min(LUCK * math.hypot(error, UNLIKE * cost), cost / 2), tune

    def _choice(self, layers: LayerCandidates, most: float) -> RungChoice:
        """The fastest choice that is expected to cost at most `most`."""
        return choose_rungs(
            layers,
            most,
            formats=self.spec.predictor_formats,
            time=self._time,
            measure=self._expected,
            on_pass=self.meter.pass_done,
        )

    def _measure(self, text: PushedText, chosen: Sequence[Candidate]) -> Quality:
        def ffn_of(n: int) -> SparseFfn:
            return chosen[n].sparse_ffn(self._arrays(n, chosen[n]), self.spec.device)

        return self._measured(text).measure(ffn_of, json_digest([asdict(c) for c in chosen])[:16])

    def _measured(self, text: PushedText) -> MeasuredText:
        return MeasuredText(text, self.work)

    def predictor(self, n: int, candidate: Candidate) -> Matrices | None:
        """Down, up and bias of a candidate of layer n, as trained."""
        raw = candidate.raw_predictor(self._arrays(n, candidate))
        return None if raw is None else (raw.down.numpy(), raw.up.numpy(), raw.bias.numpy())

    def _arrays(self, n: int, candidate: Candidate) -> dict[str, Any]:
        if candidate.layer.rank is None:
            return {}
        return next(search for search in self.searches if search.n == n).arrays(candidate)

    def _time(self, c: Candidate) -> float:
        return c.ps(self.spec.processor, self.ffn_bytes(c.format or self.spec.predictor_formats[0]))

    def _allowed(self, n: int, sums: LayerSums) -> list[Candidate]:
        """The candidates of layer n: the fastest exact rung that the recipe allows, and those that are faster still."""
        found = [c for c in self.found.get(n, []) if c.layer.rung in self.spec.rungs]
        neuron = self.ffn_bytes(self.spec.predictor_formats[0])
        layers = [Layer(rung=name) for name in self._exact_rungs()]
        if n in self.checkpoint.decoder.mixer_only_layers:
            layers, found = [Layer(rung=DENSE)], []
        if layers:
            ways = [Candidate(layer=layer, reads=sums.exact_reads(neuron, layer), error=0.0) for layer in layers]
            # Where rows may come from disk, zeros are skipped whatever that costs in memory.
            exact = min(ways, key=self._time) if self.spec.processor.matrices else ways[-1]
            return [exact, *(c for c in found if self._time(c) < self._time(exact))]
        if not found:
            raise NotMetError("only dense runs this model, which is not sparse", remedy="allow dense in [train] rungs")
        # Without an exact rung one of them must do, even a slower one.
        return found

    def _exact_rungs(self) -> list[str]:
        """The exact rungs that the recipe allows and that suit the model, in the order of the ladder."""
        sparse, allowed = self.checkpoint.decoder.sparse, self.spec.rungs
        return [r.name for r in RUNGS.values() if r.exact and r.name in allowed and (r.dense or sparse)]
