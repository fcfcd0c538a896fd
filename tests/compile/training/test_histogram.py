"""Thresholds from histograms: they lose what they may, and at most one bin less."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_compile.training.candidates import ValueHistogram

FRACTIONS = (0.0, 1e-4, 0.01, 0.1, 0.25, 0.5, 0.75)


def of(values: np.ndarray, weights: np.ndarray | None = None, pieces: int = 1) -> ValueHistogram:
    histogram = ValueHistogram()
    for v, w in zip(
        np.array_split(values, pieces),
        [None] * pieces if weights is None else np.array_split(weights, pieces),
        strict=True,
    ):
        histogram.add(torch.from_numpy(v), None if w is None else torch.from_numpy(w))
    return histogram


def lost_at(threshold: float, values: np.ndarray, weights: np.ndarray) -> float:
    return float(weights[values <= np.float32(threshold)].sum(dtype=np.float64) / weights.sum(dtype=np.float64))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 40),
    spread=st.sampled_from([1e-20, 1e-3, 1.0, 1e4]),
    pieces=st.integers(1, 3),
    fraction=st.sampled_from(FRACTIONS),
)
def test_a_threshold_loses_what_it_may_and_no_less(
    seed: int, n: int, spread: float, pieces: int, fraction: float
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((n, 3)) * spread * rng.integers(0, 2, (n, 3))).astype(np.float32)
    weights = (rng.integers(0, 4, (n, 3)) * rng.integers(0, 2, (n, 3))).astype(np.float32)
    weights[0, 0] = 1
    threshold = of(values, weights, pieces).threshold(fraction)
    assert lost_at(threshold, values, weights) <= fraction
    higher = values[values > np.float32(threshold)].min()
    one_bin_on = float(higher + abs(higher) * 2**-6) + 1e-37
    assert lost_at(one_bin_on, values, weights) > fraction  # the next one that changes anything


@pytest.mark.parametrize(
    "values", [[-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0], [-256.0, -255.0, -1.0, 0.0, 5.0, 255.0, 256.0]]
)
def test_integers_of_eight_bits_are_told_apart(values: list[float]) -> None:
    histogram = of(np.array(values, np.float32))
    for kept in range(1, 8):
        threshold = histogram.threshold(1 - kept / 7 + 1e-9)
        assert sum(v > threshold for v in values) == kept


def test_without_weight_it_is_empty() -> None:
    histogram = ValueHistogram()
    assert histogram.empty
    histogram.add(torch.randn(5), torch.zeros(5))
    histogram.add(torch.empty(0))
    assert histogram.empty
    histogram.add(torch.zeros(1), torch.ones(1))
    assert not histogram.empty


def test_everything_weighs_the_same_unless_told() -> None:
    values = np.arange(1, 101, dtype=np.float32)
    histogram = of(values)
    assert int((values <= histogram.threshold(0.1)).sum()) == 10
    assert (values > histogram.threshold(0.0)).all()
