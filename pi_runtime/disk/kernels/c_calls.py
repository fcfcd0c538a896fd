"""Calls of C functions by address, for compiled code that runs without Python's lock."""

import ctypes
from typing import Any

from llvmlite import ir
from numba import types

from pi_runtime.kernels.codegen.intrinsics import emits

_WORD = ir.IntType(64)


@emits(types.int64(*[types.int64] * 5))
def call_c(b: Any, address: Any, one: Any, two: Any, three: Any, four: Any) -> Any:
    """Call a C function of at most four arguments, integers or pointers; returns its result as 64 bits.

    An `int` result is in the lower half, and the upper half is undefined. A function with fewer arguments leaves the
    others alone, as the calling conventions of Linux have it.
    """
    kind = ir.FunctionType(_WORD, [_WORD] * 4)
    return b.call(b.inttoptr(address, kind.as_pointer()), (one, two, three, four))


@emits(types.int64(*[types.int64] * 6))
def call_syscall(b: Any, address: Any, number: Any, one: Any, two: Any, three: Any, four: Any) -> Any:
    """Call C's `syscall`, which is at an address, with four arguments and two zeros; returns −1 where it fails."""
    kind, zero = ir.FunctionType(_WORD, [_WORD] * 7), ir.Constant(_WORD, 0)
    return b.call(b.inttoptr(address, kind.as_pointer()), (number, one, two, three, four, zero, zero))


def c_address(name: str) -> int:
    """The address of a function of the C library. Raises AttributeError where it has none of this name."""
    return int(ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0)
