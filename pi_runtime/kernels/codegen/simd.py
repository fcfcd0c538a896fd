"""Vector instructions for intrinsics: short names over llvmlite's builder, and the integer dot product of each ISA.

The functions emit code while a kernel is compiled. `b` is the builder, `n` a number of lanes known at that time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pi_runtime.kernels.codegen.isa import ISA

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32, HALF = ir.FloatType(), ir.HalfType()
LINE = 64
"""Bytes of a cache line."""


def vec(element: Any, n: int) -> Any:
    """The type of a vector."""
    return ir.VectorType(element, n)


def const(element: Any, n: int, value: float) -> Any:
    """A vector with the same constant in every lane."""
    return ir.Constant(vec(element, n), [value] * n)


def offset(value: int) -> Any:
    """A 64-bit constant, for addresses and counts."""
    return ir.Constant(I64, value)


def call(b: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Call an LLVM intrinsic."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def pointer(b: Any, address: Any) -> Any:
    """An integer address as a pointer to bytes."""
    return b.inttoptr(address, I8.as_pointer())


def load(b: Any, base: Any, at: Any, kind: Any) -> Any:
    """Load a value `at` bytes after `base`, at any alignment."""
    return b.load(b.bitcast(b.gep(base, [at]), kind.as_pointer()), align=1)


def first_lanes(b: Any, count: Any, n: int) -> Any:
    """A mask of the first `count` of n lanes."""
    lanes = ir.Constant(vec(I64, n), list(range(n)))
    return b.icmp_signed("<", lanes, splat(b, count, n))


def _mangled(kind: Any) -> str:
    """A vector type as names of LLVM's intrinsics spell it."""
    return f"v{kind.count}{ {F32: 'f32', HALF: 'f16', I16: 'i16'}[kind.element] }".replace(" ", "")


def load_some(b: Any, base: Any, at: Any, count: Any, kind: Any) -> Any:
    """Load the first `count` lanes of a vector `at` bytes after `base`; the others are 0, and are not read."""
    place = b.bitcast(b.gep(base, [at]), kind.as_pointer())
    zeros = ir.Constant(kind, [0] * kind.count)
    arguments = [place, ir.Constant(I32, 1), first_lanes(b, count, kind.count), zeros]
    return call(b, f"llvm.masked.load.{_mangled(kind)}.p0", kind, arguments)


def store_some(b: Any, value: Any, base: Any, at: Any, count: Any) -> None:
    """Store the first `count` lanes of a vector `at` bytes after `base`; what follows is not touched."""
    place = b.bitcast(b.gep(base, [at]), value.type.as_pointer())
    arguments = [value, place, ir.Constant(I32, 1), first_lanes(b, count, value.type.count)]
    call(b, f"llvm.masked.store.{_mangled(value.type)}.p0", ir.VoidType(), arguments)


def store(b: Any, value: Any, base: Any, at: Any) -> None:
    """Store a value `at` bytes after `base`, at any alignment."""
    b.store(value, b.bitcast(b.gep(base, [at]), value.type.as_pointer()), align=1)


def by_strips(b: Any, count: Any, n: int, emit: Callable[[Any, Any], None]) -> None:
    """Emit `emit(bytes before a strip, numbers of it or None for all)` for `count` numbers of 4 bytes, n a strip."""
    whole, size = b.udiv(count, offset(n)), offset(4 * n)
    with cgutils.for_range(b, whole) as loop:
        emit(b.mul(loop.index, size), None)
    left = b.urem(count, offset(n))
    with b.if_then(b.icmp_signed(">", left, offset(0))):
        emit(b.mul(whole, size), left)


def load_strip(b: Any, base: Any, at: Any, left: Any, kind: Any) -> Any:
    """Load a strip, or the `left` numbers of the last one."""
    return load(b, base, at, kind) if left is None else load_some(b, base, at, left, kind)


def store_strip(b: Any, value: Any, base: Any, at: Any, left: Any) -> None:
    """Store a strip, or the `left` numbers of the last one."""
    if left is None:
        store(b, value, base, at)
    else:
        store_some(b, value, base, at, left)


def listed(b: Any, index: Any, n: Any, otherwise: Any) -> Any:
    """The n-th number of the list at address `index`, or `otherwise` where there is no list (0)."""
    found = cgutils.alloca_once_value(b, otherwise)
    b.store(otherwise, found)
    with b.if_then(b.icmp_signed("!=", index, offset(0))):
        b.store(load(b, pointer(b, index), b.mul(n, offset(8)), I64), found)
    return b.load(found)


