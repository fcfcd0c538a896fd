"""A GPU that is only named: Triton compiles for it on any machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pi_runtime.kernels.codegen.jit import cache_folder


class Driver:
    """Stands in for a GPU's driver and says which GPU to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        """Triton keeps what it compiled by this."""
        return self.target

    def get_current_stream(self, _device: GPUTarget) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def kept(name: str) -> Path:
    """A folder for kernels that tests compile, beside the runtime's own, where later runs find them.

    Triton names its files after all that they depend on: a kernel's sources, its settings, and Triton itself.
    """
    return cache_folder().parents[1] / "tests" / name


def nvidia(arch: int) -> GPUTarget:
    """80 for sm_80."""
    return GPUTarget("cuda", arch, 32)


def amd(arch: str) -> GPUTarget:
    """gfx942; CDNA has wavefronts of 64 lanes, RDNA of 32."""
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


@contextmanager
def compiling(target: GPUTarget, seen: Callable[[str, Any], object]) -> Iterator[None]:
    """Launches within compile for a GPU and start nothing; `seen` gets each kernel's name and what was compiled."""
    driver.set_active(Driver(target))
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **named)
        assert "cubin" in kernel.asm or "hsaco" in kernel.asm
        seen(self.fn.__name__, kernel)
        return kernel

    with patch.object(JITFunction, "run", compile_only):
        yield
