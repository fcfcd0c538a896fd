"""The probes read what they say they read."""

import numpy as np
import pytest

from pi_runtime.artifact.footprint import input_nbytes
from pi_runtime.artifact.formats import ROW_FORMATS
from pi_runtime.artifact.sizes import ArraySpec
from pi_runtime.kernels import benchmarks


@pytest.mark.parametrize("size", [benchmarks.SLICES, benchmarks.SLICES * 1001])
def test_every_byte_is_read(size: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**40, size).astype(np.uint64)
    sums = np.zeros(benchmarks.SLICES, np.uint64)
    benchmarks._read(values, sums)
    np.testing.assert_array_equal(sums, values.reshape(benchmarks.SLICES, -1).sum(1))


def test_a_rate_comes_out() -> None:
    assert benchmarks.read_bandwidth(1 << 20, threads=1, repeats=2) > 1e6


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_every_format_gives_its_rates(fmt: str) -> None:
    w = benchmarks.timed_matrix(fmt, 1, columns=96, rows=300)
    assert (w.columns, len(w), w.row_nbytes) == (96, 300, ArraySpec(fmt, (1, 96)).nbytes_with_scales)
    probes = (
        benchmarks.product_bandwidth,
        benchmarks.neuron_bandwidth,
        benchmarks.gather_bandwidth,
        benchmarks.predictor_bandwidth,
    )
    for probe in probes:
        assert probe(w, threads=1, repeats=1) > 1e3
    assert benchmarks.product_flops(fmt, threads=1, tokens=2, rows=8, repeats=1) > 1e6
    assert benchmarks.neuron_flops(fmt, threads=1, tokens=20, neurons=64, repeats=1) > 1e6


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_just_the_picked_neurons_are_read(fmt: str) -> None:
    w, up = benchmarks.timed_matrix(fmt, 1, columns=96, rows=300), benchmarks.timed_matrix(fmt, 1, columns=32, rows=100)
    layer = benchmarks._TimedFfn(w, up, rank=32, neurons=100)
    assert layer.run("dense", layer.all_F) == (100, 100)
    assert layer.run("predicted", layer.none_F) == (0, 0)
    assert layer.run("predicted", layer.only(np.array([3, 50, 99]))) == (3, 3)


def test_slices_add_up_to_the_whole() -> None:
    w = benchmarks.timed_matrix("f32", 1, columns=32, rows=12)
    x_TD, y_TN = np.arange(32, dtype=np.float32)[None], np.zeros((1, 12), np.float32)
    inputs = np.empty(input_nbytes(32), np.uint8)
    benchmarks._in_slices(w.view, 4, 3, x_TD, inputs.ctypes.data, y_TN)
    np.testing.assert_allclose(y_TN, x_TD @ w.values.view(np.float32).T, rtol=1e-5)


def test_a_launch_takes_less_than_a_second() -> None:
    assert 0 <= benchmarks.launch_seconds(benchmarks.timed_matrix("f16", 1 << 23), 1, repeats=1) < 1


def test_attention_gives_its_rate() -> None:
    assert benchmarks.attention_bandwidth(1, repeats=1) > 1e6
