"""Penalties on logits, and filters of the tokens that may be drawn, each as its paper has it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_runtime.sequence.sampling import Sampling

Float64s = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]
Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
Mask = npt.NDArray[np.bool_]

GROUPS, LIKELY = 1024, 256
"""Groups of logits, whose maxima bound the k-th largest logit from below; tokens among which a top-p is looked for."""


def candidates(scores: Float32s, sampling: Sampling) -> tuple[npt.NDArray[np.intp], Float64s]:
    """The ids that may be drawn from penalised logits, in rising order, and their probabilities (float64)."""
    top = float(scores.max())
    ids, mass = _shortlist(scores, top, sampling)
    # The shift changes no probability and lets any temperature > 0 divide without reaching +inf or NaN.
    with np.errstate(over="ignore"):
        x: Float64s = (scores[ids].astype(np.float64) - top) / sampling.temperature
    if 0 < sampling.top_k < x.size:
        ids, x = _keep(top_k(x, sampling.top_k), ids, x)
    if mass < 1:
        ids, x = _keep(top_p(x, mass), ids, x)
    if sampling.min_p > 0:
        ids, x = _keep(min_p(x, sampling.min_p), ids, x)
    return ids, softmax(x)


def _shortlist(scores: Float32s, top: float, sampling: Sampling) -> tuple[npt.NDArray[np.intp], float]:
    """Ids that include all which pass the first filter, and the top-p that means the same among these.

    Sorting a large vocabulary, and its exponentials in float64, would take milliseconds.
    """
    s = sampling
    if scores.size >= 2 * GROUPS and 0 < s.top_k <= GROUPS:
        return _likeliest(scores, s.top_k), s.top_p
    if scores.size >= 2 * GROUPS and s.top_k == 0 and s.top_p < 1:
        ids = _likeliest(scores, LIKELY)
        with np.errstate(over="ignore"):
            e = np.exp((scores - np.float32(top)) / np.float32(s.temperature))
        mass = s.top_p * e.sum(dtype=np.float64) / e[ids].sum(dtype=np.float64)
        # Otherwise ids beyond these are kept too, or the sums do not tell.
        if mass < 1 - 1e-5:
            return ids, mass
    if s.top_k == 0 and s.top_p == 1 and s.min_p > 0:
        # One part in a million less, for rounding; the filter itself decides.
        least = top + s.temperature * math.log(s.min_p * (1 - 1e-6))
        return np.flatnonzero(scores.astype(np.float64) >= least), s.top_p
    return _possible(scores), s.top_p


def _likeliest(scores: Float32s, count: int) -> npt.NDArray[np.intp]:
    """At least `count` ids, if as many are possible: the likeliest, and all ties with the least likely of them."""
    # Of `count` groups the largest are at least this, so the count-th largest of all is, and so are its ties.
    largest = scores[: scores.size // GROUPS * GROUPS].reshape(-1, GROUPS).max(0)
    bound = np.partition(largest, GROUPS - count)[GROUPS - count]
    return np.flatnonzero(scores >= bound) if bound > -np.inf else _possible(scores)


def _possible(scores: Float32s) -> npt.NDArray[np.intp]:
    """The ids whose probability is not 0: a grammar may leave few."""
    return np.flatnonzero(scores > -np.inf)


def softmax(x: Float64s) -> Float64s:
    """exp(x_i) / Σ exp(x)."""
    e: Float64s = np.exp(x - x.max())
    p: Float64s = e / e.sum()
    return p


def penalise(logits: Float32s, seen_ids: Ids, penalty: float) -> Float32s:
    """x_i · r where x_i < 0, x_i / r elsewhere, once for each seen i (Keskar et al. 2019, section 4.1)."""
    if penalty == 1 or not len(seen_ids):
        return logits
    seen = np.unique(np.asarray(seen_ids, np.int64))
    seen = seen[seen < logits.size]
    scores, r = logits.copy(), np.float32(penalty)
    x = logits[seen]
    with np.errstate(all="ignore"):  # an overflow is the caller's to find
        scores[seen] = np.where(x < 0, x * r, x / r)
    return scores


def penalise_repeats(logits: Float32s, answer_ids: Ids, presence: float, frequency: float) -> Float32s:
    """x_i − presence − frequency · n_i for each i that the answer has n_i > 0 times (OpenAI's definition)."""
    if presence == frequency == 0 or not len(answer_ids):
        return logits
    ids, counts = np.unique(np.asarray(answer_ids, np.int64), return_counts=True)
    scores = logits.copy()
    scores[ids] -= (presence + frequency * counts).astype(np.float32)
    return scores


def top_k(x: Float64s, k: int) -> Mask:
    """Whether x_i is at least the k-th largest; ties with it stay."""
    k = min(k, x.size)
    keep: Mask = x >= np.partition(x, x.size - k)[x.size - k]
    return keep


def top_p(x: Float64s, p: float) -> Mask:
    """False for the least likely tokens as long as they sum to at most 1 − p (Holtzman et al. 2020); one is kept."""
    prob = softmax(x)
    # Those below (1 − p) / V are all removed and need no sorting; half of it, so that rounding never removes the most
    # likely one here.
    tail = prob < 0.5 * (1 - p) / x.size
    rising = np.flatnonzero(~tail)
    rising = rising[np.argsort(x[rising], kind="stable")]
    keep: Mask = np.zeros(x.size, np.bool_)
    keep[rising] = prob[tail].sum() + prob[rising].cumsum() > 1 - p
    keep[rising[-1]] = True
    return keep


def min_p(x: Float64s, m: float) -> Mask:
    """Whether a token is at least m times as likely as the most likely one (Nguyen et al. 2024)."""
    p = softmax(x)
    keep: Mask = p >= m * p.max()
    return keep


def _keep(mask: Mask, ids: npt.NDArray[np.intp], x: Float64s) -> tuple[npt.NDArray[np.intp], Float64s]:
    return ids[mask], x[mask]
