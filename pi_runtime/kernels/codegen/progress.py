"""Whether work goes on: a count of this process that grows with every layer of a step, and with rows that come.

A step may take minutes because its work is large. It is stuck where the count stands still. One count serves all
models, because their steps take turns.
"""

import ctypes
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types

from pi_runtime.kernels.codegen.intrinsics import emits

_COUNT, _NAME = ctypes.c_int64(0), "pi_runtime progress"
llvmlite.binding.add_symbol(_NAME, ctypes.addressof(_COUNT))


def count() -> int:
    """How far the work of this process has come; a larger number than before means that it went on."""
    return _COUNT.value


def advance() -> None:
    """Say that work goes on, where no kernel does."""
    _COUNT.value += 1


@emits(types.none())
def advanced(b: Any) -> Any:
    """Say in a kernel that work goes on."""
    word = ir.IntType(64)
    known = b.module.globals.get(_NAME)
    place = ir.GlobalVariable(b.module, word, _NAME) if known is None else known
    b.atomic_rmw("add", place, word(1), "monotonic")
