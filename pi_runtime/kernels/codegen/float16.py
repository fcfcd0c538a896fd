"""float16 to float32 and back, as LLVM code.

LLVM has one operation for each. On an x86 processor without F16C it turns them into calls of a library that is not
there when a kernel runs. So they are made of integer operations there (F. Giesen,
https://gist.github.com/rygorous/2156668).
"""

from typing import Any

from llvmlite import ir

from pi_runtime.kernels.codegen.isa import host_features

I16, I32, F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
NATIVE = "sse2" not in host_features() or "f16c" in host_features()
"""Whether the processor converts: x86 with F16C, and every other kind."""


def widen(b: Any, bits: Any) -> Any:
    """Emit the conversion of binary16 in 16 bits to float32."""
    if NATIVE:
        return b.fpext(b.bitcast(bits, ir.HalfType()), F32)
    wide = b.zext(bits, I32)
    magnitude = b.shl(b.and_(wide, I32(0x7FFF)), I32(13))
    # The exponents of the two formats begin 112 apart; the product is exact, of subnormal numbers too.
    number = b.bitcast(b.fmul(b.bitcast(magnitude, F32), F32(2.0**112)), I32)
    infinite = b.icmp_unsigned(">=", magnitude, I32(0x7C00 << 13))
    number = b.select(infinite, b.or_(magnitude, I32(0x7F800000)), number)
    return b.bitcast(b.or_(number, b.shl(b.and_(wide, I32(0x8000)), I32(16))), F32)


def narrow(b: Any, number: Any) -> Any:
    """Emit the conversion of float32 to binary16 in 16 bits, to nearest even.

    What is too large, and NaN, becomes infinite.
    """
    if NATIVE:
        return b.bitcast(b.fptrunc(number, ir.HalfType()), I16)
    bits = b.bitcast(number, I32)
    magnitude = b.and_(bits, I32(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, I32(13)), I32(1))
    normal = b.lshr(b.add(b.add(magnitude, I32((0xFFF - (112 << 23)) & 0xFFFFFFFF)), odd), I32(13))
    # Beside 0.5 a float32 has the steps of a subnormal binary16: the sum rounds.
    small = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, F32), F32(0.5)), I32), I32(0x3F000000))
    found = b.select(b.icmp_unsigned("<", magnitude, I32(0x38800000)), small, normal)
    found = b.select(b.icmp_unsigned(">=", magnitude, I32(0x47800000)), I32(0x7C00), found)
    return b.trunc(b.or_(found, b.lshr(b.and_(bits, I32(0x80000000)), I32(16))), I16)
