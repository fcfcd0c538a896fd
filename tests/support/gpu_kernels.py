"""Helpers for tests of Triton kernels: examples to draw, and stored matrices on the device.

PI_TEST_EXAMPLES says how many examples each test draws.
"""

import os

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from pi_runtime.cuda.kernels.matrix import DTYPES, DeviceMatrix
from pi_runtime.cuda.kernels.tiling import Tiling
from support.stored import ROW_FORMATS, store

# No shrinking: under the interpreter it takes minutes, and the shapes are small already.
FEW = settings(
    max_examples=int(os.environ.get("PI_TEST_EXAMPLES", "8")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
FORMAT = st.sampled_from(ROW_FORMATS)
TOKENS = st.integers(1, 3)
COLUMNS = st.sampled_from([1, 7, 31, 33, 64, 129, 256, 300, 545])
TILING = st.builds(
    Tiling,
    dot_rows=st.sampled_from([8, 16]),
    dot_width=st.sampled_from([64, 256]),
    word_rows=st.sampled_from([2, 16]),
    row_words=st.sampled_from([32, 256]),
    sum_rows=st.sampled_from([8, 32]),
    sum_width=st.sampled_from([64, 256]),
    sum_words=st.sampled_from([16, 64]),
    sum_unroll=st.sampled_from([1, 3]),
    splits=st.integers(1, 4),
)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def integers(device: torch.device, numbers: object) -> torch.Tensor:
    """int32 on the device."""
    return torch.tensor(np.array(numbers), dtype=torch.int32, device=device)


class Stored:
    """A stored matrix on the device, and the numbers that it stands for."""

    def __init__(self, device: torch.device, fmt: str, values: np.ndarray) -> None:
        m = store(fmt, values.reshape(-1, values.shape[-1]))
        self.values = m.values
        # A copy starts where torch's memory does: at a multiple of 64 bytes.
        stored = torch.from_numpy(np.ascontiguousarray(m.stored)).view(DTYPES[fmt]).to(device, copy=True)
        scales = (
            None if m.scales is None else torch.from_numpy(m.scales.reshape(len(m.scales), -1)).to(device, copy=True)
        )
        self.matrix = DeviceMatrix(fmt, stored, scales, values.shape[-1])


def assert_close(found: torch.Tensor, wanted: np.ndarray, error: float = 2e-5) -> None:
    got = found.cpu().numpy()
    assert got.shape == wanted.shape
    assert np.all(np.abs(got - wanted) <= error * (1 + np.abs(wanted).max())), np.abs(got - wanted).max()
