"""Integer sums of rows of a block format:  y_j += g_b Σ_k n_k,b q_k,j  over groups of eight blocks.

One multiplication takes two rows: their 16-bit words are interleaved as they are stored, which gives pairs of one
column. A word holds an even and an odd column of a four (of q4: of two fours), so its bytes or nibbles are separated
first, and a last interleaving brings even and odd columns together. A cache line of each row is read at a time.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.data.row_loading import GROUP_COLUMNS

_BITS = {f.code: f.bits for f in FORMATS.values() if f.quantised}
"""The block formats: code → bits of a weight."""
_LOW = [lane for k in (0, 8) for j in range(4) for lane in (k + j, 16 + k + j)]
_WORDS = [_LOW, [lane + 4 for lane in _LOW]]
"""Lanes of the words of blocks 0, 1, 4, 5, and of blocks 2, 3, 6, 7."""
_OWNERS = [[0, 0, 1, 1, 4, 4, 5, 5], [2, 2, 3, 3, 6, 6, 7, 7]]
"""Block of each lane after that."""
_FOURS = [[0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]]
"""Lanes that bring even and odd columns together: of a vector's first and third block, and of its second and fourth."""


def _columns(b: Any, bits: int, pairs: Any) -> list[Any]:
    """Even and odd columns as unsigned 16-bit numbers, 128 or 8 above q; for q4 of the lower and the upper nibbles."""

    def by(k: int) -> Any:
        return v.const(v.I16, 16, k)

    if bits == 8:
        return [b.and_(pairs, by(255)), b.lshr(pairs, by(8))]
    first, second, third = (b.and_(b.lshr(pairs, by(4 * k)) if k else pairs, by(15)) for k in range(3))
    return [first, third, second, b.lshr(pairs, by(12))]


def _parts(b: Any, bits: int, rows: list[Any], place: Any, n: Any) -> Iterator[tuple[Any, Any]]:
    """32 bytes of two rows as vectors of pairs, each with the pairs of factors n for its lanes."""
    two = [v.load(b, row, place, v.vec(v.I16, 16)) for row in rows]
    if bits == 8:
        two = [b.xor(words, v.const(v.I16, 16, 0x8080 - 0x10000)) for words in two]
    for words, owners in zip(_WORDS, _OWNERS, strict=True):
        factors = v.shuffle(b, n, n, owners)
        for part in _columns(b, bits, v.shuffle(b, two[0], two[1], words)):
            yield part, factors


def _add(b: Any, bits: int, sums: list[Any], scales: Any, y: Any, first: Any) -> None:
    """Add the finished sums of one vector to y; the first block's first four begins at column `first`."""
    halves = 8 // bits
    for k, half in itertools.product(range(2), range(halves)):
        even, odd = (b.load(sums[(k * halves + half) * 2 + part]) for part in range(2))
        for which, lanes in enumerate(_FOURS):
            block = 2 * k + which  # in the lower lanes, and block + 4 in the upper ones
            factors = v.shuffle(b, scales, scales, [block] * 4 + [block + 4] * 4)
            value = b.fmul(b.sitofp(v.shuffle(b, even, odd, lanes), scales.type), factors)
            for part in range(2):
                column = b.add(first, v.offset((block + 4 * part) * BLOCK + 16 * half))
                at, four = b.mul(column, v.offset(4)), v.shuffle(b, value, value, range(4 * part, 4 * part + 4))
                v.store(b, b.fadd(v.load(b, y, at, four.type), four), y, at)


def _emit_sum(b: Any, bits: int, arguments: Any) -> None:
    """Emit the sum for one format; `arguments` as those of `sum_groups` without the format."""
    lines = bits // 2  # cache lines of a group
    rows, n, g, sums, y, later = (v.pointer(b, arguments[k]) for k in (0, 2, 3, 4, 7, 8))
    pairs, blocks, groups, ints = arguments[1], arguments[5], arguments[6], v.vec(v.I32, 8)
    with cgutils.for_range(b, b.mul(groups, v.offset(lines))) as loop:
        group, inside = b.udiv(loop.index, v.offset(lines)), b.urem(loop.index, v.offset(lines))
        line, eight = b.mul(loop.index, v.offset(v.LINE)), b.mul(group, v.offset(32))
        start = b.mul(v.load(b, sums, eight, ints), v.const(v.I32, 8, 16 if bits == 8 else 1))
        starts = [v.shuffle(b, start, start, owners) for owners in _OWNERS for _ in range(16 // bits)]
        found = [[cgutils.alloca_once_value(b, one) for one in starts] for _ in range(2)]
        with cgutils.for_range(b, pairs) as pair:
            at = [b.add(b.mul(pair.index, v.offset(16)), v.offset(8 * k)) for k in range(2)]
            for place in at:
                v.prefetch(b, v.pointer(b, v.load(b, later, place, v.I64)), line)
            two = [v.pointer(b, v.load(b, rows, place, v.I64)) for place in at]
            factors = v.load(b, n, b.add(b.mul(b.mul(pair.index, blocks), v.offset(4)), eight), ints)
            for vector in range(2):
                parts = _parts(b, bits, two, b.add(line, v.offset(32 * vector)), factors)
                for into, (part, owned) in zip(found[vector], parts, strict=True):
                    b.store(v.dot_words(b, b.load(into), part, owned), into)
        scales = v.load(b, g, eight, v.vec(v.F32, 8))
        for vector in range(2):
            four = b.add(b.mul(inside, v.offset(2)), v.offset(vector))
            first = b.add(b.mul(group, v.offset(GROUP_COLUMNS)), b.mul(four, v.offset(4)))
            _add(b, bits, found[vector], scales, y, first)


@intrinsic
def sum_groups(
    typing_context: Any, fmt: Any, rows: Any, pairs: Any, n: Any, g: Any, sums: Any, blocks: Any, groups: Any, y: Any,
    later: Any,
) -> Any:  # fmt: skip
    """y ← y + the sum over whole groups. Addresses of: the rows' addresses, two a pair; n [pairs, blocks, 2] in 16
    bits; g and −8 Σ n [blocks]; y; the addresses of rows to prefetch."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        v.switch(b, arguments[0], {code: partial(_emit_sum, b, n, arguments[1:]) for code, n in _BITS.items()})
        return context.get_dummy_value()

    return types.void(*[types.intp] * 10), generate
