"""The device that a command names: a GPU, or in its place Triton's interpreter or the emulator of PTX.

`prepare` comes before anybody imports Triton.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pi_runtime.cuda.memory.devices import Device

HELP = "cuda:N; to try the command: cpu (Triton's interpreter) or emulator (kernels as they are compiled)"


def prepare() -> None:
    """Say how kernels run; threads that wait for the GPU between layers spin, as in `pi_runtime.cuda.executor`."""
    for name, interpret in (("cpu", "1"), ("emulator", "0")):
        if name in sys.argv:
            os.environ["TRITON_INTERPRET"] = interpret
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")


@contextmanager
def opened(name: str) -> "Iterator[Device]":
    """The device; launches within run there."""
    from pi_runtime.cuda.memory.devices import Cuda

    if name == "cpu":
        from support.gpu_interpreter import Interpreted

        yield Interpreted()
    elif name == "emulator":
        from support.ptx.launching import Emulated, Emulator, emulating

        with emulating(Emulator()):
            yield Emulated()
    else:
        yield Cuda(int(name.partition(":")[2] or 0))
