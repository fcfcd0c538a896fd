"""The work of a training: an estimate of its time before it starts, and its progress, in optimiser steps."""

from collections.abc import Callable
from dataclasses import dataclass

from pi_compile.torch_model import (
    PROCESS_BYTES,
    Estimate,
    computing_with,
    flops_per_s,
    layer_parameters,
    values_per_s,
)
from pi_compile.training.candidates import MORE_RANKS, initial_ranks, searches_for
from pi_compile.training.quality import BATCH
from pi_compile.training.rung_choice import PASSES
from pi_compile.training.samples import CHUNK, NEURON_VALUES
from pi_compile.training.spec import TrainSpec
from pi_runtime.artifact.decoder import Decoder

STEP_PASSES, SCORE_PASSES = 30, 20
"""Element-wise passes over all neuron values: in an optimiser step, for each rank; and in a histogram by scores."""


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """The parts of a training, each as (operations of products, values in element-wise passes)."""

    d: Decoder
    spec: TrainSpec
    ranks: tuple[int, ...]
    """Ranks tried in a layer of mean density; () where nothing is trained."""
    fit: int
    """Tokens of the fit text."""
    tune: int
    """Tokens of the tune text."""
    report: int
    """Tokens of the report text."""

    @classmethod
    def of(cls, d: Decoder, spec: TrainSpec, density: float, fit: int, tune: int, report: int) -> "TrainingWork":
        """The work for a model of which a mean fraction `density` of the neurons fires."""
        trains = any(search.trains for search in searches_for(spec.rungs, d))
        ranks = tuple(initial_ranks(d, spec.predictor_formats, density, 0.5)) if trains else ()
        return cls(d=d, spec=spec, ranks=ranks, fit=fit, tune=tune, report=report)

    def estimate(self, device: str) -> Estimate:
        """Time by short measurements on the device, disk for hidden states and inputs, memory of the largest part."""
        d, batch = self.d, self.spec.batch
        with computing_with(self.spec.threads):
            products = flops_per_s(min(batch, 512), d.d_model, min(d.neurons, 4096), device)
            values = values_per_s(device)
        seconds = sum(flops / products + n / values for flops, n in self.parts())
        return Estimate(
            seconds=seconds, disk_bytes=12 * (self.fit + self.tune) * d.d_model, memory_bytes=self.memory_bytes
        )

    @property
    def memory_bytes(self) -> int:
        """Memory of one worker in the largest part: a layer's search, or a pass through the model."""
        d, rows = self.d, BATCH * self.spec.window
        search = (
            10 * max(NEURON_VALUES, self.spec.batch * d.neurons)
            + 2 * CHUNK * d.d_model
            + 16 * sum(self.ranks) * (d.d_model + d.neurons)
            + 6 * d.neurons * d.d_model
            + 8 * d.d_model**2
        )
        one_pass = (
            2 * d.vocab_size * d.d_model
            + 6 * rows * d.vocab_size
            + 8 * rows * d.neurons
            + max(self.tune, self.report) * d.d_model
            + 3 * max(self.ranks, default=0) * (d.d_model + d.neurons)
        )
        return PROCESS_BYTES + 4 * (2 * layer_parameters(d, d.n_experts) + max(search, one_pass))

    def per_step(self) -> tuple[float, float]:
        """The work of one optimiser step of all ranks."""
        d, n = self.d, self.spec.batch
        ranks = sum(6 * n * r * (d.d_model + d.neurons) for r in self.ranks)
        return n * self._neurons() + ranks, STEP_PASSES * n * d.neurons * max(len(self.ranks), 1)

    def beside_steps(self) -> tuple[float, float]:
        """The work of one layer without its optimiser steps."""
        d, spec = self.d, self.spec
        tried = 2 * self.training_rounds() * len(self.ranks) * len(spec.predictor_formats)
        scores = 2 * sum(self.ranks) / max(len(self.ranks), 1) * (d.d_model + d.neurons)
        others = sum(not search.trains for search in searches_for(spec.rungs, d))
        moment = 2 * self.fit * d.d_model**2 + 80 * d.d_model**3 + 2 * d.neurons * d.d_model**2
        products = (
            2 * layer_parameters(d, d.experts_per_token) * (self.fit + self.tune)
            + (moment if self.ranks else 0)
            + self.tune * ((1 + bool(tried) + others) * self._neurons() + tried * scores)
        )
        return products, self.tune * (tried + others) * SCORE_PASSES * d.neurons

    def training_rounds(self) -> float:
        """Rounds that train all ranks; a later round trains one rank and counts as that part of a round."""
        return 1 + MORE_RANKS / len(self.ranks) if self.ranks else 0

    def per_pass(self) -> tuple[float, float]:
        """The work of one pass of the tune text through the whole model."""
        d = self.d
        model = 2 * layer_parameters(d, d.experts_per_token) * d.n_layers + 4 * d.vocab_size * d.d_model
        return self.tune * model, 10 * self.tune * d.n_layers * d.neurons

    def parts(self) -> list[tuple[float, float]]:
        """The work of the whole training: optimiser steps, the rest of each layer, and passes through the model."""
        step, beside, one_pass = self.per_step(), self.beside_steps(), self.per_pass()
        steps = self.spec.steps * self.training_rounds() * self.d.n_layers
        passes = PASSES * len(self.spec.predictor_formats) + 2 + 2 * self.report / self.tune
        return [_times(step, steps), _times(beside, self.d.n_layers), _times(one_pass, passes)]

    def _neurons(self) -> float:
        """Operations of one sample's neuron values: `first`, and `up` where there is one."""
        return 2 * self.d.d_model * self.d.experts_per_token * self.d.d_ff * (2 if self.d.ffn == "gated" else 1)


def _times(part: tuple[float, float], n: float) -> tuple[float, float]:
    return part[0] * n, part[1] * n


class ProgressMeter:
    """Progress of a training in optimiser steps; it jumps ahead where less is to be done than was estimated."""

    def __init__(self, work: TrainingWork, progress: Callable[[int, int], None]) -> None:
        def in_steps(part: tuple[float, float]) -> int:
            products, values = part
            # A value in an element-wise pass takes as long as about 50 operations of a product.
            return round((products + 50 * values) / (work.per_step()[0] + 50 * work.per_step()[1]))

        self._progress, self._layers = progress, work.d.n_layers
        self._steps = round(work.spec.steps * work.training_rounds())
        self._layer = max(1, self._steps + in_steps(work.beside_steps()))
        self._pass = max(1, in_steps(work.per_pass()))
        self._total = self._layers * self._layer + (PASSES * len(work.spec.predictor_formats) + 3) * self._pass
        self._done = 0

    def layers_done(self, count: int) -> None:
        """Report how many layers are done, by all workers together."""
        self._report(count * self._layer)

    def step_done(self) -> None:
        """Report that an optimiser step is done."""
        self._report(self._done + 1)

    def pass_done(self) -> None:
        """Report that a pass through the model is done."""
        self._report(self._done + self._pass)

    def end(self) -> None:
        """Report that everything is done."""
        self._report(self._total)

    def _report(self, done: int) -> None:
        self._done = max(self._done, min(done, self._total))
        self._progress(self._done, self._total)
