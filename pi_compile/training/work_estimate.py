"""The work of a training: an estimate of its time before it starts, and its progress, in optimiser steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pi_compile.torch_model import (
    PROCESS_BYTES,
    Estimate,
    activation_values,
    computing_with,
    flops_per_s,
    layer_parameters,
    values_per_s,
)
from pi_compile.training.candidates import MORE_RANKS, Search, TrainSpec, initial_ranks, searches_for
from pi_compile.training.rung_choice import PASSES
from pi_compile.training.samples import BATCH, CHUNK, NEURON_VALUES
from pi_runtime.artifact.decoder import Decoder

STEP_PASSES, SCORE_PASSES, MODEL_PASSES = 30, 20, 10
"""Element-wise passes over all neuron values: in an optimiser step for each rank, in a histogram by scores, and in a
pass through the model that measures."""
VALUE = 50
"""Operations of a product that take as long as a value in an element-wise pass, roughly."""
LONGEST = 3e14
"""Operations of a task on a CPU, about an hour of one core. A layer's search of more is split; on a GPU it is short."""


@dataclass(frozen=True)
class WorkAmount:
    """Operations of products, and values in element-wise passes."""

    products: float = 0.0
    values: float = 0.0

    def __add__(self, other: "WorkAmount") -> "WorkAmount":
        return WorkAmount(self.products + other.products, self.values + other.values)

    def __mul__(self, n: float) -> "WorkAmount":
        return WorkAmount(self.products * n, self.values * n)

    @property
    def operations(self) -> float:
        """All of it, in operations of products."""
        return self.products + VALUE * self.values


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """The parts of a training."""

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
        d, total = self.d, self.total()
        with computing_with(self.spec.threads):
            products = flops_per_s(self.spec.batch, d.neuron_width, min(d.neurons, 4096), device)
            values = values_per_s(device)
        # Hidden states before and after, FFN inputs, and the warm starts of a split search.
        rows = 3 * (self.fit + self.tune) + 2 * self.report
        rows += d.neurons + d.n_experts * d.neuron_width if self.splits else 0
        return Estimate(
            seconds=total.products / products + total.values / values,
            disk_bytes=4 * rows * d.d_model,
            memory_bytes=self.memory_bytes,
        )

    @property
    def splits(self) -> bool:
        """Whether the search of a layer is split into tasks. It depends on the model and the recipe alone."""
        return self.spec.device == "cpu" and bool(self.ranks) and self.search().operations > LONGEST

    @property
    def memory_bytes(self) -> int:
        """Memory of one worker in the largest part: a layer's search, or a pass through the model."""
        d, window = self.d, self.d.within_context(self.spec.window)
        rows = BATCH * window
        ranks = max(*self.ranks, *self.further()) if self.splits else sum(self.ranks)
        search = (
            10 * max(NEURON_VALUES, self.spec.batch * d.neurons)
            + 2 * CHUNK * d.neuron_width
            + 16 * ranks * (d.neuron_width + d.neurons)
            + 6 * d.neurons * d.neuron_width
            + 8 * d.neuron_width**2
        )
        one_pass = (
            2 * d.vocab_size * d.d_model
            + 6 * rows * d.vocab_size
            + max(8 * rows * d.neurons, rows * activation_values(d, window))
            + max(self.tune, self.report) * d.d_model
            + 3 * max(self.ranks, default=0) * (d.neuron_width + d.neurons)
        )
        return PROCESS_BYTES + 4 * (2 * layer_parameters(d, d.n_experts) + max(search, one_pass))

    def total(self) -> WorkAmount:
        """The whole training: each layer, and the passes of the choice."""
        passes = PASSES * len(self.spec.predictor_formats) + self.report / self.tune
        return self.per_layer() * self.d.n_layers + self.logits() + self.per_pass() * passes

    def per_step(self, ranks: Sequence[int] | None = None) -> WorkAmount:
        """One optimiser step of some ranks, of all by default."""
        d, n = self.d, self.spec.batch
        ranks = self.ranks if ranks is None else ranks
        scores = sum(6 * n * r * (d.neuron_width + d.neurons) for r in ranks)
        return WorkAmount(n * self._neurons() + scores, STEP_PASSES * n * d.neurons * max(len(ranks), 1))

    def per_layer(self) -> WorkAmount:
        """One layer: the texts pushed through it, and its search."""
        d, counted = self.d, self.tune + self.report
        pushed = (self.fit if self.searches else 0) + counted
        through = WorkAmount(2 * layer_parameters(d, d.experts_per_token) * pushed, MODEL_PASSES * counted * d.neurons)
        return through + self.search()

    def search(self) -> WorkAmount:
        """One layer's search as one task."""
        more = WorkAmount()
        for rank in self.further():
            more += self.of_ranks([rank])
        return self.begun() + (self.of_ranks(self.ranks) if self.ranks else WorkAmount()) + more

    def begun(self) -> WorkAmount:
        """What a search begins with: rungs without predictors, and the warm starts of all ranks."""
        d = self.d
        untrained = sum(not search.trains for search in self.searches)
        scores = WorkAmount(self.tune * 2 * self._neurons(), SCORE_PASSES * self.tune * d.neurons) * untrained
        moment = WorkAmount(
            2 * self.fit * d.neuron_width**2 + 80 * d.neuron_width**3 + 4 * d.neurons * d.neuron_width**2
        )
        return scores + (moment if self.ranks else WorkAmount())

    def of_ranks(self, ranks: Sequence[int]) -> WorkAmount:
        """Some ranks tried together: trained, and the scores of all their candidates on the tune text."""
        d, each = self.d, 2 * len(self.spec.predictor_formats)
        scores = each * sum(2 * rank * (d.neuron_width + d.neurons) for rank in ranks)
        measured = WorkAmount(self._neurons() + scores, SCORE_PASSES * each * len(ranks) * d.neurons) * self.tune
        return self.per_step(ranks) * self.spec.steps + measured

    def further(self) -> list[int]:
        """Ranks further out that may be tried one after the other: the higher ones, which take longer."""
        found = list(self.ranks)
        for _ in range(MORE_RANKS):
            found.append(found[-1] * 3 // 2 if found else 0)
        return [rank for rank in found[len(self.ranks) :] if 0 < rank <= min(self.d.neuron_width, self.d.d_ff)]

    @property
    def searches(self) -> list[Search]:
        """The searches that the recipe asks for."""
        return searches_for(self.spec.rungs, self.d)

    def logits(self) -> WorkAmount:
        """The next-token distributions of the dense model."""
        return WorkAmount(2 * self.d.vocab_size * self.d.d_model * (self.tune + self.report))

    def per_pass(self) -> WorkAmount:
        """One pass of the tune text through the whole model, and its divergence from the dense one."""
        d = self.d
        model = 2 * layer_parameters(d, d.experts_per_token) * d.n_layers + 4 * d.vocab_size * d.d_model
        return WorkAmount(self.tune * model, MODEL_PASSES * self.tune * d.n_layers * d.neurons)

    def _neurons(self) -> float:
        """Operations of one sample's neuron values: `first`, and `up` where there is one."""
        return 2 * self.d.neuron_width * self.d.experts_per_token * self.d.d_ff * (2 if self.d.ffn == "gated" else 1)


class ProgressMeter:
    """Progress of a training in optimiser steps; it jumps ahead where less is to be done than was estimated."""

    def __init__(self, work: TrainingWork, progress: Callable[[int, int], None]) -> None:
        def in_steps(part: WorkAmount) -> int:
            return max(1, round(part.operations / work.per_step().operations))

        self.work, self._progress, self._layers = work, progress, work.d.n_layers
        self._layer, self._pass = in_steps(work.per_layer()), in_steps(work.per_pass())
        self._total = self._layers * self._layer + (PASSES * len(work.spec.predictor_formats) + 1) * self._pass
        self._done = 0

    def layers_done(self, count: float) -> None:
        """Report how many layers are done, by all workers together."""
        self._report(round(count * self._layer))

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
