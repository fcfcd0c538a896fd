"""The probes read what they say they read."""

import numpy as np
import pytest

from pi_runtime import measure
from pi_runtime.artifact.footprint import record_nbytes
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.kernels.memory import matrix


@pytest.mark.parametrize("size", [measure.SLICES, measure.SLICES * 1001])
def test_every_byte_is_read(size: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**40, size).astype(np.uint64)
    sums = np.zeros(measure.SLICES, np.uint64)
    measure._read(values, sums)
    np.testing.assert_array_equal(sums, values.reshape(measure.SLICES, -1).sum(1))


def test_a_rate_comes_out() -> None:
    assert measure.read_bandwidth(1 << 20, threads=1, repeats=2) > 1e6


@pytest.mark.parametrize("fmt", measure.MEASURED)
def test_every_format_gives_its_rates(fmt: str) -> None:
    nbytes = 40 * FORMATS[fmt].nbytes((1, measure.COLUMNS))
    assert measure.product_bandwidth(fmt, nbytes, threads=1, repeats=1) > 1e6
    assert measure.gather_bandwidth(fmt, nbytes, threads=1, repeats=1) > 1e6
    assert measure.product_flops(fmt, threads=1, tokens=2, rows=8, repeats=1) > 1e6


def test_the_picked_rows_are_those_of_the_list() -> None:
    w_ND = np.random.default_rng(1).standard_normal((130, 32)).astype(np.float32)
    x_D, idx_K = np.arange(32, dtype=np.float32), np.array([0, 3, 4, 64, 129])
    y_K = np.empty(5, np.float32)
    record = np.empty(record_nbytes(32), np.uint8)
    measure._picked(matrix(FORMATS["f32"].code, w_ND.ctypes.data, 0, 32), idx_K, x_D, record.ctypes.data, y_K)
    np.testing.assert_allclose(y_K, w_ND[idx_K] @ x_D, rtol=1e-5)


def test_a_launch_takes_less_than_a_second() -> None:
    assert 0 < measure.launch_seconds(1, times=2) < 1
