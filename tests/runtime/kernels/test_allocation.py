"""What one token allocates inside compiled code: nothing.

numba counts its allocations; an array that Python hands over counts as one, for its descriptor.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.runtime import _nrt_python, rtsys
from support.steps import step
from support.stored import ROW_FORMATS, ffn_layer, store
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.footprint import input_nbytes
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.kernels.ffn import network
from pi_runtime.kernels.ops.linear import linear

Count = Callable[..., int]


@pytest.fixture
def allocations() -> Iterator[Count]:
    """Allocations of a call beside those for the arrays in its arguments; the first call is not counted."""

    def arrays(value: Any) -> int:
        return sum(map(arrays, value)) if isinstance(value, tuple) else isinstance(value, np.ndarray)

    def count(function: Any, *arguments: Any, handed_over: int | None = None) -> int:
        function(*arguments)
        before = rtsys.get_allocation_stats().alloc
        function(*arguments)
        return rtsys.get_allocation_stats().alloc - before - (arrays(arguments) if handed_over is None else handed_over)

    _nrt_python.memsys_enable_stats()
    yield count
    _nrt_python.memsys_disable_stats()


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_a_product(fmt: str, allocations: Count) -> None:
    w, x_TD, y_TN = store(fmt, np.ones((70, 300))), np.ones((1, 300), np.float32), np.empty((1, 70), np.float32)
    room = np.empty(input_nbytes(300), np.uint8)
    assert allocations(linear, w.view, 70, 0, x_TD, room.ctypes.data, y_TN) == 0


@pytest.mark.parametrize("run", [network.add_neurons, network.serial_add_neurons], ids=["threaded", "serial"])
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_an_ffn(run: Any, rung: str, fmt: str, allocations: Count) -> None:
    layer = ffn_layer(small_decoder(d_ff=300), fmt, 5, 0)
    x_1D = np.random.default_rng(0).standard_normal((1, 32), np.float32)
    result = np.zeros((1, 3), np.int64), np.zeros((1, 32), np.float32)
    assert allocations(run, layer.ffn, layer.batch(rung, 0, 300, 1), x_1D, *result) == 0


@pytest.mark.parametrize("fmt", ["f16", "q8", "q4"])
def test_a_decoded_token(fmt: str, tmp_path: Path, allocations: Count) -> None:
    decoder = small_decoder()
    path = random_artifact(tmp_path / "a.pi", decoder, format=fmt, ranks=[5] * decoder.n_layers)
    for mode in ("dense", "gate", "predicted"):
        with load(path, mode=mode) as model:
            executor, cache = model.executor, model.new_cache()
            # Those of the one call into compiled code: the table, two of angles, seven of the step, and the workspace.
            handed_over = 10 + sum(isinstance(a, np.ndarray) for a in executor.host.workspace)

            def decode() -> None:
                step(executor, [65], cache, select=True)  # noqa: B023

            assert allocations(decode, handed_over=handed_over) == 0, mode
