"""Score windows of text under several runs of one model, and how far each run's predictions are from the first one's.

    perplexity  =  exp( mean of −log p(next token) )
    divergence  =  mean over positions of  Σ_v P(v) · ( log P(v) − log Q(v) )        nats

Intervals are 95 % intervals of what is measured on a sample. P is the first run's distribution of the next token, Q the
other's (the Kullback–Leibler divergence). Shape letters: N windows, L layers, T tokens of a window, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import FfnBytes

Windows = npt.NDArray[np.int64]
Examine = Callable[[Windows], tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]
"""Token ids (T,) → logits (T, V), and the counts of `Score.counts_L3`."""
Run = Callable[[], AbstractContextManager[Examine]]
"""Opens a model to examine windows with."""
KEPT_NBYTES = 1 << 30
"""Most bytes of the first run's log-probabilities that are kept: each run is opened once for so many windows."""


@dataclass(frozen=True, eq=False)
class Score:
    """Results of one run on the windows."""

    perplexity: float
    losses_N: npt.NDArray[np.float64]
    """Mean −log p of the next token in each of the N windows."""
    best: npt.NDArray[np.int64]
    """Most likely next token at every position."""
    counts_L3: npt.NDArray[np.int64]
    """For each layer, the neurons that fire, those that are read, and those that are both, summed over the tokens."""
    tokens: int
    divergence: float | None = None
    """Mean Kullback–Leibler divergence from the first run, in nats; None for that one."""

    def ffn_bytes(self, m: Manifest, mode: str) -> list[float]:
        """FFN bytes per token of each layer, predictors included; experts count if the token is routed to them."""
        neuron, experts = FfnBytes.of(m.decoder, m.formats), m.decoder.experts_per_token
        _, read, both = self.counts_L3.T / self.tokens
        kept = np.full_like(both, experts * m.decoder.d_ff) if mode == "dense" else both
        selectors = [layer.rank if mode == "predicted" else None for layer in m.layers]
        predictors = [0 if rank is None else experts * neuron.predictor(rank) for rank in selectors]
        return [float(r * neuron.first + k * neuron.rest) + p for r, k, p in zip(read, kept, predictors, strict=True)]


@dataclass
class _Sums:
    """What a run has found in the windows so far."""

    losses: list[float] = field(default_factory=list)
    best: list[npt.NDArray[np.int64]] = field(default_factory=list)
    counts: list[npt.NDArray[np.int64]] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)

    def score(self, windows: Windows) -> Score:
        positions = windows.size - len(windows)
        return Score(
            perplexity=math.exp(sum(self.losses) / positions),
            losses_N=np.array(self.losses) / (windows.shape[1] - 1),
            best=np.concatenate(self.best),
            counts_L3=np.sum(self.counts, axis=0),
            tokens=windows.size,
            divergence=sum(self.divergences) / positions if self.divergences else None,
        )


def score_windows(
    windows: Windows, runs: Mapping[str, Run], vocabulary: int, on_window: Callable[[], None] = lambda: None
) -> dict[str, Score]:
    """The score of each run; `on_window` is called after each window of each run.

    One run is open at a time, with the first one's log-probabilities of some windows (`KEPT_NBYTES`) in memory.
    """
    found: dict[str, _Sums] = {name: _Sums() for name in runs}
    together = max(1, KEPT_NBYTES // (4 * vocabulary * windows.shape[1]))
    for start in range(0, len(windows), together):
        base: list[npt.NDArray[np.float32]] = []
        for n, (name, opened) in enumerate(runs.items()):
            with opened() as examine:
                for i, ids in enumerate(windows[start : start + together]):
                    logits, counts_L3 = examine(ids)
                    logp = log_softmax(logits[:-1].astype(np.float64), axis=1)
                    sums = found[name]
                    sums.losses.append(-float(logp[np.arange(len(logp)), ids[1:]].sum()))
                    sums.best.append(logp.argmax(1))
                    sums.counts.append(counts_L3)
                    if n == 0 and len(runs) > 1:
                        base.append(logp.astype(np.float32))
                    elif n:
                        sums.divergences.append(_divergence(base[i], logp))
                    on_window()
    return {name: sums.score(windows) for name, sums in found.items()}


def _divergence(logp: npt.NDArray[np.float32], logq: npt.NDArray[np.float64]) -> float:
    """Σ over positions of the divergence of Q from P; what neither can say has no part in it."""
    p = logp.astype(np.float64)
    with np.errstate(invalid="ignore"):  # −∞ − −∞ of a token that neither gives
        terms = np.exp(p) * (p - logq)
    return float(np.nansum(terms))


CONFIDENCE = 0.95
Interval = tuple[float, float]
"""Lower and upper end."""


def accuracy_interval(right_N: npt.NDArray[np.bool_]) -> Interval:
    """Wilson's interval of the fraction of N items that are right.

    It stays within 0 and 1, and has a width even where all items are right or all are wrong.
    """
    from scipy import stats  # noqa: PLC0415  a second to import

    found = stats.binomtest(int(right_N.sum()), len(right_N)).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def increase_interval(losses_N: npt.NDArray[np.float64], base_N: npt.NDArray[np.float64]) -> Interval | None:
    """Student's t interval of the relative increase of perplexity over a base; None for a single window.

    Both have the mean −log p of the next token in each of N windows. The windows are paired: how hard a window is to
    predict cancels, so that the interval is much narrower than those of the two perplexities.
    """
    from scipy import stats  # noqa: PLC0415  a second to import

    if len(losses_N) < 2:
        return None
    change_N = losses_N - base_N
    margin = stats.t.ppf((1 + CONFIDENCE) / 2, len(change_N) - 1) * stats.sem(change_N)
    return math.expm1(change_N.mean() - margin), math.expm1(change_N.mean() + margin)
