"""Candidates for one layer: ways to run its FFN, with what each reads and loses on the tune text.

    threshold   activations up to a quantile of their magnitudes over the fit text count as 0 (CATS, TEAL)
    predicted   predictors of a few ranks, warm start and trained, in each number format, with a few thresholds

`SEARCHES` has one entry a rung; exact rungs need no search. Thresholds of scores follow from what may be
lost: the neurons left out hold at most a given fraction of the layer's energy. Histograms over the scores give, in one
pass, what each threshold reads and loses. Ranks start around the one that sparsity and skewness suggest; if the best
rank is at an end of the range, the next one out is tried.

Shape letters: N samples, D model width, F neurons.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from pi_compile.cost_model import PICO, PROMPT_TOKENS, Processor, Reads
from pi_compile.torch_model import (
    Predictor,
    SparseFfn,
    WarmStarts,
    energy,
    initial_rank,
    routed_neurons,
    second_moment,
    train,
)
from pi_compile.torch_model import decoder as td
from pi_compile.training.samples import NEURON_VALUES, Samples
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import FfnBytes

BYTES = Processor("bytes", 0, {"": PICO}, {}, None)
"""A processor that reads one byte a picosecond, in any format and order: times are bytes."""


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
    """Number formats that predictors may have; all layers have the same."""
    ffn_format: str = "f16"
    rungs: tuple[str, ...] = tuple(RUNGS)
    """Rungs a layer may take. Without dense and gate the quality budget may be out of reach."""
    processor: Processor = BYTES
    """The processor that times are predicted for."""
    seed: int = 0
    threads: int = 1
    """Threads that a task computes with. They can change the last bits of a result."""
    device: str = "cpu"

    def layer_error(self, n_layers: int) -> float:
        """Roughly the error that one layer may make; the search for a rank leaves out predictors with more."""
        return self.perplexity_increase / n_layers


Tensor = torch.Tensor
_HALF = 1 << 15
_BINS = 2 * _HALF


class ValueHistogram:
    """Weights of float32 values, summed in bins; a bin is all values with the same upper 16 bits.

    Bins are ordered by value. Relative to its values, the widest is 2⁻⁷ wide.
    """

    def __init__(self) -> None:
        self._weights = torch.zeros(_BINS, dtype=torch.float64)

    @property
    def empty(self) -> bool:
        """Whether the total weight is 0."""
        return not float(self._weights.sum()) > 0

    def add(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Add float32 values of any shape, with weights of the same shape, or of 1 each."""
        found = torch.bincount(
            _bins(values.flatten()), None if weights is None else weights.flatten().double(), minlength=_BINS
        )
        self._weights += found.double().cpu()

    @property
    def total(self) -> float:
        """The total weight."""
        return float(self._weights.sum())

    def above(self, threshold: float) -> float:
        """The weight of the values above a number that `threshold` returned."""
        first = int(_bins(torch.nextafter(torch.tensor([threshold]), torch.tensor([torch.inf]))))
        return float(self._weights[first:].sum())

    def threshold(self, fraction: float) -> float:
        """The highest edge of a bin such that at most this fraction of the weight is at or below it."""
        assert not self.empty
        below = self._weights.cumsum(0)
        first = int(torch.searchsorted(below, fraction * below[-1], right=True))
        return _edge(min(first, _BINS - 1) - _HALF)


def _bins(values: Tensor) -> Tensor:
    """The bin of each float32 value."""
    bits = values.view(torch.int32) >> 16
    # A negative number's bits grow with its magnitude.
    return torch.where(bits < 0, -1 - (bits + _HALF), bits) + _HALF


def _edge(bin_index: int) -> float:
    """The float32 number just below the values of a bin; bins of positive values count from 0, others from −1 down."""
    if bin_index < 0:
        # The values of the bin run from that number, which is excluded, towards 0.
        return float(torch.tensor((-1 - bin_index + 1) << 16, dtype=torch.int32).view(torch.float32).neg())
    lower = torch.tensor(bin_index << 16, dtype=torch.int32).view(torch.float32)
    return float(torch.nextafter(lower, torch.tensor(-torch.inf)))


