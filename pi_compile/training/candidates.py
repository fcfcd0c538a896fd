"""The ladder of one layer: ways to run it, with what each reads and loses on the tune text.

threshold   magnitudes of a(z) up to a quantile over the fit text count as 0, for a few densities (CATS, TEAL)
sign        neurons whose signs agree with the input's in more than a margin of columns, for a few margins (SparseInfer)
predicted   a few ranks, each warm start untrained and trained, in each number format, for a few thresholds

Thresholds of scores and margins are set by what may be lost: the neurons not predicted hold at most a share of the
layer's energy; sums by score say at once what each of them reads and loses. Ranks start around the one that sparsity
and skewness suggest; while the best predictor has the smallest or the largest of them, one beyond is tried. N samples,
D model width, F neurons.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from pi_compile.cost_model.ffn_time import Reads
from pi_compile.cost_model.processors import Processor
from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.predictor import Predictor, WarmStarts, energy, routed, second_moment, starting_rank, train
from pi_compile.torch_model.sparse_ffn import Selection, agreement, magnitudes
from pi_compile.training.histogram import Histogram
from pi_compile.training.samples import NEURON_VALUES, Samples
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.sizes import FfnBytes

LOST_SHARES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Shares of the neurons' energy that thresholds and margins are tried for."""
KEPT_SHARES = (0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Shares of the neurons that fire which thresholds of the activation leave."""
RANK_FACTORS = (0.5, 1.0, 1.5)
SEARCHES = 2
"""Ranks tried beyond these."""
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a layer, as measured on the tune text."""

    rung: str
    rank: int | None = None
    trained: bool = False
    """Whether the predictor is more than its warm start."""
    format: str | None = None
    """Of the predictor."""
    threshold: float = 0.0
    """Of the predictor's scores, or of the activation's magnitude."""
    margin: int = 0
    reads: Reads
    error: float
    """E‖Δy‖² ÷ E‖x‖² of the state it is missing from, to first order: the energy of the neurons left out."""

    @property
    def name(self) -> str:
        """Of its predictor's arrays."""
        return f"{'trained' if self.trained else 'start'}-{self.rank}"

    def raw(self, arrays: Mapping[str, np.ndarray[Any, Any]], device: str = "cpu") -> Predictor | None:
        """Its predictor as trained, with its threshold; packing rounds it to its format."""
        if self.rank is None:
            return None
        parts = (torch.from_numpy(arrays[f"{self.name}/{part}"]).to(device) for part in ("down", "up", "bias"))
        return Predictor(*parts).shifted(self.threshold)

    def selection(self, arrays: Mapping[str, np.ndarray[Any, Any]], device: str) -> Selection:
        """What the artifact will do."""
        raw = self.raw(arrays, device)
        stored = None if raw is None or self.format is None else raw.stored_as(self.format)
        threshold = self.threshold if self.rung == "threshold" else 0.0
        return Selection(rung=self.rung, predictor=stored, threshold=threshold, margin=self.margin)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Self:
        return cls(**{**value, "reads": Reads(**value["reads"])})


@dataclass
class _Sums:
    """Over a text, by score: neurons looked at, those that fire, and their energy."""

    looked_at: Histogram = field(default_factory=Histogram)
    fire: Histogram = field(default_factory=Histogram)
    energy: Histogram = field(default_factory=Histogram)
    largest: float = -math.inf

    def add(self, scores: torch.Tensor, lost: torch.Tensor, looked_at: torch.Tensor | None) -> None:
        fires = lost > 0
        self.largest = max(self.largest, float(scores.max()))
        self.looked_at.add(scores if looked_at is None else scores[looked_at])
        self.fire.add(scores[fires])
        self.energy.add(scores[fires], lost[fires])

    def cuts(self) -> list[float]:
        """Up to which the neurons hold at most each share of the energy."""
        return [self.largest] if self.energy.empty else [self.energy.threshold(share) for share in LOST_SHARES]

    def at(self, cut: float) -> tuple[float, float, float]:
        """Neurons above a cut, those of them that fire, and the energy that is not above it."""
        return self.looked_at.above(cut), self.fire.above(cut), self.energy.total - self.energy.above(cut)


@dataclass(frozen=True, kw_only=True)
class LadderSpec:
    """What is tried."""

    rungs: Sequence[str]
    formats: Sequence[str]
    """Of predictors."""
    ffn_format: str
    processor: Processor
    batch: int
    steps: int
    learning_rate: float
    error: float
    """The error that a layer may about make: what the local search for a rank looks at."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ladder:
    """One layer, its samples, and what was found."""

    d: Decoder
    w: td.Weights
    fit: Samples
    tune: Samples
    spec: LadderSpec
    rng: Callable[[int], np.random.Generator]
    """A generator for each round of training."""
    stepped: Callable[[], None] = lambda: None
    found: list[Candidate] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)

    def climb(self, density: float, top_share: float) -> None:
        """Try everything the recipe allows. `density`, `top_share`: see `starting_rank`."""
        with torch.inference_mode():
            if "threshold" in self.spec.rungs:
                self.found.extend(self._judged([_untried(rung="threshold")], self._thresholds()))
            if "sign" in self.spec.rungs and self.d.sparse:
                self.found.extend(self._judged([_untried(rung="sign")]))
        # What is not sparse has nothing to predict.
        if "predicted" in self.spec.rungs and self.d.sparse:
            self._predictors(density, top_share)

    def as_json(self) -> list[dict[str, Any]]:
        return [asdict(c) for c in self.found]

    def _rows(self) -> int:
        return max(1, NEURON_VALUES // self.d.neurons)

    def _thresholds(self) -> list[float]:
        """Magnitudes that leave shares of what fires, over the fit text."""
        histogram = Histogram()
        for x in self.fit.blocks(self._rows()):
            found = magnitudes(self.d, self.w, x)
            histogram.add(found[found > 0])
        return [] if histogram.empty else [histogram.threshold(1 - share) for share in KEPT_SHARES]

    def _judged(self, ways: Sequence[Candidate], cuts: Sequence[float] | None = None) -> Iterator[Candidate]:
        """Each way cut at several places, with what it reads and loses on the tune text; one pass for all.

        `cuts`: None for those up to which the neurons hold at most a share of the energy.
        """
        scorers, sums = [self._scorer(way) for way in ways], [_Sums() for _ in ways]
        samples = 0
        for x in self.tune.blocks(self._rows()):
            h, looked_at = td.neurons(self.d, self.w, x), routed(self.d, self.w, x)
            lost = energy(h, self.w)
            samples += len(x)
            for scorer, of_way in zip(scorers, sums, strict=True):
                of_way.add(scorer(x), lost, looked_at)
        values = samples * self.d.neurons
        for way, of_way in zip(ways, sums, strict=True):
            places = of_way.cuts() if cuts is None else cuts
            for cut in sorted(set(places)):
                read, kept, lost_energy = of_way.at(cut)
                reads = Reads.of(self._bytes(way), way.rung, way.rank, read / values, kept / values)
                # Agreements are integers: above a number is above the integer below it.
                where: dict[str, Any] = {"margin": math.floor(cut)} if way.rung == "sign" else {"threshold": cut}
                yield replace(way, reads=reads, error=lost_energy / max(self.tune.state, 1e-30), **where)

    def _scorer(self, way: Candidate) -> Callable[[torch.Tensor], torch.Tensor]:
        """What a way compares with its threshold or margin."""
        if way.rung == "threshold":
            return lambda x: magnitudes(self.d, self.w, x)
        if way.rung == "sign":
            return lambda x: agreement(self.w, x)
        predictor = replace(way, threshold=0.0).selection(self.arrays, self.tune.device).predictor
        assert predictor is not None
        return predictor.scores

    def _predictors(self, density: float, top_share: float) -> None:
        moment = second_moment(self.fit.blocks(), self.d.d_model)
        starts = WarmStarts(self.w["ffn/first"], self.w.get("ffn/first_bias"), moment, self.d.n_experts)
        tried = ranks_for(self.d, self.spec.formats, density, top_share)
        self._train(starts, tried, 0)
        for search in range(SEARCHES):
            beyond = self._beyond(tried)
            if beyond is None:
                break
            self._train(starts, [beyond], 1 + search)
            tried = sorted([*tried, beyond])

    def _train(self, starts: WarmStarts, ranks: Sequence[int], search: int) -> None:
        warm = [starts.at(rank) for rank in ranks]
        batches = self.fit.batches(self.spec.batch, self.rng(search))
        with torch.enable_grad():
            trained = train(
                warm,
                batches,
                self.d,
                self.w,
                steps=self.spec.steps,
                learning_rate=self.spec.learning_rate,
                stepped=self.stepped,
            )
        with torch.inference_mode():
            made = [(p, rank, False) for p, rank in zip(warm, ranks, strict=True)]
            if self.spec.steps:
                made += [(p, rank, True) for p, rank in zip(trained, ranks, strict=True)]
            for p, rank, is_trained in made:
                name = f"{'trained' if is_trained else 'start'}-{rank}"
                self.arrays.update({f"{name}/{k}": getattr(p, k).numpy(force=True) for k in ("down", "up", "bias")})
            ways = [
                _untried(rung="predicted", rank=rank, trained=is_trained, format=fmt)
                for p, rank, is_trained in made
                for fmt in self.spec.formats
                if not any(FORMATS[fmt].overflows(getattr(p, k).numpy(force=True)) for k in ("down", "up"))
            ]
            self.found.extend(self._judged(ways))

    def _beyond(self, tried: Sequence[int]) -> int | None:
        """The rank beside those tried, if the best predictor has the smallest or the largest of them."""
        step, full = _step(self.d, min(FORMATS[f].columns_per_line for f in self.spec.formats))
        good = [c for c in self.found if c.rung == "predicted" and c.error <= self.spec.error]
        if not good:
            # All lose too much: what knows more may not.
            wished = tried[-1] * 3 // 2
        else:
            best = min(good, key=lambda c: c.reads.ps(self.spec.processor, self._bytes(c))).rank
            wished = tried[0] // 2 if best == tried[0] else tried[-1] * 3 // 2 if best == tried[-1] else 0
        rank = -(-wished // step) * step
        return rank if step <= rank <= full and rank not in tried else None

    def _bytes(self, way: Candidate) -> FfnBytes:
        return FfnBytes(self.d, self.spec.ffn_format, way.format or self.spec.formats[0])


def ranks_for(d: Decoder, formats: Sequence[str], density: float, top_share: float) -> list[int]:
    """Ranks around the one that suits density and skewness, in whole cache lines of each format: a row of `up` is
    padded to them, and ranks in between would cost the same."""
    ranks = set()
    for fmt in formats:
        step, full = _step(d, FORMATS[fmt].columns_per_line)
        base = min(starting_rank(d, density, top_share, step), full // step * step)
        wished = (max(step, round(base * factor / step) * step) for factor in RANK_FACTORS)
        ranks |= {rank for rank in wished if rank <= full}
    return sorted(ranks)


def _step(d: Decoder, columns: int) -> tuple[int, int]:
    full = min(d.d_model, d.d_ff)
    return min(columns, full), full


def _untried(**way: Any) -> Candidate:
    return Candidate(reads=Reads(rung=way["rung"], predictor=0, first=0, rest=0), error=0.0, **way)
