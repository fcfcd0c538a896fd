"""Kernels that Triton compiles for sm_80 and that run here: launches as products and tests write them.

Within `emulating` every launch runs on the emulator, and memory that is only allocated is poisoned. Launches that are
alike are compiled once. `Emulator.edit` changes a kernel's text before it runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.memory.devices import configure_libraries
from support.gpu_interpreter import Interpreted
from support.gpu_target import Driver, nvidia
from support.ptx.arithmetic import DTYPES, Lanes
from support.ptx.global_memory import POISON, GlobalMemory, Region
from support.ptx.machine import Grid, Schedule, run
from support.ptx.translating import translate

ARCH = 80


class Emulated(Interpreted):
    """The CPU's memory, with the tiles of a GPU; kernels run on the emulator."""

    name, tiling = "PTX on the CPU", Tiling()

    def __init__(self, memory: int = 1 << 40) -> None:
        self.device, self._memory = torch.device("cpu"), memory


@dataclass(frozen=True)
class Launch:
    """One kernel's run: its name, its text, and what it did to memory."""

    name: str
    text: str
    memory: GlobalMemory


@dataclass
class Emulator:
    """Runs launches, and counts them."""

    schedule: Schedule = field(default_factory=Schedule)
    edit: Callable[[str, str], str] = lambda _name, text: text
    """(name, text) of each kernel before it runs."""
    seen: Callable[[Launch], object] = lambda _launch: None
    """Called after each launch."""

    def launch(self, kernel: Any, grid: Sequence[int], bound: Sequence[Any]) -> None:
        """Run a compiled kernel's grid with these arguments."""
        text = self.edit(kernel.metadata.name, kernel.asm["ptx"])
        translated = translate(text)
        named = list(_flat(list(kernel.src.signature), list(kernel.src.signature.values()), bound))
        assert kernel.metadata.global_scratch_size == kernel.metadata.profile_scratch_size == 0
        tensors = {name: value for name, value in named if isinstance(value, torch.Tensor)}
        regions = [Region(n, name, tensor) for n, (name, tensor) in enumerate(tensors.items())]
        pointers = {region.name: region.pointer for region in regions}
        values = [pointers.get(name, value) for name, value in named] + [0, 0]
        parameters = {
            name: _parameter(kind, value)
            for (name, kind), value in zip(translated.kernel.parameters.items(), values, strict=True)
        }
        memory = GlobalMemory(regions)
        size = (*grid, 1, 1)[:3]
        run(translated, Grid(size, kernel.metadata.shared), parameters, memory, self.schedule)
        self.seen(Launch(kernel.metadata.name, text, memory))


def _flat(names: list[str], kinds: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of the parameters that a kernel has: tuples taken apart, and no constants."""
    for name, kind, value in zip(names, kinds, values, strict=True):
        if isinstance(kind, tuple):
            parts = getattr(value, "_fields", range(len(kind)))
            yield from _flat([f"{name}.{part}" for part in parts], kind, value)
        elif kind != "constexpr":
            yield name, value


def _parameter(kind: str, value: float) -> Lanes:
    if kind[0] == "f":
        return np.array(value, DTYPES[kind]).view(f"uint{kind[1:]}")
    return np.array(int(value) % (1 << int(kind[1:])), f"uint{kind[1:]}")


@contextmanager
def emulating(emulator: Emulator) -> Iterator[Emulator]:
    """Launches within run on the emulator."""
    configure_libraries()
    driver.set_active(Driver(nvidia(ARCH)))
    compile_ = JITFunction.run

    def launch(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kernel = compile_(self, *arguments, grid=grid, warmup=True, **named)
        own = {name: value for name, value in named.items() if name in self.arg_names}
        bound = self.signature.bind(*arguments, **own)
        bound.apply_defaults()
        if not warmup:
            emulator.launch(kernel, grid, list(bound.arguments.values()))
        return kernel

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapped(*arguments: Any, **named: Any) -> torch.Tensor:
            found = allocate(*arguments, **named)
            if found.numel() and found.is_contiguous():
                found.view(-1).view(torch.uint8).fill_(POISON)
            return found

        return wrapped

    with (
        patch.object(JITFunction, "run", launch),
        patch.object(CUDABackend, "make_cubin", lambda *_: b""),  # machine code is of no use here
        patch.object(torch, "empty", poisoned(torch.empty)),
        patch.object(torch, "empty_like", poisoned(torch.empty_like)),
    ):
        yield emulator