LOST_ENERGY = tuple(1e-4 * 10 ** (n / 4) for n in range(12))
"""Fractions of the neurons' energy that a threshold may lose, in steps small enough to come near to any budget."""
KEPT_ACTIVATIONS = (0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Fractions of the activations that a threshold on their magnitude keeps."""
RANK_FACTORS = (0.5, 1.0, 1.5)
"""Ranks tried first, as multiples of the one that suits the layer."""
MORE_RANKS = 2
"""Most ranks that are tried after these."""
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a layer, as measured on the tune text."""

    layer: Layer
    trained: bool = False
    """Whether the predictor is more than its warm start."""
    format: str | None = None
    """Number format of the predictor; None where there is none."""
    score_threshold: float = 0.0
    """Score above which the predictor says that a neuron fires; becomes part of its bias."""
    reads: Reads
    error: float
    """E‖Δy‖² ÷ E‖x‖² with x the state that Δy is missing from, to first order: the energy of the neurons left out."""

    @property
    def array_prefix(self) -> str:
        """The beginning of the names of its predictor's arrays."""
        return _array_prefix(self.layer.rank, self.trained)

    def ps(self, processor: Processor, neuron: FfnBytes) -> float:
        """Picoseconds of the layer's FFN for a token, and what its prompt takes longer than with matrices."""
        late = PROMPT_TOKENS * processor.prompt_ps(self.layer, neuron)
        return self.reads.ps(self.layer, processor, neuron) + late

    def raw_predictor(self, arrays: Mapping[str, np.ndarray[Any, Any]], device: str = "cpu") -> Predictor | None:
        """The predictor as trained, with its threshold; not yet rounded to its format."""
        if self.layer.rank is None:
            return None
        parts = (torch.from_numpy(arrays[f"{self.array_prefix}/{part}"]).to(device) for part in ("down", "up", "bias"))
        return Predictor(*parts).shifted(self.score_threshold)

    def sparse_ffn(self, arrays: Mapping[str, np.ndarray[Any, Any]], device: str) -> SparseFfn:
        """The layer as the artifact runs it, with the predictor rounded to its format."""
        raw = self.raw_predictor(arrays, device)
        return SparseFfn(self.layer, None if raw is None or self.format is None else raw.stored_as(self.format))

    def limited(self, limit: float) -> Self:
        """The candidate that computes the neurons whose scores are above a limit."""
        if RUNGS[self.layer.rung].picks:
            return replace(self, score_threshold=limit)
        return replace(self, layer=replace(self.layer, threshold=limit))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The candidate that `asdict` made plain values of."""
        return cls(**{**value, "layer": Layer(**value["layer"]), "reads": Reads(**value["reads"])})


def _array_prefix(rank: int | None, trained: bool) -> str:
    return f"{'trained' if trained else 'init'}-{rank}"


def _unmeasured(rung: str, **fields: Any) -> Candidate:
    rank = fields.pop("rank", None)
    return Candidate(layer=Layer(rung=rung, rank=rank), reads=Reads(first=0.0, rest=0.0), error=0.0, **fields)


@dataclass
class _ScoreSums:
    """Sums over a text, by score: the neurons, those that fire, and their energy."""

    neurons: ValueHistogram = field(default_factory=ValueHistogram)
    fire: ValueHistogram = field(default_factory=ValueHistogram)
    energy: ValueHistogram = field(default_factory=ValueHistogram)
    largest: float = -math.inf

    def add(self, scores: torch.Tensor, energies: torch.Tensor, routed: torch.Tensor | None) -> None:
        fires = energies > 0
        self.largest = max(self.largest, float(scores.max()))
        self.neurons.add(scores if routed is None else scores[routed])
        self.fire.add(scores[fires])
        self.energy.add(scores[fires], energies[fires])

    def limits(self) -> list[float]:
        """Scores up to which the neurons hold at most each fraction of the energy."""
        if self.energy.empty:
            return [self.largest]
        return [self.energy.threshold(fraction) for fraction in LOST_ENERGY]

    def at(self, limit: float) -> tuple[float, float, float]:
        """Neurons above a limit, those of them that fire, and the energy of the neurons that are not above it."""
        return self.neurons.above(limit), self.fire.above(limit), self.energy.total - self.energy.above(limit)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ladder:
    """One layer, its samples, and the candidates found for it."""

    d: Decoder
    w: td.NamedTensors
    fit: Samples
    tune: Samples
    spec: TrainSpec
    rng: Callable[[int], np.random.Generator]
    """A generator for each round of training."""
    on_step: Callable[[], None] = lambda: None
    density: float
    """Mean fraction of the neurons that fire."""
    top_share: float
    """Fraction of all activations that the hottest fifth of the neurons have."""
    found: list[Candidate] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    """Ranks of predictors that were tried."""
    arrays: Arrays = field(default_factory=dict)
    """Predictors as trained."""

    def search(self) -> None:
        """Try everything that the recipe allows."""
        for search in searches_for(self.spec.rungs, self.d):
            search.find(self)

    def search_untrained(self) -> None:
        """Try what needs no predictor."""
        for search in searches_for(self.spec.rungs, self.d):
            if not search.trains:
                search.find(self)

    def find_thresholds(self) -> None:
        """Candidates on the rung `threshold`: magnitudes that keep given fractions of the activations."""
        candidate, histogram = _unmeasured("threshold"), ValueHistogram()
        ffn = SparseFfn(candidate.layer)
        with torch.inference_mode():
            for x in self.fit.blocks(self._rows()):
                scores = ffn.scores(self.d, self.w, x)
                histogram.add(scores[scores > 0])
            kept = [] if histogram.empty else [histogram.threshold(1 - fraction) for fraction in KEPT_ACTIVATIONS]
            self.found.extend(self._measured([candidate], kept))

    def find_predictors(self) -> None:
        """Candidates on the rung `predicted`, at a few ranks and at those beyond them that the best one suggests."""
        starts = self.warm_starts()
        self.try_ranks(starts, initial_ranks(self.d, self.spec.predictor_formats, self.density, self.top_share), 0)
        for training_round in range(1, 1 + MORE_RANKS):
            self.try_further(starts, training_round)

    def warm_starts(self) -> WarmStarts:
        """The predictors of all ranks, before training."""
        moment = second_moment(self.fit.blocks(), self.d.neuron_width)
        return WarmStarts.of(self.w["ffn/first"], self.w.get("ffn/first_bias"), moment, self.d.n_experts)

    def _rows(self) -> int:
        return max(1, NEURON_VALUES // self.d.neurons)

    def _measured(self, candidates: Sequence[Candidate], limits: Sequence[float] | None = None) -> Iterator[Candidate]:
        """Each candidate at several limits of its scores, with what it reads and loses on the tune text, in one pass.

        `limits`: None for those that lose at most each fraction of `LOST_ENERGY`.
        """
        ffns = [candidate.sparse_ffn(self.arrays, self.tune.device) for candidate in candidates]
        sums, samples = [_ScoreSums() for _ in candidates], 0
        for x in self.tune.blocks(self._rows()):
            h, routed = td.neurons(self.d, self.w, x), routed_neurons(self.d, self.w, x)
            energies = energy(h, self.w)
            samples += len(x)
            for ffn, score_sums in zip(ffns, sums, strict=True):
                score_sums.add(ffn.scores(self.d, self.w, x), energies, routed)
        values = samples * self.d.neurons
        for candidate, score_sums in zip(candidates, sums, strict=True):
            layer, neuron = candidate.layer, self._bytes(candidate)
            for limit in sorted(set(score_sums.limits() if limits is None else limits)):
                read, kept, lost = score_sums.at(limit)
                reads = Reads.of(neuron, layer, read / values, kept / values)
                error = lost / max(self.tune.state, 1e-30)
                yield replace(candidate.limited(limit), reads=reads, error=error)

    def try_ranks(self, starts: WarmStarts, ranks: Sequence[int], training_round: int) -> None:
        """Candidates at some ranks, each as if it were alone: as the warm start, and trained."""
        self.tried.extend(ranks)
        warm = [starts.at(rank) for rank in ranks]
        batches = self.fit.batches(self.spec.batch, self.rng(training_round))
        with torch.enable_grad():
            trained = train(
                warm,
                batches,
                self.d,
                self.w,
                steps=self.spec.steps,
                learning_rate=self.spec.learning_rate,
                on_step=self.on_step,
            )
        with torch.inference_mode():
            made = [
                (p, rank, is_trained)
                for rank, *both in zip(ranks, warm, trained, strict=True)
                for p, is_trained in zip(both, (False, True), strict=True)
                if self.spec.steps or not is_trained
            ]
            for p, rank, is_trained in made:
                prefix = _array_prefix(rank, is_trained)
                self.arrays.update({f"{prefix}/{k}": getattr(p, k).numpy(force=True) for k in ("down", "up", "bias")})
            candidates = [
                _unmeasured("predicted", rank=rank, trained=is_trained, format=fmt)
                for p, rank, is_trained in made
                for fmt in self.spec.predictor_formats
                if not any(FORMATS[fmt].overflows(getattr(p, k).numpy(force=True)) for k in ("down", "up"))
            ]
            self.found.extend(self._measured(candidates))

    def try_further(self, starts: WarmStarts, training_round: int) -> None:
        """Candidates at the rank beside those tried, if the best predictor has the smallest or the largest of them."""
        rank = self._next_rank()
        if rank is not None:
            self.try_ranks(starts, [rank], training_round)

    def _next_rank(self) -> int | None:
        tried = sorted(self.tried)
        step, full = _rank_step(self.d, min(FORMATS[f].columns_per_line for f in self.spec.predictor_formats))
        most = self.spec.layer_error(self.d.n_layers)
        good = [c for c in self.found if c.layer.rank is not None and c.error <= most]
        if not good:
            # All lose too much: a higher rank may lose less.
            wanted = tried[-1] * 3 // 2
        else:
            best = min(good, key=lambda c: c.ps(self.spec.processor, self._bytes(c))).layer.rank
            wanted = tried[0] // 2 if best == tried[0] else tried[-1] * 3 // 2 if best == tried[-1] else 0
        rank = -(-wanted // step) * step
        return rank if step <= rank <= full and rank not in tried else None

    def _bytes(self, candidate: Candidate) -> FfnBytes:
        return FfnBytes(self.d, self.spec.ffn_format, candidate.format or self.spec.predictor_formats[0])


@dataclass(frozen=True, kw_only=True)
class Search:
    """How candidates on one rung are found."""

    find: Callable[[Ladder], None]
    needs_zeros: bool
    """Whether it finds anything only where the activation has zeros."""
    trains: bool = False
    """Whether it trains predictors; otherwise it goes through the tune text once."""


SEARCHES: Mapping[str, Search] = {
    "threshold": Search(find=Ladder.find_thresholds, needs_zeros=False),
    "predicted": Search(find=Ladder.find_predictors, needs_zeros=True, trains=True),
}
"""The search of each rung, in the order in which they run; exact rungs have none."""


def searches_for(rungs: Collection[str], d: Decoder) -> list[Search]:
    """The searches for those of the rungs that suit a model."""
    return [search for rung, search in SEARCHES.items() if rung in rungs and (d.sparse or not search.needs_zeros)]


def initial_ranks(d: Decoder, formats: Sequence[str], density: float, top_share: float) -> list[int]:
    """Ranks around the one that suits density and skewness (see `initial_rank`), sorted.

    They fill whole cache lines in one of the formats: a row of `up` is padded to them, and ranks in between would cost
    the same.
    """
    ranks = set()
    for fmt in formats:
        step, full = _rank_step(d, FORMATS[fmt].columns_per_line)
        base = min(initial_rank(d, density, top_share, step), full // step * step)
        wanted = (max(step, round(base * factor / step) * step) for factor in RANK_FACTORS)
        ranks |= {rank for rank in wanted if rank <= full}
    return sorted(ranks)


def _rank_step(d: Decoder, columns: int) -> tuple[int, int]:
    """The step between ranks that fill lines of so many columns, and the full rank."""
    full = min(d.neuron_width, d.d_ff)
    return min(columns, full), full
