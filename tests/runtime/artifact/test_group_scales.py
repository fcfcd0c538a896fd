"""Formats with scales of groups or tables: how blocks are rounded, with weights of the errors and without."""

from collections.abc import Callable

import numpy as np
import pytest

from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.quantisation import dequantise, quantise

WHOLE = [name for name in WEIGHT_FORMATS if not FORMATS[name].summed]
KINDS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda rng: rng.standard_normal((32, 512)),
    "with outliers": lambda rng: rng.standard_t(3, (32, 512)),
    "off centre": lambda rng: rng.standard_normal((32, 512)) + 0.7,
    "positive": lambda rng: rng.gamma(2.0, size=(32, 512)),
    "negative": lambda rng: -rng.gamma(2.0, size=(32, 512)),
    "of many sizes": lambda rng: rng.standard_normal((32, 512)) * np.exp(rng.normal(0, 1.5, (32, 16))).repeat(32, 1),
    "few values": lambda rng: rng.integers(-2, 3, (32, 512)) / 4,
}
THEIRS: dict[str, dict[str, float]] = {
    "q4_k": {
        "normal": 0.00513687,
        "with outliers": 0.00867198,
        "off centre": 0.00342446,
        "positive": 0.00197306,
        "negative": 0.00175328,
        "of many sizes": 0.00449772,
        "few values": 0.00204381,
    },
    "q5_k": {
        "normal": 0.00130952,
        "with outliers": 0.00220184,
        "off centre": 0.000867335,
        "positive": 0.000475272,
        "negative": 0.00047231,
        "of many sizes": 0.00105987,
        "few values": 0.000491033,
    },
    "q6_k": {
        "normal": 0.000319723,
        "with outliers": 0.000619991,
        "off centre": 0.000296378,
        "positive": 0.000338366,
        "negative": 0.000338366,
        "of many sizes": 0.00025427,
        "few values": 0.000171725,
    },
    "iq4_nl": {
        "normal": 0.0057933,
        "with outliers": 0.0103873,
        "off centre": 0.00546181,
        "positive": 0.00607074,
        "negative": 0.00607074,
        "of many sizes": 0.00540915,
        "few values": 0.00431544,
    },
    "iq4_xs": {
        "normal": 0.00587795,
        "with outliers": 0.0106162,
        "off centre": 0.00553415,
        "positive": 0.00615706,
        "negative": 0.00615706,
        "of many sizes": 0.00556156,
        "few values": 0.0042963,
    },
    "mxfp4": {
        "normal": 0.0130911,
        "with outliers": 0.0192671,
        "off centre": 0.012411,
        "positive": 0.0134674,
        "negative": 0.0134674,
        "of many sizes": 0.0117797,
        "few values": 0,
    },
    "nvfp4": {
        "normal": 0.00912815,
        "with outliers": 0.00844239,
        "off centre": 0.0091491,
        "positive": 0.00877642,
        "negative": 0.00877642,
        "of many sizes": 0.013247,
        "few values": 0.000976562,
    },
}
"""What llama.cpp 0.3.36's quantiser loses of the same arrays without an importance matrix: Σ (w − ŵ)² ÷ Σ w²."""


def values(kind: str) -> np.ndarray:
    return np.ascontiguousarray(KINDS[kind](np.random.default_rng(7)), np.float32)


def lost(name: str, w: np.ndarray, importance: np.ndarray | None, weights: np.ndarray | float = 1.0) -> float:
    fmt = FORMATS[name]
    found = dequantise(fmt, *quantise(fmt, w, importance), w.shape[-1])
    return float((weights * np.square(w - found, dtype=np.float64)).sum())


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", KINDS)
def test_no_more_is_lost_than_by_llama_cpp(name: str, kind: str) -> None:
    w = values(kind)
    assert lost(name, w, None) / float(np.square(w, dtype=np.float64).sum()) <= THEIRS[name][kind] * 1.0001


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_weighed(name: str, kind: str) -> None:
    w, weights = values(kind), np.random.default_rng(3).chisquare(1, 512).astype(np.float32)
    assert lost(name, w, weights, weights) <= lost(name, w, None, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_more_bits_lose_less(kind: str) -> None:
    w = values(kind)
    assert lost("q5_k", w, None) <= lost("q4_k", w, None)


@pytest.mark.parametrize("name", WHOLE)
def test_a_row_is_rounded_by_itself(name: str) -> None:
    w, fmt = values("normal"), FORMATS[name]
    for one, every in zip(quantise(fmt, w[5:6]), quantise(fmt, w), strict=True):
        np.testing.assert_array_equal(one[0], every[5])


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 2.0**-10, -(2.0**10)])
def test_constants_stay(name: str, value: float) -> None:
    w, fmt = np.full((2, 256), value, np.float32), FORMATS[name]
    w[1, 128:] = 0
    for importance in (None, np.zeros(256, np.float32), np.ones(256, np.float32)):
        found = dequantise(fmt, *quantise(fmt, w, importance), 256)
        np.testing.assert_allclose(found, w, rtol=2e-2)
