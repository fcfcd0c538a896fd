"""Calls of C functions by address, for compiled code that runs without Python's lock."""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

import ctypes
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)


@intrinsic
def call_c(typing_context: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call a C function of at most four arguments, integers or pointers; returns its result as 64 bits.

    An `int` result is in the lower half, and the upper half is undefined. A function with fewer arguments leaves the
    others alone, as the calling conventions of Linux have it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD] * 4)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(*[types.int64] * 5), generate


@intrinsic
def call_syscall(typing_context: Any, address: Any, number: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call C's `syscall`, which is at an address, with four arguments and two zeros; returns −1 where it fails."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, zero = ir.FunctionType(_WORD, [_WORD] * 7), ir.Constant(_WORD, 0)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [*arguments[1:], zero, zero])

    return types.int64(*[types.int64] * 6), generate


def c_address(name: str) -> int:
    """The address of a function of the C library. Raises AttributeError where it has none of this name."""
    return int(ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0)
