"""How far ahead rows are fetched is chosen by processor, and changes no bit."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from support.paths import SUPPORT
from support.stored import store

from pi_runtime.artifact.footprint import input_nbytes
from pi_runtime.errors import UsageError
from pi_runtime.kernels.codegen.prefetch import PROCESSORS, USUAL, choose
from pi_runtime.kernels.ops.linear import linear


def digest() -> str:
    """The bits of long rows that lie in turn, and of those that lie apart, times one vector."""
    found, rng = hashlib.sha256(), np.random.default_rng(0)
    for fmt in ("q8", "q4", "f16"):
        w, x_TD = store(fmt, rng.standard_normal((38, 1120), np.float32)), rng.standard_normal((1, 1120), np.float32)
        room, y_TN = np.empty(input_nbytes(1120), np.uint8), np.empty((1, 38), np.float32)
        every_other_TN = np.empty((1, 19), np.float32)
        linear(w.view, 38, 0, x_TD, room.ctypes.data, y_TN)
        apart = w.view._replace(stride=2 * w.view.stride, scales_stride=2 * w.view.scales_stride)
        linear(apart, 19, 0, x_TD, room.ctypes.data, every_other_TN)
        np.testing.assert_array_equal(every_other_TN, y_TN[:, ::2])
        found.update(y_TN.tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("name", PROCESSORS)
def test_bits_are_the_same(name: str) -> None:
    environment = {**os.environ, "PI_PREFETCH": name, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parent), *sys.path])}
    child = [sys.executable, __file__]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == [digest()]


@pytest.mark.parametrize(
    ("processor", "wanted", "found"),
    [
        *((name, None, line) for name, line in PROCESSORS.items()),
        ("znver4", None, USUAL),
        ("znver4", "emeraldrapids", PROCESSORS["emeraldrapids"]),
        ("sapphirerapids", "usual", USUAL),
    ],
)
def test_lines_are_chosen_by_name(processor: str, wanted: str | None, found: object) -> None:
    assert choose(processor, wanted) is found


def test_a_line_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"PI_PREFETCH=znver9: no such line\n  expected: usual or "):
        choose("znver4", "znver9")


if __name__ == "__main__":
    sys.stdout.write(digest())
