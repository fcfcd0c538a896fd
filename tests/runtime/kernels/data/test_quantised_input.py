"""Quantised inputs: floats, bytes, scales and sums, equal to their definition to the last bit."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rounding import input_blocks
from support.stored import ROW_FORMATS, quantised_inputs

from pi_runtime.artifact.footprint import input_nbytes
from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels import reference
from pi_runtime.kernels.data import quantised_input

FEW = settings(max_examples=60, deadline=None, derandomize=True)
QUANTISED = [FORMATS[name].code for name in ROW_FORMATS if FORMATS[name].quantised]


def padded_columns(columns: int) -> int:
    return -(-columns // 128) * 128


def parts_of(x_at: np.ndarray, columns: int) -> dict[str, np.ndarray]:
    """The parts of an input, by the layout in the docstring of `quantised_input`."""
    p, parts, at = padded_columns(columns), {}, 0
    layout = {"x": (p, "f4"), "stored": (p, "i1"), "s": (p // 32, "f4"), "sum": (p // 32, "i4")}
    layout |= {"half": (p // 32, "i4"), "q": (p, "i1")}
    for name, (n, dtype) in layout.items():
        nbytes = n * np.dtype(dtype).itemsize
        parts[name] = x_at[at : at + nbytes].view(dtype)
        at += nbytes
    assert at == x_at.nbytes == input_nbytes(columns)
    return parts


def in_stored_order(q_P: np.ndarray, blocks: int) -> np.ndarray:
    """In every whole group of eight blocks, index 32 k + 4 b + j holds column 32 b + 4 k + j."""
    grouped = blocks // 8 * 8 * BLOCK
    fours = q_P[:grouped].reshape(-1, 8, 8, 4).swapaxes(1, 2)
    return np.concatenate([fours.ravel(), q_P[grouped:]])


def check(fmt: int, x_D: np.ndarray) -> None:
    columns = len(x_D)
    p = padded_columns(columns)
    parts = parts_of(quantised_inputs(fmt, x_D[None])[0], columns)
    q_BJ, t_B = (part[0] for part in input_blocks(x_D[None]))
    blocks = len(t_B)
    np.testing.assert_array_equal(parts["x"].view(np.uint32), np.pad(x_D, (0, p - columns)).view(np.uint32))
    q_P, s_B = parts["q"].astype(np.int64), parts["s"]
    np.testing.assert_array_equal(q_P, np.pad(q_BJ.ravel(), (0, p - blocks * BLOCK)))
    np.testing.assert_array_equal(s_B, np.pad(t_B, (0, p // BLOCK - blocks)))
    np.testing.assert_array_equal(parts["sum"], -q_P.reshape(-1, BLOCK).sum(1))
    np.testing.assert_array_equal(parts["half"], -q_P.reshape(-1, BLOCK)[:, : BLOCK // 2].sum(1))
    np.testing.assert_array_equal(parts["stored"], in_stored_order(q_P, blocks))
    meant_D = (q_P * np.repeat(s_B, BLOCK)).astype(np.float32)[:columns]
    np.testing.assert_array_equal(meant_D, reference.rounded(x_D[None])[0])


@FEW
@given(st.sampled_from(QUANTISED), st.integers(1, 800), st.integers(-45, 38), st.integers(0, 999))
@example(QUANTISED[0], 1, 0, 0)
@example(QUANTISED[1], 128, 0, 0)
@example(QUANTISED[0], 129, -40, 0)
@example(QUANTISED[0], 224, 0, 0)
@example(QUANTISED[1], 225, 0, 0)
@example(QUANTISED[0], 800, 0, 0)
def test_an_input(fmt: int, columns: int, exponent: int, seed: int) -> None:
    """Magnitudes from denormals to the largest numbers, some blocks zero, some far smaller than their neighbours."""
    rng = np.random.default_rng(seed)
    x_D = rng.standard_normal(columns) * 10.0**exponent * np.repeat(10.0 ** rng.integers(-6, 1, 25), BLOCK)[:columns]
    x_D[np.repeat(rng.random(25) < 0.1, BLOCK)[:columns]] = 0
    check(fmt, np.clip(x_D, -3.4e38, 3.4e38).astype(np.float32))


@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize(
    "largest", [0.0, 2.0**-149, 2.0**-127, 126 * 2.0**-126, 127 * 2.0**-126, 1e-30, 127.0, 3e38, 3.4028e38]
)
def test_magnitudes_at_the_ends(fmt: int, largest: float) -> None:
    """The scale of 127 · 2⁻¹²⁶ is the smallest normal number; a block below that counts as zeros."""
    x_D = (largest * np.linspace(-1, 1, 70)).astype(np.float32)
    check(fmt, x_D)
    q_P = parts_of(quantised_inputs(fmt, x_D[None])[0], 70)["q"]
    assert q_P[0] == (-127 if largest >= 127 * 2.0**-126 else 0)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_halves_go_to_the_even_neighbour(fmt: int) -> None:
    x_D = np.float32([127, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 125.5, 126.5, -125.5, -126.5])
    q_P = parts_of(quantised_inputs(fmt, x_D[None])[0], len(x_D))["q"]
    assert q_P[: len(x_D)].tolist() == [127, 0, 2, 2, 4, 0, -2, -2, 126, 126, -126, -126]
    check(fmt, x_D)


@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_what_bytes_cannot_say_is_said_by_the_scale(fmt: int, wrong: float) -> None:
    x_D = np.ones(96, np.float32)
    x_D[40] = wrong
    s_B = parts_of(quantised_inputs(fmt, x_D[None])[0], 96)["s"]
    assert np.isfinite(s_B[[0, 2, 3]]).all()
    assert not np.isfinite(s_B[1])


@pytest.mark.parametrize("fmt", sorted({FORMATS[name].code for name in ROW_FORMATS} - set(QUANTISED)))
def test_float_formats_need_the_floats_alone(fmt: int) -> None:
    x_D = np.random.default_rng(0).standard_normal(37, np.float32)
    x_at = quantised_inputs(fmt, x_D[None])[0]
    np.testing.assert_array_equal(x_at[: 4 * 128].view(np.float32), np.pad(x_D, (0, 91)))
    assert np.all(x_at[4 * 128 :] == 0xA5), "spent time on bytes"


def test_inputs_of_tokens_lie_one_after_the_other() -> None:
    for columns in (1, 127, 128, 129, 2048):
        p = padded_columns(columns)
        assert quantised_input.column_order_at(0, p) + p == input_nbytes(columns)
