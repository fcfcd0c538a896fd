"""Memory that threads, or a thread and the system, share: loads and stores with an order, by address.

What a thread wrote before a *release* is seen by whoever finds what was released by an *acquire*. On x86 these are
plain loads and stores. On arm64 they are instructions of their own (`ldar` or `ldapr`, `stlr`), and plain ones might be
seen in another order: a request's number before the request, or a row's end of reading before the row.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD, _HALF = ir.IntType(64), ir.IntType(32)


def emit_load_acquire(builder: Any, address: Any, kind: ir.IntType) -> Any:
    """Emit the load of an integer at an address, widened to 64 bits without a sign."""
    found = builder.load_atomic(builder.inttoptr(address, kind.as_pointer()), "acquire", kind.width // 8)
    return found if kind is _WORD else builder.zext(found, _WORD)


def emit_store_release(builder: Any, address: Any, number: Any, kind: ir.IntType) -> None:
    """Emit the store of the lower bits of a number at an address."""
    kept = number if kind is _WORD else builder.trunc(number, kind)
    builder.store_atomic(kept, builder.inttoptr(address, kind.as_pointer()), "release", kind.width // 8)


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    """The int64 at an address; what its writer wrote before it is seen from then on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_load_acquire(builder, arguments[0], _WORD)

    return types.int64(types.int64), generate


@intrinsic
def load_acquire_32(typing_context: Any, address: Any) -> Any:
    """The uint32 at an address; what its writer wrote before it is seen from then on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_load_acquire(builder, arguments[0], _HALF)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing_context: Any, address: Any, number: Any) -> Any:
    """Put an int64 at an address; whoever finds it sees what was read and written before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_store_release(builder, arguments[0], arguments[1], _WORD)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def store_release_32(typing_context: Any, address: Any, number: Any) -> Any:
    """Put the lower 32 bits of a number at an address; whoever finds them sees what was read and written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_store_release(builder, arguments[0], arguments[1], _HALF)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


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
