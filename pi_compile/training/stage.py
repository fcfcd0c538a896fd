"""Train: a rung for each layer, with a predictor where one pays, the quickest under one quality budget.

Layer by layer: the layer's FFN inputs on the fit and tune texts, and the ladder of ways to run it (`candidates`). Then
the choice of one for each layer by predicted time on the recipe's processor (`choice`). What is reported is measured on
a third text, and the budget is a gate there.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.checkpoint import Checkpoint
from pi_compile.cost_model.default_rungs import exact_rung
from pi_compile.cost_model.ffn_time import Reads
from pi_compile.cost_model.processors import PICO, Processor
from pi_compile.files.npz import read_arrays, write_arrays
from pi_compile.results.activation_profile import ActivationProfile
from pi_compile.results.predictor_set import Floats, Trained
from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.sparse_ffn import Selection
from pi_compile.training.candidates import Candidate, Ladder, LadderSpec
from pi_compile.training.quality import Tally, Verdict, judge
from pi_compile.training.rung_choice import TUNE_SHARES, Choice, choose, not_met
from pi_compile.training.samples import TextStates
from pi_compile.training.work_estimate import Meter, TrainingWork
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.sizes import FfnBytes
from pi_runtime.errors import NotMetError

Tokens = npt.NDArray[np.integer]
Progress = Callable[[int, int], None]
BYTES = Processor("bytes", 0, {"": PICO}, {}, None)
"""Reads a byte a picosecond, in any format and order: times are bytes."""


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How rungs are tried and chosen."""

    window: int = 512
    batch: int = 512
    steps: int = 400
    learning_rate: float = 3e-3
    perplexity_increase: float = 0.001
    """Largest relative increase of perplexity that all layers together may cost."""
    predictor_formats: tuple[str, ...] = ("f16",)
    """Formats that predictors may have, all the same one."""
    ffn_format: str = "f16"
    rungs: tuple[str, ...] = tuple(RUNGS)
    """Rungs a layer may take. Without dense and gate the quality budget may be out of reach."""
    processor: Processor = BYTES
    """What the FFN is to run on."""
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Three disjoint token streams."""

    fit: Tokens
    tune: Tokens
    report: Tokens


def training_work(checkpoint: Checkpoint, profile: ActivationProfile, texts: Texts, spec: TrainSpec) -> TrainingWork:
    """What there is to do."""
    tokens = (len(texts.fit), len(texts.tune), len(texts.report))
    return TrainingWork.of(checkpoint.decoder, _ladder_spec(checkpoint, spec), float(profile.density().mean()), *tokens)


def train_predictors(
    checkpoint: Checkpoint,
    profile: ActivationProfile,
    texts: Texts,
    spec: TrainSpec,
    *,
    scratch: Path,
    inputs: str,
    progress: Progress,
) -> Trained:
    """Fit, choose and report. `scratch` is this run's alone; finished layers of an earlier run with the same `inputs`
    are taken over. Raises NotMetError if the allowed rungs cannot keep the quality budget."""
    meter = Meter(training_work(checkpoint, profile, texts, spec), progress)
    run = _Run(checkpoint, profile, texts, spec, scratch, meter)
    for n in range(checkpoint.decoder.n_layers):
        run.climb(n)
        meter.layer(n)
    choice, report = run.settle()
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
    how = run.selections(choice.candidates)
    neuron = run.neuron(choice.format)
    meter.end()
    return Trained(
        rows=tuple(t.row(neuron, spec.processor, s) for t, s in zip(report.tallies, how, strict=True)),
        predictors=tuple(run.predictor(n, c) for n, c in enumerate(choice.candidates)),
        predictor_format=choice.format,
        counts=tuple(_fired(t, c) for t, c in zip(choice.tune.tallies, choice.candidates, strict=True)),
        counted_tokens=choice.tune.tallies[0].tokens,
        perplexity=perplexity,
        inputs=inputs,
    )


def _fired(tally: Tally, candidate: Candidate) -> npt.NDArray[np.uint64] | None:
    return tally.fired.numpy().astype(np.uint64) if candidate.rung == "threshold" else None


def _ladder_spec(checkpoint: Checkpoint, spec: TrainSpec) -> LadderSpec:
    return LadderSpec(
        rungs=spec.rungs,
        formats=spec.predictor_formats,
        ffn_format=spec.ffn_format,
        processor=spec.processor,
        batch=spec.batch,
        steps=spec.steps,
        learning_rate=spec.learning_rate,
        error=TUNE_SHARES[0] * spec.perplexity_increase / checkpoint.decoder.n_layers,
    )


@dataclass(frozen=True)
class _Run:
    checkpoint: Checkpoint
    profile: ActivationProfile
    texts: Texts
    spec: TrainSpec
    scratch: Path
    meter: Meter
    found: dict[int, list[Candidate]] = field(default_factory=dict)

    def neuron(self, fmt: str) -> FfnBytes:
        return FfnBytes(self.checkpoint.decoder, self.spec.ffn_format, fmt)

    def ids(self, tokens: Tokens) -> torch.Tensor:
        return td.windows(tokens, min(self.spec.window, self.checkpoint.decoder.context_length))

    # Layer by layer.

    def climb(self, n: int) -> None:
        """Candidates of layer n, found now or taken from an earlier run."""
        if not self._file(n).exists():
            self._fit(n)
        stored = read_arrays(self._file(n), "candidates")
        self.found[n] = [Candidate.of_json(c) for c in json.loads(str(stored["candidates"]))]

    def _file(self, n: int) -> Path:
        return self.scratch / f"layer-{n}.npz"

    def _fit(self, n: int) -> None:
        d, device = self.checkpoint.decoder, self.spec.device
        if not self._climbs():
            write_arrays(self._file(n), {"candidates": np.array("[]")})
            return
        w = td.layer_weights(self.checkpoint, n, device)
        texts = {"fit": self.texts.fit, "tune": self.texts.tune}
        fit, tune = (
            TextStates(self.checkpoint, name, self.ids(tokens), self.scratch, device).advance(n, w)
            for name, tokens in texts.items()
        )
        ladder = Ladder(
            d=d,
            w=w,
            fit=fit,
            tune=tune,
            spec=_ladder_spec(self.checkpoint, self.spec),
            rng=lambda search: np.random.default_rng([self.spec.seed, n, search]),
            stepped=self.meter.step,
        )
        ladder.climb(float(self.profile.density()[n]), float(self.profile.cumulative_curve(5)[n, 1]))
        write_arrays(self._file(n), {"candidates": np.array(json.dumps(ladder.as_json())), **ladder.arrays})

    def _climbs(self) -> bool:
        """Whether there is anything to try."""
        return "threshold" in self.spec.rungs or (
            self.checkpoint.decoder.sparse and not {"predicted", "sign"}.isdisjoint(self.spec.rungs)
        )

    # The choice.

    @cached_property
    def dense_tune(self) -> Verdict:
        return self._judge(self.texts.tune, self._dense())

    @cached_property
    def dense_report(self) -> Verdict:
        return self._judge(self.texts.report, self._dense())

    def settle(self) -> tuple[Choice, Verdict]:
        """The choice that passes the gate, and what the report text says of it. Raises NotMetError."""
        options = self._options()
        budget = self.spec.perplexity_increase
        for share in TUNE_SHARES:
            choice = choose(
                options,
                share * budget,
                formats=self.spec.predictor_formats,
                time=self._time,
                judge=self._judge_tune,
                stepped=self.meter.judged,
            )
            report = self._judge(self.texts.report, self.selections(choice.candidates), self.dense_report)
            # The divergence is what the increase would be without the luck of which words the text happens to hold.
            cost = max(report.increase_over(self.dense_report)[0], report.divergence)
            if cost <= budget:
                return choice, report
        raise not_met(choice, cost, budget)

    def _judge_tune(self, chosen: Sequence[Candidate]) -> Verdict:
        return self._judge(self.texts.tune, self.selections(chosen), self.dense_tune)

    def _dense(self) -> list[Selection]:
        return [Selection()] * self.checkpoint.decoder.n_layers

    def _judge(self, tokens: Tokens, how: Sequence[Selection], dense: Verdict | None = None) -> Verdict:
        return judge(self.checkpoint, self.ids(tokens), how, device=self.spec.device, dense=dense)

    def selections(self, chosen: Sequence[Candidate]) -> list[Selection]:
        """What the artifact will do."""
        return [c.selection(self._predictor(n, c), self.spec.device) for n, c in enumerate(chosen)]

    def predictor(self, n: int, candidate: Candidate) -> tuple[Floats, Floats, Floats] | None:
        """Down, up and bias of a chosen candidate, as trained."""
        raw = candidate.raw(self._predictor(n, candidate))
        return None if raw is None else (raw.down.numpy(), raw.up.numpy(), raw.bias.numpy())

    def _predictor(self, n: int, candidate: Candidate) -> dict[str, Any]:
        return {} if candidate.rank is None else read_arrays(self._file(n), f"{candidate.name}/")

    def _time(self, c: Candidate) -> float:
        return c.reads.ps(self.spec.processor, self.neuron(c.format or self.spec.predictor_formats[0]))

    def _options(self) -> list[list[Candidate]]:
        """What each layer may take: an exact rung if the recipe allows one, and what is quicker than that."""
        allowed = [rung for rung in (exact_rung(self.checkpoint.decoder), "dense") if rung in self.spec.rungs]
        options = []
        for n, tally in enumerate(self.dense_tune.tallies):
            found = [c for c in self.found[n] if c.rung in self.spec.rungs]
            if not allowed and not found:
                raise NotMetError(
                    "only dense runs this model, which is not sparse", remedy="allow dense in [train] rungs"
                )
            if allowed:
                exact = self._exact(allowed[0], tally)
                # Without an exact rung something has to do, even what is slower.
                found = [exact, *(c for c in found if self._time(c) < self._time(exact))]
            options.append(found)
        return options

    def _exact(self, rung: str, tally: Tally) -> Candidate:
        neuron = self.neuron(self.spec.predictor_formats[0])
        reads = tally.gate(neuron) if rung == "gate" else Reads.of(neuron, "dense", None, 1.0, 1.0)
        return Candidate(rung=rung, reads=reads, error=0.0)
