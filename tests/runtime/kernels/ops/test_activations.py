"""Activations of rows: near their definition, the same for a number wherever it stands, and nothing else is written."""

import math

import numpy as np
import pytest

from pi_runtime.artifact.decoder import ACTIVATIONS, CLAMP, SWIGLU_SLOPE
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Floats
from pi_runtime.kernels.data.weight_table import CLAMPED_SWIGLU, DRELU, GELU, GELU_TANH, RELU, RELU2, SILU
from pi_runtime.kernels.ops.activations import EMITTED, LANES, activate, times_sigmoid

EDGES = np.array([0, -0.0, 1e-30, -1e-30, 88, -88, 300, -300, CLAMP, np.inf, 5.4, -5.4], np.float32)


@public
def run(activation: int, limit: np.float32, z_K: Floats) -> None:
    activate(activation, limit, z_K)


@public
def run_gate(z_K: Floats, y_K: Floats) -> None:
    times_sigmoid(z_K, y_K)


def activated(activation: int, z_K: np.ndarray, limit: float = 0.0) -> np.ndarray:
    around = np.full(len(z_K) + 2 * LANES, np.float32(7))
    around[LANES:-LANES] = z_K
    run(activation, np.float32(limit), around[LANES:-LANES])
    assert (around[:LANES] == 7).all()
    assert (around[-LANES:] == 7).all()
    return around[LANES:-LANES]


def exact(activation: int, z_K: np.ndarray) -> np.ndarray:
    """In 64 bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            RELU: lambda z: np.maximum(z, 0),
            DRELU: lambda z: np.maximum(z, 0),
            RELU2: lambda z: np.maximum(z, 0) ** 2,
            SILU: lambda z: z / (1 + np.exp(-z)),
            GELU: lambda z: z * (0.5 + 0.5 * np.vectorize(math.erf)(z * math.sqrt(0.5))),
            GELU_TANH: gelu_tanh,
            CLAMPED_SWIGLU: lambda z: np.minimum(z, CLAMP) / (1 + np.exp(-SWIGLU_SLOPE * np.minimum(z, CLAMP))),
        }[activation](z_K.astype(np.float64))


def gelu_tanh(z_K: np.ndarray) -> np.ndarray:
    """In the precision of z."""
    factor, cubed, half = (z_K.dtype.type(x) for x in (math.sqrt(2 / math.pi), 0.044715, 0.5))
    return half * z_K * (1 + np.tanh(factor * (z_K + cubed * z_K * z_K * z_K)))


KINDS = pytest.mark.parametrize("activation", [RELU, RELU2, DRELU, SILU, GELU, GELU_TANH, CLAMPED_SWIGLU])


def test_every_activation_of_a_decoder_is_there() -> None:
    assert {*EMITTED, GELU} == set(range(len(ACTIVATIONS)))


@KINDS
def test_near_the_definition(activation: int) -> None:
    z_K = np.concatenate([EDGES, np.random.default_rng(0).normal(0, 4, 5000).astype(np.float32)])
    found, wanted = activated(activation, z_K), exact(activation, z_K)
    # A tanh near −1 has few digits left in 32 bits, by any formula; exp of what is below −87 counts as 0.
    absolute = 4e-7 * np.abs(z_K) if activation == GELU_TANH else 1e-35
    with np.errstate(invalid="ignore"):
        # An exponent is rounded before it is raised: by half a unit of its last place.
        error = (5e-7 + 2.0**-23 * np.abs(z_K)) * np.abs(wanted) + absolute
        assert ((found == wanted) | (np.abs(found - wanted) <= error)).all()


@KINDS
@pytest.mark.parametrize("count", [0, 1, LANES - 1, LANES, 2 * LANES + 5])
def test_a_number_has_the_same_bits_wherever_it_stands(activation: int, count: int) -> None:
    z_K = np.resize(np.random.default_rng(count).normal(0, 3, 7).astype(np.float32), count)
    alone = np.array([activated(activation, z_K[k : k + 1])[0] for k in range(count)], np.float32)
    assert (activated(activation, z_K).view(np.int32) == alone.view(np.int32)).all()


@KINDS
def test_what_is_small_is_zero_and_nan_stays(activation: int) -> None:
    z_K = np.array([np.nan, *np.linspace(-6, 6, 43)], np.float32)
    free, limited = activated(activation, z_K), activated(activation, z_K, 0.2)
    assert np.isnan(free[0])
    assert np.isnan(limited[0])
    assert (limited[1:] == np.where(np.abs(free[1:]) <= np.float32(0.2), 0, free[1:])).all()


def test_what_does_not_fire_by_the_definition_in_32_bits_does_not_fire() -> None:
    """But for a strip in which implementations of tanh differ."""
    z_K = np.linspace(-12, 3, 3001).astype(np.float32)
    silent, found = gelu_tanh(z_K) == 0, activated(GELU_TANH, z_K) == 0
    apart = (z_K < -5.45) | (z_K > -5.0)
    assert (found == silent)[apart].all()
    assert silent[apart].any()


@pytest.mark.parametrize("count", [1, LANES, 2 * LANES + 5])
def test_a_gate(count: int) -> None:
    rng = np.random.default_rng(count)
    z_K, y_K = (rng.normal(0, 9, count).astype(np.float32) for _ in range(2))
    wanted = y_K / (1 + np.exp(-z_K.astype(np.float64)))
    run_gate(z_K, y_K)
    np.testing.assert_allclose(y_K, wanted, rtol=5e-6)