def shuffle(b: Any, one: Any, other: Any, lanes: Sequence[int]) -> Any:
    """A vector of the lanes, by number, of two vectors side by side."""
    return b.shuffle_vector(one, other, ir.Constant(vec(I32, len(lanes)), list(lanes)))


def join(b: Any, parts: Sequence[Any]) -> Any:
    """Vectors of one size side by side: one, two or four of them."""
    if len(parts) == 1:
        return parts[0]
    one, other = (join(b, part) for part in (parts[: len(parts) // 2], parts[len(parts) // 2 :]))
    return shuffle(b, one, other, range(2 * one.type.count))


def splat(b: Any, value: Any, n: int) -> Any:
    """A scalar in every lane."""
    undefined = ir.Constant(vec(value.type, n), ir.Undefined)
    return shuffle(b, b.insert_element(undefined, value, ir.Constant(I32, 0)), undefined, [0] * n)


def look_up(b: Any, table: Sequence[int], indices: Any) -> Any:
    """The entries of a table of sixteen bytes that bytes below sixteen name."""
    name, wide = ("aarch64.neon.tbl1.v16i8", 16) if ISA.name == "neon" else ("x86.avx2.pshuf.b", 32)
    if ISA.lanes == 16 and indices.type.count % 64 == 0:
        name, wide = "x86.avx512.pshuf.b.512", 64
    found, entries = [], ir.Constant(vec(I8, wide), [*table] * (wide // 16))
    for start in range(0, indices.type.count, wide):
        some = shuffle(b, indices, indices, range(start, start + wide))
        found.append(call(b, f"llvm.{name}", some.type, [entries, some]))
    return join(b, found)


def moved(b: Any, values: Any, bits: Sequence[int]) -> Any:
    """Each lane moved to the right by so many bits: all to the right, or all to the left where they are negative."""
    if not any(bits):
        return values
    assert min(bits) >= 0 or max(bits) <= 0, bits
    amounts = ir.Constant(values.type, [abs(n) for n in bits])
    return b.shl(values, amounts) if min(bits) < 0 else b.lshr(values, amounts)


def halves_added(b: Any, values: Any, lanes: int) -> Any:
    """The sum of each so many lanes: the upper half of them is added to the lower one until one lane is left."""
    while lanes > 1:
        low = [k for k in range(values.type.count) if k % lanes < lanes // 2]
        lanes //= 2
        values = b.fadd(shuffle(b, values, values, low), shuffle(b, values, values, [k + lanes for k in low]))
    return values


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


def prefetch(b: Any, base: Any, at: Any, level: int = 2) -> None:
    """Fetch a cache line that will be read into the cache of this level, 1 or 2."""
    name, kind = "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    read, locality, data = (ir.Constant(I32, v) for v in (0, 4 - level, 1))
    b.call(cgutils.get_or_insert_function(b.module, kind, name), [b.gep(base, [at]), read, locality, data])


def switch(b: Any, code: Any, cases: Mapping[int, Callable[[], Any]]) -> Any:
    """Emit several cases, of which a kernel runs the one that its number `code` names; returns that case's value.

    `code` must be among the cases.
    """
    blocks = [b.append_basic_block(f"case.{number}") for number in cases]
    after = b.append_basic_block("after")
    branch = b.switch(code, blocks[-1])
    found = []
    for (number, emit), block in zip(cases.items(), blocks, strict=True):
        if block is not blocks[-1]:
            branch.add_case(code.type(number), block)
        b.position_at_end(block)
        found.append((emit(), b.block))
        b.branch(after)
    b.position_at_end(after)
    if found[0][0] is None:
        return None
    chosen = b.phi(found[0][0].type)
    for value, block in found:
        chosen.add_incoming(value, block)
    return chosen


def dot_bytes(b: Any, sums: Any, weights: Any, x: Any, *, signed: bool) -> Any:
    """sums_i + Σ_{j<4} w_{4i+j} x_{4i+j} in 32 bits; x has signed bytes.

    With vpdpbusd the weights are unsigned bytes. Without it they are signed bytes of q8, or unsigned ones of at most
    63. On AVX2 the signs of q8 move to x so that the sum of a pair (2 · 127²) stays within 16 bits.
    """
    lanes, kind = sums.type.count, sums.type
    if ISA.dot:
        name = f"llvm.x86.avx512.vpdpbusd.{lanes * 32}"
        return call(b, name, kind, [sums, b.bitcast(weights, kind), b.bitcast(x, kind)])
    if ISA.name == "neon":
        return _signed_dot_bytes(b, sums, weights, x)
    return _pairs_added(b, sums, _byte_pairs(b, weights, x, signed=signed))


def _byte_pairs(b: Any, weights: Any, x: Any, *, signed: bool) -> Any:
    """w_{2i} x_{2i} + w_{2i+1} x_{2i+1} in 16 bits, by AVX2."""
    count = weights.type.count
    if signed:
        x = call(b, "llvm.x86.avx2.psign.b", x.type, [x, weights])
        weights = call(b, f"llvm.abs.v{count}i8", x.type, [weights, ir.Constant(ir.IntType(1), 0)])
    return call(b, "llvm.x86.avx2.pmadd.ub.sw", vec(I16, count // 2), [weights, x])


def _pairs_added(b: Any, sums: Any, pairs: Any) -> Any:
    """sums_i + pairs_{2i} + pairs_{2i+1}, by AVX2."""
    return b.add(sums, call(b, "llvm.x86.avx2.pmadd.wd", sums.type, [pairs, const(I16, pairs.type.count, 1)]))


class ByteSums:
    """Sums in 32 bits, to which products of bytes are added while code is emitted, as `dot_bytes` adds them.

    Weights are at most `most`. On AVX2 sums of pairs are added up in 16 bits as long as these hold them.
    """

    def __init__(self, sums: Any, most: int, *, signed: bool) -> None:
        self._sums, self._signed, self._room = sums, signed, 32767 // (2 * 127 * most)
        self._pairs, self._held = None, 0

    def add(self, b: Any, weights: Any, x: Any) -> None:
        """Add the products of one register."""
        if ISA.name != "avx2":
            self._sums = dot_bytes(b, self._sums, weights, x, signed=self._signed)
            return
        if self._held == self._room:
            self.total(b)
        pairs = _byte_pairs(b, weights, x, signed=self._signed)
        self._pairs, self._held = b.add(self._pairs, pairs) if self._held else pairs, self._held + 1

    def total(self, b: Any) -> Any:
        """The sums so far."""
        if self._held:
            self._sums, self._held = _pairs_added(b, self._sums, self._pairs), 0
        return self._sums


def _signed_dot_bytes(b: Any, sums: Any, weights: Any, x: Any) -> Any:
    """The same by NEON's sdot, on two vectors of four sums: all bytes count as signed."""

    def half(start: int) -> Any:
        lanes, bytes_ = range(start, start + 4), range(4 * start, 4 * start + 16)
        parts = [shuffle(b, sums, sums, lanes), shuffle(b, weights, weights, bytes_), shuffle(b, x, x, bytes_)]
        return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", vec(I32, 4), parts)

    return shuffle(b, half(0), half(4), range(8))


def dot_words(b: Any, sums: Any, weights: Any, x: Any) -> Any:
    """sums_i + w_{2i} x_{2i} + w_{2i+1} x_{2i+1} in 32 bits, for signed 16-bit numbers in whole registers."""
    if ISA.dot:
        parts = [sums, b.bitcast(weights, sums.type), b.bitcast(x, sums.type)]
        return call(b, f"llvm.x86.avx512.vpdpwssd.{32 * sums.type.count}", sums.type, parts)
    words = vec(I16, 16)
    if ISA.name == "neon":
        pairs = [b.bitcast(weights, words), b.bitcast(x, words)]
        for start in (0, 1):
            w_8, x_8 = (b.sext(shuffle(b, one, one, range(start, 16, 2)), sums.type) for one in pairs)
            sums = b.add(sums, b.mul(w_8, x_8))
        return sums
    return b.add(sums, call(b, "llvm.x86.avx2.pmadd.wd", sums.type, [b.bitcast(weights, words), b.bitcast(x, words)]))


def transpose(b: Any, rows: list[Any]) -> list[Any]:
    """Transpose eight vectors of eight 32-bit numbers."""
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    pairs = []
    for k in range(0, 8, 2):
        pairs += [shuffle(b, rows[k], rows[k + 1], lanes) for lanes in (low, high)]
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    fours = []
    for k in (0, 4):
        for j in (0, 1):
            fours += [shuffle(b, pairs[k + j], pairs[k + 2 + j], lanes) for lanes in (low, high)]
    ends = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    return [shuffle(b, fours[k], fours[k + 4], lanes) for lanes in ends for k in range(4)]
