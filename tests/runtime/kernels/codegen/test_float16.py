"""float16 and float32, with the processor's instruction and without."""

import numba
import numpy as np
import pytest

from pi_runtime.kernels.codegen import intrinsics
from pi_runtime.kernels.data.matrix_view import float_to_half, half_to_float


@pytest.fixture(params=[True, False], ids=["native", "integers"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and not intrinsics.HALF_IS_NATIVE:
        pytest.skip("this processor has no F16C")
    monkeypatch.setattr(intrinsics, "HALF_IS_NATIVE", request.param)


def every_float16() -> np.ndarray:
    """All 65,536 numbers as float32, of which NumPy warns on arm64: some are NaNs that signal."""
    with np.errstate(invalid="ignore"):
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def test_every_float16_is_widened(native: None) -> None:
    @numba.njit
    def widen(x, y):  # type: ignore[no-untyped-def]
        for n in range(len(x)):
            y[n] = half_to_float(x[n])

    bits = np.arange(1 << 16, dtype=np.uint16)
    found, wanted = np.empty(bits.size, np.float32), every_float16()
    widen(bits, found)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_rounding_is_to_the_nearest_and_even(native: None) -> None:
    @numba.njit
    def narrow(x, y):  # type: ignore[no-untyped-def]
        for n in range(len(x)):
            y[n] = float_to_half(x[n])

    numbers = every_float16()[: 1 << 15]
    numbers = numbers[np.isfinite(numbers)]
    between = (numbers[1:] + numbers[:-1]) / 2  # exact, and a tie
    random = np.random.default_rng(0).standard_normal(100_000, np.float32) * np.float32(10) ** np.arange(-8, 2, 1e-4)
    large = [65504, 65519.99, 65520, 1e9, np.inf]
    x = np.concatenate([numbers, between, np.nextafter(between, 0), np.nextafter(between, 1e9), random, large])
    x = np.concatenate([x, -x]).astype(np.float32)
    found = np.empty(x.size, np.uint16)
    narrow(x, found)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, x.astype(np.float16).view(np.uint16))
