"""The bandwidth probe reads what it says it reads."""

import numpy as np
import pytest

from pi_runtime import measure


@pytest.mark.parametrize("size", [measure.SLICES, measure.SLICES * 1001])
def test_every_byte_is_read(size: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**40, size).astype(np.uint64)
    sums = np.zeros(measure.SLICES, np.uint64)
    measure._read(values, sums)
    np.testing.assert_array_equal(sums, values.reshape(measure.SLICES, -1).sum(1))


def test_a_rate_comes_out() -> None:
    assert measure.read_bandwidth(1 << 20, threads=1, repeats=2) > 1e6
