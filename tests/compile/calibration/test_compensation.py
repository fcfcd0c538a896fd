"""What rounding loses is made good: products err less. Where nothing can be made good it is rounding to nearest."""

import pytest

pytest.importorskip("torch")

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.calibration.quantising.compensation import DAMPING, inverse_factor, round_along_inputs, round_inputs
from pi_compile.results import Stored
from pi_runtime.artifact.formats import FORMATS, Format
from pi_runtime.artifact.quantisation import dequantise, quantise

Q4 = FORMATS["q4"]
Floats = npt.NDArray[np.float32]


def correlated(k: int, tokens: int = 600, seed: int = 0) -> Floats:
    """Inputs (tokens, K) that have much in common, of different sizes."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, k)) @ (rng.standard_normal((k, k)) / np.sqrt(k) + np.eye(k))
    return (mixed * np.exp(rng.standard_normal(k))).astype(np.float32)


def moment(x: Floats) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float64).T @ x)


def values(stored: Stored, columns: int, fmt: Format = Q4) -> Floats:
    return dequantise(fmt, *stored, columns)


def normal(*shape: int) -> Floats:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


@pytest.mark.parametrize("k", [32, 40, 100, 288])
def test_products_err_less_than_rounded_to_nearest(k: int) -> None:
    x, w, v = correlated(k), normal(70, k), normal(k, 70)
    along = values(round_along_inputs(Q4, w, inverse_factor(moment(x))), k)
    assert np.square(x @ (along - w).T).sum() < 0.8 * np.square(x @ (values(quantise(Q4, w), k) - w).T).sum()
    inputs = values(round_inputs(Q4, v, moment(x)), 70)
    assert np.square(x @ (inputs - v)).sum() < 0.8 * np.square(x @ (values(quantise(Q4, v), 70) - v)).sum()


@pytest.mark.parametrize("name", ["q5", "q6", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"])
def test_every_format_with_scales_of_blocks_or_groups_gains(name: str) -> None:
    x, w, fmt = correlated(256), normal(70, 256), FORMATS[name]
    along = values(round_along_inputs(fmt, w, inverse_factor(moment(x))), 256, fmt)
    plain = values(quantise(fmt, w), 256, fmt)
    assert np.square(x @ (along - w).T).sum() < 0.8 * np.square(x @ (plain - w).T).sum()
    alone = inverse_factor(torch.eye(256, dtype=torch.float64))
    weighed = quantise(fmt, w, 1 / np.square(alone.diagonal().numpy()))
    for found, expected in zip(round_along_inputs(fmt, w, alone), weighed, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_other_text_of_the_same_kind_gains_too() -> None:
    x, w = correlated(96, tokens=4000), normal(50, 96)
    along = values(round_along_inputs(Q4, w, inverse_factor(moment(x[:2000]))), 96)
    held_out = x[2000:]
    nearest = np.square(held_out @ (values(quantise(Q4, w), 96) - w).T).sum()
    assert np.square(held_out @ (along - w).T).sum() < 0.8 * nearest


def test_inputs_that_have_nothing_in_common_are_rounded_to_nearest() -> None:
    w, alike = normal(30, 64), torch.eye(64, dtype=torch.float64)
    np.testing.assert_array_equal(values(round_inputs(Q4, w.T.copy(), alike), 30), values(quantise(Q4, w.T), 30))
    for found, plain in zip(round_along_inputs(Q4, w, inverse_factor(alike)), quantise(Q4, w), strict=True):
        np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("dead", [[3], [0, 1, 2, 50], list(range(64))])
def test_an_input_that_is_always_zero_is_rounded_to_nearest(dead: list[int]) -> None:
    x, v = correlated(64), normal(64, 96)
    x[:, dead] = 0
    found = values(round_inputs(Q4, v, moment(x)), 96)
    np.testing.assert_array_equal(found[dead], values(quantise(Q4, v[dead]), 96))
    others = [k for k in range(64) if k not in dead]
    v[dead] *= 3
    np.testing.assert_array_equal(values(round_inputs(Q4, v, moment(x)), 96)[others], found[others])


def test_what_is_on_the_grid_stays() -> None:
    """Nothing is lost, so there is nothing to make good."""
    x, w = correlated(64), values(quantise(Q4, normal(20, 64)), 64)
    np.testing.assert_array_equal(values(round_along_inputs(Q4, w, inverse_factor(moment(x))), 64), w)
    v = values(quantise(Q4, normal(64, 32)), 32)
    np.testing.assert_array_equal(values(round_inputs(Q4, v, moment(x)), 32), v)


def test_it_is_the_definition() -> None:
    """Row by row, with the inverse of what is left taken anew each time: Frantar et al., equations 2 and 3."""
    x, v = correlated(12), normal(12, 64)
    h = moment(x).numpy()
    h = h + DAMPING * np.diag(h).mean() * np.eye(12)
    order = np.argsort(-np.square(x.astype(np.float64)).sum(0), kind="stable")
    w, expected = v.astype(np.float64), np.zeros_like(v)
    for n, k in enumerate(order):
        left = order[n:]
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        expected[k] = values(quantise(Q4, w[k : k + 1].astype(np.float32)), 64)[0]
        w[left] -= np.outer(inverse[:, 0] / inverse[0, 0], w[k] - expected[k])
    found = values(round_inputs(Q4, v, moment(x)), 64)
    # A value between two of the grid may go either way by the last bit, and what follows then differs.
    assert (np.abs(found - expected) < 1e-6).mean() > 0.95


def test_rows_do_not_know_each_other() -> None:
    x, w = correlated(64), normal(2100, 64)
    factor = inverse_factor(moment(x))
    together, alone = round_along_inputs(Q4, w, factor), round_along_inputs(Q4, w[2050:], factor)
    close = np.isclose(values(together, 64)[2050:], values(alone, 64), atol=1e-6)
    assert close.mean() > 0.95
