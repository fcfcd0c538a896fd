"""Functions for kernels whose LLVM code Python emits; among them loads and stores of memory that threads share.

A thread and the system share some, too.

What a thread wrote before a *release* is seen by whoever finds what was released by an *acquire*. On x86 these are
plain loads and stores. On arm64 they are instructions of their own (`ldar` or `ldapr`, `stlr`), and plain ones might be
seen in another order: a request's number before the request, or a row's end of reading before the row.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def emits(types: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for kernels of one that emits its code: `emit(b, *arguments)`, with LLVM's builder and values.

    `types` is numba's signature; what is called with something else is converted. What `emit` returns is the value of
    the call; it returns None where that has none.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(_typing_context: Any, *_given: Any) -> Any:
            def generate(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
                value = emit(b, *arguments)
                return context.get_dummy_value() if value is None else value

            return types, generate

        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # numba takes names from there
        return intrinsic(typed)

    return decorate


_WORD, _HALF = ir.IntType(64), ir.IntType(32)


def emit_load_acquire(builder: Any, address: Any, kind: ir.IntType) -> Any:
    """Emit the load of an integer at an address, widened to 64 bits without a sign."""
    found = builder.load_atomic(builder.inttoptr(address, kind.as_pointer()), "acquire", kind.width // 8)
    return found if kind is _WORD else builder.zext(found, _WORD)


def emit_store_release(builder: Any, address: Any, number: Any, kind: ir.IntType) -> None:
    """Emit the store of the lower bits of a number at an address."""
    kept = number if kind is _WORD else builder.trunc(number, kind)
    builder.store_atomic(kept, builder.inttoptr(address, kind.as_pointer()), "release", kind.width // 8)


@emits(types.int64(types.int64))
def load_acquire(b: Any, address: Any) -> Any:
    """The int64 at an address; what its writer wrote before it is seen from then on."""
    return emit_load_acquire(b, address, _WORD)


@emits(types.int64(types.int64))
def load_acquire_32(b: Any, address: Any) -> Any:
    """The uint32 at an address; what its writer wrote before it is seen from then on."""
    return emit_load_acquire(b, address, _HALF)


@emits(types.none(types.int64, types.int64))
def store_release(b: Any, address: Any, number: Any) -> Any:
    """Put an int64 at an address; whoever finds it sees what was read and written before it."""
    emit_store_release(b, address, number, _WORD)


@emits(types.none(types.int64, types.int64))
def store_release_32(b: Any, address: Any, number: Any) -> Any:
    """Put the lower 32 bits of a number at an address; whoever finds them sees what was read and written before."""
    emit_store_release(b, address, number, _HALF)


@emits(types.int64(types.int64, types.int64))
def atomic_add(b: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address; returns what it held before. Threads see such sums in one order."""
    place = b.inttoptr(address, _WORD.as_pointer())
    return b.atomic_rmw("add", place, number, "seq_cst")


@emits(types.boolean(types.int64, types.int64, types.int64))
def atomic_replace(b: Any, address: Any, old: Any, new: Any) -> Any:
    """Put a number at an address where an int64 is what was expected; returns whether it was."""
    place = b.inttoptr(address, _WORD.as_pointer())
    found = b.cmpxchg(place, old, new, "seq_cst", "seq_cst")
    return b.extract_value(found, 1)
