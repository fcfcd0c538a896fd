"""Kernels on the GPU where there is one, else under Triton's interpreter (see `tests/conftest.py`)."""

import pytest

for _module in ("torch", "triton"):
    pytest.importorskip(_module, reason=f"the GPU tier needs {_module}: pip install 'pi-toolchain[cuda]'")

import torch  # noqa: E402
from support.gpu_interpreter import Interpreted  # noqa: E402

from pi_runtime.cuda.memory.devices import Cuda, Device  # noqa: E402


@pytest.fixture(scope="session")
def gpu() -> Device:
    """A GPU, or Triton's interpreter in its place."""
    return Cuda(0) if torch.cuda.is_available() else Interpreted()


@pytest.fixture(scope="session")
def device(gpu: Device) -> torch.device:
    """The torch device of `gpu`, for tests of single kernels; opening a GPU has configured its libraries."""
    return gpu.device
