"""Calls of C functions by address, and atomic sums, for compiled code that runs without Python's lock."""

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


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    """The uint32 at an address; what its writer wrote before it is seen from then on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        return builder.zext(builder.load_atomic(place, "acquire", 4), _WORD)

    return types.int64(types.int64), generate


@intrinsic
def atomic_add(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address; returns what it held before. Threads see such sums in one order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_replace(typing_context: Any, address: Any, old: Any, new: Any) -> Any:
    """Put a number at an address where an int64 is what was expected; returns whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        found = builder.cmpxchg(place, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


def c_address(name: str) -> int:
    """The address of a function of the C library. Raises AttributeError where it has none of this name."""
    return int(ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0)
