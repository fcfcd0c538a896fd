"""95 % intervals of what an evaluation measures on a sample: accuracies, and differences of perplexity."""

import math

import numpy as np
import numpy.typing as npt

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
