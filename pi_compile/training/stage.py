"""Train: a rung for each layer, with a predictor where one pays, the fastest under one quality budget.

For each layer, its FFN inputs on the fit and tune texts are computed, and candidates are found (`candidates`). Then one
candidate is chosen for each layer, by predicted time on the recipe's processor (`rung_choice`). The reported figures
are measured on a third text, and the budget must hold there too.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.checkpoint import Checkpoint
from pi_compile.files import read_arrays, write_arrays
from pi_compile.results import ActivationProfile, Floats, PredictorSet
from pi_compile.torch_model import DENSE
from pi_compile.torch_model import decoder as td
from pi_compile.training.candidates import Candidate, Ladder, searches_for
from pi_compile.training.quality import LayerSums, Quality, measure_quality
from pi_compile.training.rung_choice import RungChoice, choose_rungs, not_met
from pi_compile.training.samples import push_through
from pi_compile.training.spec import TUNE_FRACTIONS, TrainSpec
from pi_compile.training.work_estimate import ProgressMeter, TrainingWork
from pi_runtime.artifact.rungs import RUNGS, Rung
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import FfnBytes
from pi_runtime.errors import NotMetError

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
    scratch: Path,
    inputs: str,
    progress: Progress,
) -> PredictorSet:
    """Train predictors, choose rungs and report their quality.

    `scratch` is this run's alone; finished layers of an earlier run with the same `inputs` are reused. Raises
    NotMetError if the allowed rungs cannot keep the quality budget.
    """
    meter = ProgressMeter(training_work(checkpoint, profile, texts, spec), progress)
    run = _Run(checkpoint, profile, texts, spec, scratch, meter)
    for n in range(checkpoint.decoder.n_layers):
        run.find_candidates(n)
        meter.layer_done(n)
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
        predictors=tuple(run.predictor(n, c) for n, c in enumerate(choice.candidates)),
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
class _Run:
    """One training, and what it has found so far."""

    checkpoint: Checkpoint
    profile: ActivationProfile
    texts: Texts
    spec: TrainSpec
    scratch: Path
    meter: ProgressMeter
    found: dict[int, list[Candidate]] = field(default_factory=dict)

    def ffn_bytes(self, predictor_format: str) -> FfnBytes:
        return FfnBytes(self.checkpoint.decoder, self.spec.ffn_format, predictor_format)

    def windows(self, tokens: Tokens) -> torch.Tensor:
        return td.windows(tokens, min(self.spec.window, self.checkpoint.decoder.context_length))

    # Layer by layer.

    def find_candidates(self, n: int) -> None:
        """Find the candidates of layer n, or read those of an earlier run."""
        if not self._file(n).exists():
            self._search(n)
        stored = read_arrays(self._file(n), "candidates")
        self.found[n] = [Candidate.from_json(c) for c in json.loads(str(stored["candidates"]))]

    def _file(self, n: int) -> Path:
        return self.scratch / f"layer-{n}.npz"

    def _search(self, n: int) -> None:
        d, device = self.checkpoint.decoder, self.spec.device
        if not searches_for(self.spec.rungs, d):
            write_arrays(self._file(n), {"candidates": np.array("[]")})
            return
        w = td.layer_weights(self.checkpoint, n, device)
        texts = {"fit": self.texts.fit, "tune": self.texts.tune}
        fit, tune = (
            push_through(self.checkpoint, n, w, self.windows(tokens), scratch=self.scratch, name=name, device=device)
            for name, tokens in texts.items()
        )
        ladder = Ladder(
            d=d,
            w=w,
            fit=fit,
            tune=tune,
            spec=self.spec,
            rng=lambda training_round: np.random.default_rng([self.spec.seed, n, training_round]),
            on_step=self.meter.step_done,
            density=float(self.profile.density()[n]),
            top_share=float(self.profile.cumulative_curve(5)[n, 1]),
        )
        ladder.search()
        candidates = np.array(json.dumps([asdict(candidate) for candidate in ladder.found]))
        write_arrays(self._file(n), {"candidates": candidates, **ladder.arrays})

    # The choice.

    @cached_property
    def dense_tune(self) -> Quality:
        return self._measure_dense(self.texts.tune)

    @cached_property
    def dense_report(self) -> Quality:
        return self._measure_dense(self.texts.report)

    def choose(self) -> tuple[RungChoice, Quality]:
        """The choice that keeps the budget on the report text, and its quality there. Raises NotMetError."""
        layers = [self._allowed(n, sums) for n, sums in enumerate(self.dense_tune.layers)]
        budget = self.spec.perplexity_increase
        for fraction in TUNE_FRACTIONS:
            choice = choose_rungs(
                layers,
                fraction * budget,
                formats=self.spec.predictor_formats,
                time=self._time,
                measure=lambda chosen: self._measure(self.texts.tune, chosen, self.dense_tune),
                on_pass=self.meter.pass_done,
            )
            report = self._measure(self.texts.report, choice.candidates, self.dense_report)
            # The divergence is what the increase would be without the luck of which words the text happens to hold.
            cost = max(report.increase_over(self.dense_report)[0], report.divergence)
            if cost <= budget:
                return choice, report
        raise not_met(choice, cost, budget)

    def _measure(self, tokens: Tokens, chosen: Sequence[Candidate], dense: Quality) -> Quality:
        ffns = [c.sparse_ffn(self._arrays(n, c), self.spec.device) for n, c in enumerate(chosen)]
        return measure_quality(self.checkpoint, self.windows(tokens), ffns, device=self.spec.device, dense=dense)

    def _measure_dense(self, tokens: Tokens) -> Quality:
        ffns = [DENSE] * self.checkpoint.decoder.n_layers
        return measure_quality(self.checkpoint, self.windows(tokens), ffns, device=self.spec.device)

    def predictor(self, n: int, candidate: Candidate) -> tuple[Floats, Floats, Floats] | None:
        """Down, up and bias of a candidate of layer n, as trained."""
        raw = candidate.raw_predictor(self._arrays(n, candidate))
        return None if raw is None else (raw.down.numpy(), raw.up.numpy(), raw.bias.numpy())

    def _arrays(self, n: int, candidate: Candidate) -> dict[str, Any]:
        if candidate.layer.rank is None:
            return {}
        return read_arrays(self._file(n), f"{candidate.array_prefix}/")

    def _time(self, c: Candidate) -> float:
        return c.ps(self.spec.processor, self.ffn_bytes(c.format or self.spec.predictor_formats[0]))

    def _allowed(self, n: int, sums: LayerSums) -> list[Candidate]:
        """The candidates of layer n: an exact rung if the recipe allows one, and those that are faster."""
        found = [c for c in self.found[n] if c.layer.rung in self.spec.rungs]
        rung = self._exact_rung()
        if rung is not None:
            layer = Layer(rung=rung.name)
            reads = sums.exact_reads(self.ffn_bytes(self.spec.predictor_formats[0]), layer)
            exact = Candidate(layer=layer, reads=reads, error=0.0)
            return [exact, *(c for c in found if self._time(c) < self._time(exact))]
        if not found:
            raise NotMetError("only dense runs this model, which is not sparse", remedy="allow dense in [train] rungs")
        # Without an exact rung one of them must do, even a slower one.
        return found

    def _exact_rung(self) -> Rung | None:
        """The highest exact rung that the recipe allows and that suits the model."""
        sparse, allowed = self.checkpoint.decoder.sparse, self.spec.rungs
        exact = [r for r in RUNGS.values() if r.exact and r.name in allowed and (r.dense or sparse)]
        return exact[-1] if exact else None
