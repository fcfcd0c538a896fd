"""What kernels call that numba does not make by itself: functions whose LLVM code Python emits, and counts of memory.

Some are loads and stores of memory that threads share, or a thread and the system.

What a thread wrote before a *release* is seen by whoever finds what was released by an *acquire*. On x86 these are
plain loads and stores. On arm64 they are instructions of their own (`ldar` or `ldapr`, `stlr`), and plain ones might be
seen in another order: a request's number before the request, or a row's end of reading before the row.

LLVM has one operation for float16 to float32 and one for the way back. On an x86 processor without F16C it turns them
into calls of a library that is not there when a kernel runs. So they are made of integer operations there (F. Giesen,
https://gist.github.com/rygorous/2156668).
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from pi_runtime.artifact import footprint
from pi_runtime.kernels.codegen.isa import host_features


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


_I64, _I32 = ir.IntType(64), ir.IntType(32)


def emit_load_acquire(builder: Any, address: Any, kind: ir.IntType) -> Any:
    """Emit the load of an integer at an address, widened to 64 bits without a sign."""
    found = builder.load_atomic(builder.inttoptr(address, kind.as_pointer()), "acquire", kind.width // 8)
    return found if kind is _I64 else builder.zext(found, _I64)


def emit_store_release(builder: Any, address: Any, number: Any, kind: ir.IntType) -> None:
    """Emit the store of the lower bits of a number at an address."""
    kept = number if kind is _I64 else builder.trunc(number, kind)
    builder.store_atomic(kept, builder.inttoptr(address, kind.as_pointer()), "release", kind.width // 8)


@emits(types.int64(types.int64))
def load_acquire(b: Any, address: Any) -> Any:
    """The int64 at an address; what its writer wrote before it is seen from then on."""
    return emit_load_acquire(b, address, _I64)


@emits(types.int64(types.int64))
def load_acquire_32(b: Any, address: Any) -> Any:
    """The uint32 at an address; what its writer wrote before it is seen from then on."""
    return emit_load_acquire(b, address, _I32)


@emits(types.none(types.int64, types.int64))
def store_release(b: Any, address: Any, number: Any) -> Any:
    """Put an int64 at an address; whoever finds it sees what was read and written before it."""
    emit_store_release(b, address, number, _I64)


@emits(types.none(types.int64, types.int64))
def store_release_32(b: Any, address: Any, number: Any) -> Any:
    """Put the lower 32 bits of a number at an address; whoever finds them sees what was read and written before."""
    emit_store_release(b, address, number, _I32)


@emits(types.int64(types.int64, types.int64))
def atomic_add(b: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address; returns what it held before. Threads see such sums in one order."""
    place = b.inttoptr(address, _I64.as_pointer())
    return b.atomic_rmw("add", place, number, "seq_cst")


@emits(types.boolean(types.int64, types.int64, types.int64))
def atomic_replace(b: Any, address: Any, old: Any, new: Any) -> Any:
    """Put a number at an address where an int64 is what was expected; returns whether it was."""
    place = b.inttoptr(address, _I64.as_pointer())
    found = b.cmpxchg(place, old, new, "seq_cst", "seq_cst")
    return b.extract_value(found, 1)


_I16, _F32 = ir.IntType(16), ir.FloatType()
HALF_IS_NATIVE = "sse2" not in host_features() or "f16c" in host_features()
"""Whether the processor converts: x86 with F16C, and every other kind."""


def widen_half(b: Any, bits: Any) -> Any:
    """Emit the conversion of binary16 in 16 bits to float32."""
    if HALF_IS_NATIVE:
        return b.fpext(b.bitcast(bits, ir.HalfType()), _F32)
    wide = b.zext(bits, _I32)
    magnitude = b.shl(b.and_(wide, _I32(0x7FFF)), _I32(13))
    # The exponents of the two formats begin 112 apart; the product is exact, of subnormal numbers too.
    number = b.bitcast(b.fmul(b.bitcast(magnitude, _F32), _F32(2.0**112)), _I32)
    infinite = b.icmp_unsigned(">=", magnitude, _I32(0x7C00 << 13))
    number = b.select(infinite, b.or_(magnitude, _I32(0x7F800000)), number)
    return b.bitcast(b.or_(number, b.shl(b.and_(wide, _I32(0x8000)), _I32(16))), _F32)


def widen_halves(b: Any, bits: Any) -> Any:
    """The same of a vector."""
    lanes = bits.type.count
    if HALF_IS_NATIVE:
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), ir.VectorType(_F32, lanes))
    found = ir.Constant(ir.VectorType(_F32, lanes), ir.Undefined)
    for lane in map(_I32, range(lanes)):
        found = b.insert_element(found, widen_half(b, b.extract_element(bits, lane)), lane)
    return found


def narrow_half(b: Any, number: Any) -> Any:
    """Emit the conversion of float32 to binary16 in 16 bits, to nearest even.

    What is too large, and NaN, becomes infinite.
    """
    if HALF_IS_NATIVE:
        return b.bitcast(b.fptrunc(number, ir.HalfType()), _I16)
    bits = b.bitcast(number, _I32)
    magnitude = b.and_(bits, _I32(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, _I32(13)), _I32(1))
    normal = b.lshr(b.add(b.add(magnitude, _I32((0xFFF - (112 << 23)) & 0xFFFFFFFF)), odd), _I32(13))
    # Beside 0.5 a float32 has the steps of a subnormal binary16: the sum rounds.
    small = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, _F32), _F32(0.5)), _I32), _I32(0x3F000000))
    found = b.select(b.icmp_unsigned("<", magnitude, _I32(0x38800000)), small, normal)
    found = b.select(b.icmp_unsigned(">=", magnitude, _I32(0x47800000)), _I32(0x7C00), found)
    return b.trunc(b.or_(found, b.lshr(b.and_(bits, _I32(0x80000000)), _I32(16))), _I16)


chunk_places = register_jitable(footprint.chunk_places)
list_places = register_jitable(footprint.list_places)
chunk_layout = register_jitable(footprint.chunk_layout)
padded_width = register_jitable(footprint.padded_width)
input_nbytes = register_jitable(footprint.input_nbytes)
