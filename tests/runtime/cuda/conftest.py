"""Kernels on the GPU where there is one, else under Triton's interpreter (see `tests/conftest.py`).

With TRITON_INTERPRET=0 and no GPU they are compiled for one, and run on the emulator in `support.ptx`.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

for _module in ("torch", "triton"):
    pytest.importorskip(_module, reason=f"the GPU tier needs {_module}: pip install '.[cuda]'")

# A machine with a GPU may have what runs a model, and nothing that places one.
_PLACING = ["test_budgets.py", "test_selection_stats.py"]
collect_ignore = _PLACING if find_spec("pydantic") is None else []

import torch  # noqa: E402
from support.gpu_interpreter import Interpreted  # noqa: E402

from pi_runtime.cuda.memory.devices import Cuda, Device  # noqa: E402

if TYPE_CHECKING:
    from support.ptx.launching import Emulator


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config) -> Iterator["Emulator"]:
    """Launches run on the emulator; the test is skipped where they run on a GPU or under the interpreter."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are not compiled for the emulator: TRITON_INTERPRET=0 without a GPU")
    from support.gpu_faults import plant
    from support.gpu_target import kept
    from support.ptx.launching import Emulator, emulating
    from support.ptx.machine import Schedule

    with pytest.MonkeyPatch.context() as patch:
        # Machine code is left out: these kernels are for nobody else.
        patch.setenv("TRITON_CACHE_DIR", os.environ.get("PI_TEST_COMPILED") or str(kept("emulated")))
        with emulating(Emulator(Schedule(pytestconfig.getoption("--seed") or 0), plant)) as emulator:
            yield emulator


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Device:
    """A GPU, or in its place the emulator or Triton's interpreter."""
    if torch.cuda.is_available():
        return Cuda(0)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Interpreted()
    from support.ptx.launching import Emulated

    request.getfixturevalue("emulator")
    return Emulated()


@pytest.fixture(scope="session")
def device(gpu: Device) -> torch.device:
    """The torch device of `gpu`, for tests of single kernels; opening a GPU has configured its libraries."""
    return gpu.device
