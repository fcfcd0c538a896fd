"""Block formats against a definition in plain Python: one weight after the other, every operation rounded by struct."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.quantisation import as_stored, dequantise, integers, quantise

Floats = npt.NDArray[np.float32]
QUANTISED = ("q8", "q4", "q5", "q6")
LARGEST = {"q8": 65520.0 * 127, "q4": 65520.0 * 8, "q5": 65520.0 * 16, "q6": 65520.0 * 32}
LIMITS = {"q8": (-127, 127), "q4": (-8, 7), "q5": (-16, 15), "q6": (-32, 31)}
DIVISORS = (0, -1, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75)


def f32(x: float) -> float:
    """A double that is the exact sum, product or quotient's nearest rounds to the binary32 that is nearest to it."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def f16(x: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", min(max(x, -65504.0), 65504.0)))[0])


def halved(x: Sequence[float]) -> float:
    """The sum, by adding the second half to the first."""
    while len(x) > 1:
        x = [f32(a + b) for a, b in zip(x[: len(x) // 2], x[len(x) // 2 :], strict=True)]
    return x[0]


def nearest(w: Sequence[float], s: float, low: int, high: int) -> list[int]:
    return [min(max(round(f32(x / s)), low), high) if s else 0 for x in w]


def block_q8(w: Sequence[float]) -> tuple[list[int], float]:
    s = f16(f32(max(map(abs, w)) / 127))
    return nearest(w, s, -127, 127), s


def block_below_8_bits(name: str, w: Sequence[float], a: Sequence[float] = (1.0,) * 32) -> tuple[list[int], float]:
    low, high = LIMITS[name]

    def error(q: Sequence[int], s: float) -> float:
        e = [f32(x - f32(k * s)) for x, k in zip(w, q, strict=True)]
        return halved([f32(f32(x * x) * c) for x, c in zip(e, a, strict=True)])

    extreme = max(w) if max(w) > -min(w) else min(w)
    tried = [f16(f32(extreme / (low - d))) for d in DIVISORS]
    s = min(tried, key=lambda s: error(nearest(w, s, low, high), s))  # the first of equals
    q = nearest(w, s, low, high)
    weighted = [f32(k * c) for k, c in zip(q, a, strict=True)]
    norm = halved([f32(x * k) for x, k in zip(weighted, q, strict=True)])
    fitted = f16(f32(halved([f32(k * x) for k, x in zip(weighted, w, strict=True)]) / (norm or 1.0)))
    refitted = nearest(w, fitted, low, high)
    return (refitted, fitted) if error(refitted, fitted) < error(q, s) else (q, s)


def slow(name: str, row: Sequence[float]) -> tuple[list[int], list[float]]:
    """All integers of a row, the last block filled up, and its scales."""
    padded = [*row, *[0.0] * (-len(row) % 32)]
    blocks = [padded[n : n + 32] for n in range(0, len(padded), 32)]
    found = [block_q8(block) if name == "q8" else block_below_8_bits(name, block) for block in blocks]
    return [q for integers_, _ in found for q in integers_], [s for _, s in found]


def packed(name: str, q: Sequence[int], columns: int) -> bytes:
    """Place by place: fours of columns interleaved in whole groups of eight blocks, then the blocks left over."""
    grouped = len(q) // 256 * 256
    places = [
        q[g + 32 * b + 4 * k + j] for g in range(0, grouped, 256) for k in range(8) for b in range(8) for j in range(4)
    ]
    rest = list(q[grouped:])
    if name == "q8":
        row = bytes(k & 255 for k in places + rest)
    else:
        zero = -LIMITS[name][0]
        codes, left = [k + zero for k in places], [k + zero for k in rest] + [0] * (-len(rest) % 64)
        runs = [codes[n : n + 256] for n in range(0, grouped, 256)]
        runs += [left[n : n + 64] for n in range(0, len(left), 64)]
        row = b"".join(packed_run(run, int(name[1:]) - 4) for run in runs)
    return row + bytes(-len(row) % (64 if name == "q8" else 32))


def packed_run(run: Sequence[int], upper: int) -> bytes:
    """Lower halves of bytes, then the upper bits."""
    half, planes = len(run) // 2, bytearray(len(run) * upper // 8)
    for index, k in enumerate(run if upper else ()):
        planes[index % len(planes)] |= k >> 4 << index // len(planes) * upper
    return bytes(run[i] & 15 | (run[half + i] & 15) << 4 for i in range(half)) + bytes(planes)


def normal(rng: np.random.Generator, n: int) -> Floats:
    return rng.standard_normal(n, np.float32)


KINDS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": normal,
    "small": lambda rng, n: normal(rng, n) * np.float32(2e-3),
    "zeros": lambda _, n: np.zeros(n),
    "minus zeros": lambda _, n: np.full(n, -0.0),
    "mostly zeros": lambda rng, n: normal(rng, n) * (rng.random(n) < 0.05),
    "all positive": lambda rng, n: np.abs(normal(rng, n)),
    "all negative": lambda rng, n: -np.abs(normal(rng, n)),
    "one value": lambda rng, n: np.full(n, rng.standard_normal()),
    "integers": lambda rng, n: rng.integers(-9, 10, n),
    "scales that are denormal": lambda rng, n: normal(rng, n) * np.float32(1e-6),
    "scales that vanish": lambda rng, n: normal(rng, n) * np.float32(1e-7),
    "denormal": lambda rng, n: normal(rng, n) * np.float32(1e-41),
    "every magnitude": lambda rng, n: np.ldexp(normal(rng, n), rng.integers(-60, 15, n)),
    "large": lambda rng, n: rng.uniform(-1, 1, n) * 5.2e5,
    "outliers": lambda rng, n: np.where(rng.random(n) < 0.02, 100, 1) * normal(rng, n),
}


@st.composite
def matrices(draw: st.DrawFn) -> Floats:
    """Rows of 1 to 300 columns, each row of a kind of its own."""
    columns = draw(
        st.one_of(st.integers(1, 300), st.sampled_from([31, 32, 33, 64, 65, 127, 129, 224, 225, 256, 257, 550]))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
    return np.array([KINDS[kind](rng, columns) for kind in kinds], np.float32)


def assert_slow(name: str, w: Floats) -> None:
    fmt = FORMATS[name]
    stored, scales = quantise(fmt, w)
    columns, blocks = w.shape[1], -(-w.shape[1] // 32)
    assert (stored.dtype, stored.shape) == (fmt.stored, fmt.stored_shape(w.shape))
    assert (scales.dtype, scales.shape) == (np.float16, FORMATS["scale"].stored_shape((len(w), blocks)))
    values = dequantise(fmt, stored, scales, columns)
    assert values.dtype == np.float32
    for r, row in enumerate(w.tolist()):
        q, s = slow(name, row)
        assert scales[r].tobytes() == struct.pack(f"<{len(s)}e", *(x or 0.0 for x in s)).ljust(scales[r].nbytes, b"\0")
        assert stored[r].tobytes() == packed(name, q, columns)
        assert integers(fmt, stored, len(q))[r].tolist() == q
        assert values[r].tolist() == [f32(s[n // 32] * q[n]) for n in range(columns)]


@pytest.mark.parametrize("name", QUANTISED)
@given(matrices())
def test_it_is_the_slow_definition(name: str, w: Floats) -> None:
    assert_slow(name, w)


@pytest.mark.parametrize("name", QUANTISED)
@given(st.lists(st.floats(-5e5, 5e5, width=32), min_size=1, max_size=40))
def test_it_is_the_slow_definition_on_any_values(name: str, row: list[float]) -> None:
    assert_slow(name, np.array([row], np.float32))


@pytest.mark.parametrize("name", QUANTISED[1:])
@given(st.data())
def test_an_importance_weighs_errors_as_the_slow_definition_does(name: str, data: st.DataObject) -> None:
    w = data.draw(matrices())
    spread = data.draw(st.floats(0, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    importance = np.exp(spread * rng.standard_normal(w.shape[1])).astype(np.float32)
    importance[rng.random(w.shape[1]) < 0.1] = 0
    columns, blocks = w.shape[1], -(-w.shape[1] // 32)
    stored, scales = quantise(FORMATS[name], w, importance)
    found = integers(FORMATS[name], stored, 32 * blocks)
    a = [*importance.tolist(), *[0.0] * (32 * blocks - columns)]
    for r, row in enumerate(w.tolist()):
        padded = [*row, *[0.0] * (32 * blocks - columns)]
        for n in range(blocks):
            q, s = block_below_8_bits(name, padded[32 * n : 32 * n + 32], a[32 * n : 32 * n + 32])
            assert found[r, 32 * n : 32 * n + 32].tolist() == q
            assert scales[r, n] == np.float16(s)


def test_an_importance_lowers_the_error_that_it_weighs() -> None:
    rng = np.random.default_rng(0)
    w, importance = rng.standard_normal((64, 320), np.float32), np.exp(2 * rng.standard_normal(320)).astype(np.float32)
    plain, weighted = (dequantise(FORMATS["q4"], *quantise(FORMATS["q4"], w, a), 320) for a in (None, importance))
    assert (importance * np.square(w - weighted)).sum() < 0.8 * (importance * np.square(w - plain)).sum()
    np.testing.assert_array_equal(dequantise(FORMATS["q4"], *quantise(FORMATS["q4"], w, np.ones(320)), 320), plain)


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_are_quantised_by_themselves(name: str) -> None:
    """More blocks than are quantised at once, and any leading axes."""
    w = np.random.default_rng(0).standard_normal((150, 2, 300), np.float32)
    stored, scales = quantise(FORMATS[name], w)
    assert (stored.shape[:-1], scales.shape) == ((150, 2), (150, 2, 12))
    for r in (0, 101, 102, 103, 149):
        one = quantise(FORMATS[name], w[r])
        np.testing.assert_array_equal(stored[r], one[0])
        np.testing.assert_array_equal(scales[r], one[1])
    np.testing.assert_array_equal(as_stored(name, w)[7], as_stored(name, w[7]))
    np.testing.assert_array_equal(as_stored(name, w[:, ::2]), as_stored(name, w[:, ::2].copy()))


def test_no_rows() -> None:
    for name in QUANTISED:
        stored, scales = quantise(FORMATS[name], np.zeros((0, 40), np.float32))
        assert (stored.nbytes, scales.nbytes) == (0, 0)


def test_the_bytes_of_q8() -> None:
    """127 halves in the scale; 40 columns are two blocks; zeros after them."""
    w = np.zeros((1, 40), np.float32)
    w[0, :4], w[0, 33] = [63.5, -63.5, 0.75, 1.25], -0.1270
    stored, scales = quantise(FORMATS["q8"], w)
    assert stored.tobytes() == bytes([127, 129, 2, 2]) + bytes(29) + bytes([129]) + bytes(30)
    assert scales.tobytes() == struct.pack("<4e", 0.5, 0.001, 0, 0)


def test_the_bytes_of_q4() -> None:
    """Column i is the lower, column 32 + i the upper half of byte i; 0 is stored as 8."""
    w = np.zeros((1, 70), np.float32)
    w[0, [0, 1, 31]] = [-8, 7, 3]  # scale 1
    w[0, [32, 33, 63]] = [16, 2, -14]  # scale −2: the largest magnitude becomes −8
    w[0, [64, 69]] = [-0.5, 0.25]  # a third block, 1⁄16
    stored, scales = quantise(FORMATS["q4"], w)
    first = bytes([0x00, 0x7F, *[0x88] * 29, 0xFB])
    second = bytes([0x00, 0x08, 0x08, 0x08, 0x08, 0x0C, *[0x08] * 26])
    assert stored.tobytes() == first + second
    assert scales.tobytes() == struct.pack("<4e", 1, -2, 1 / 16, 0)


def test_the_places_of_a_group() -> None:
    """256 columns with the scale 1: byte 32 k + 4 b + j of q8 is column 32 b + 4 k + j; q4 has two halves."""
    w = np.zeros((1, 256), np.float32)
    w[0, ::32] = 127
    w[0, [1, 36, 255]] = [1, 2, 3]  # blocks 0, 1, 7; fours 0, 1, 7; j = 1, 0, 3
    stored, _ = quantise(FORMATS["q8"], w)
    expected = bytearray(256)
    expected[0:32:4] = bytes([127] * 8)
    expected[1], expected[32 + 4], expected[7 * 32 + 4 * 7 + 3] = 1, 2, 3
    assert stored.tobytes() == bytes(expected)
    w[0, ::32] = -8
    stored, _ = quantise(FORMATS["q4"], w)
    expected = bytearray([0x88] * 128)
    expected[0:32:4] = bytes([0x80] * 8)
    expected[1], expected[32 + 4], expected[3 * 32 + 4 * 7 + 3] = 0x89, 0x8A, 0xB8  # place 255 is the upper half of 127
    assert stored.tobytes() == bytes(expected)


@pytest.mark.parametrize("name", QUANTISED)
@given(matrices())
def test_each_value_is_the_nearest_there_is(name: str, w: Floats) -> None:
    """So |w − ŵ| ≤ |s| / 2, except where w lies beyond the last multiple of s."""
    fmt, (low, high) = FORMATS[name], LIMITS[name]
    stored, scales = quantise(fmt, w)
    error = np.abs(dequantise(fmt, stored, scales, w.shape[1]).astype(float) - w)
    s = np.repeat(scales.astype(float), 32, axis=1)[:, : w.shape[1]]
    beyond = np.maximum(np.maximum(w - np.maximum(low * s, high * s), np.minimum(low * s, high * s) - w), 0)
    # The quotient is rounded to binary32 before it is rounded to an integer.
    assert (error <= np.maximum(np.abs(s) / 2 * (1 + 2.0**-15), beyond)).all()


@pytest.mark.parametrize("name", QUANTISED)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.integers(-10, 12))
def test_errors_are_as_small_as_the_bits_allow(name: str, seed: int, columns: int, exponent: int) -> None:
    w = np.ldexp(normal(np.random.default_rng(seed), columns), exponent)[None]
    error = np.abs(as_stored(name, w) - w).max()
    # 2⁻¹¹ of the scale is its own rounding, 2⁻²⁵ where it is subnormal; q4 may give up the last value for the others.
    below_8_bits = {"q4": (0.15, 8), "q5": (0.075, 16), "q6": (0.0375, 32)}
    relative, largest = below_8_bits.get(name, ((0.5 + 127 * 2.0**-11) / 127, 127))
    assert error <= np.abs(w).max() * relative + largest * 2.0**-25


@pytest.mark.parametrize("name", QUANTISED[1:])
@given(matrices())
def test_the_search_is_never_worse_than_the_plain_scale(name: str, w: Floats) -> None:
    lowest, highest = LIMITS[name]
    for n in range(0, w.shape[1], 32):
        block = w[:, n : n + 32].astype(float)
        high, low = block.max(1, keepdims=True), block.min(1, keepdims=True)
        extreme = np.where(high > -low, high, low)
        s = (extreme / lowest).astype(np.float32).astype(np.float16).astype(float)
        q = np.clip(np.rint(np.divide(block, s, out=np.zeros_like(block), where=s != 0)), lowest, highest)
        plain = np.square(block - q * s).sum(1)
        found = np.square(block - as_stored(name, w[:, n : n + 32])).sum(1)
        assert (found <= plain * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", QUANTISED)
@given(matrices())
def test_what_is_stored_stays(name: str, w: Floats) -> None:
    """A second round trip changes nothing in blocks that use the whole range."""
    stored, scales = quantise(FORMATS[name], w)
    once = dequantise(FORMATS[name], stored, scales, w.shape[1])
    twice = as_stored(name, once)
    padded = -(-w.shape[1] // 32) * 32
    blocks = np.abs(integers(FORMATS[name], stored, padded).astype(int)).reshape(len(w), -1, 32).max(2)
    whole = np.repeat(blocks >= max(LIMITS[name]), 32, axis=1)[:, : w.shape[1]]
    np.testing.assert_array_equal(twice[whole], once[whole])


@pytest.mark.parametrize("name", QUANTISED)
def test_ordinary_weights_use_the_whole_range(name: str) -> None:
    w = np.random.default_rng(0).standard_normal((200, 320), np.float32)
    q = np.abs(integers(FORMATS[name], quantise(FORMATS[name], w)[0], 320).astype(int)).reshape(-1, 32).max(1)
    assert (q >= max(LIMITS[name])).mean() > 0.999


@pytest.mark.parametrize("name", QUANTISED)
@given(st.data())
def test_overflows_says_what_no_scale_can_hold(name: str, data: st.DataObject) -> None:
    limit = LARGEST[name]
    below = float(np.nextafter(np.float32(limit), np.float32(0)))
    value = data.draw(st.one_of(st.sampled_from([limit, below]), st.floats(limit / 2, limit * 2, width=32)))
    for w in (np.array([[1, value]], np.float32), np.array([[-value, 1]], np.float32)):
        try:
            struct.pack("<e", f32(value / (127 if name == "q8" else -LIMITS[name][0])))
            assert not FORMATS[name].overflows(w)
        except OverflowError:
            assert FORMATS[name].overflows(w)
            continue
        assert np.abs(as_stored(name, w) - w).max() <= value / 14
        assert_slow(name, w)


WITH_OFFSETS = ("q4_1", "q4z")


def block_with_offset(name: str, w: Sequence[float]) -> tuple[list[int], float, float]:
    low, high = (min(w), max(w)) if name == "q4_1" else (min(*w, 0.0), max(*w, 0.0))

    def codes(s: float, o: float) -> list[int]:
        if name == "q4_1":
            return [min(max(round(f32(f32(x - o) / s)), 0), 15) if s else 0 for x in w]
        return [min(max(round(f32(x / s)) + int(o), 0), 15) if s else int(o) for x in w]

    def meant(q: Sequence[int], s: float, o: float) -> list[float]:
        return [f32(k * s + o) if name == "q4_1" else f32((k - o) * s) for k in q]

    def error(s: float, o: float) -> float:
        e = [f32(x - y) for x, y in zip(w, meant(codes(s, o), s, o), strict=True)]
        return halved([f32(x * x) for x in e])

    tried = []
    for d in DIVISORS:
        s = f16(f32(f32(high - low) / (15 + d)))
        shift = f32(d / 2 * s)
        if name == "q4_1":
            tried.append((s, f16(f32(low - shift)) + 0.0))
        else:
            tried.append((s, float(min(max(round(f32(f32(shift - low) / s)), 0), 15)) if s else 0.0))
    s, o = min(tried, key=lambda so: error(*so))  # the first of equals
    q = codes(s, o)
    if name == "q4z":
        k = [x - o for x in q]
        norm = halved([x * x for x in k])
        refitted = f16(f32(halved([f32(x * y) for x, y in zip(k, w, strict=True)]) / (norm or 1.0))), o
    else:
        sum_q, sum_w = halved([float(x) for x in q]), halved(list(w))
        norm = f32(32 * halved([float(x * x) for x in q]) - f32(sum_q * sum_q))
        product = f32(32 * halved([f32(x * y) for x, y in zip(q, w, strict=True)]))
        s_new = f16(f32(f32(product - f32(sum_q * sum_w)) / (norm or 1.0)))
        refitted = s_new, f16(f32(f32(sum_w - f32(s_new * sum_q)) / 32))
    if error(*refitted) < error(s, o):
        s, o = refitted
    return codes(s, o), s, o


@pytest.mark.parametrize("name", WITH_OFFSETS)
@given(matrices())
def test_offsets_are_those_of_the_slow_definition(name: str, w: Floats) -> None:
    w = np.clip(w, -60000, 60000)
    fmt, blocks = FORMATS[name], -(-w.shape[1] // 32)
    stored, scales = quantise(fmt, w)
    assert (stored.shape, scales.shape) == (fmt.stored_shape(w.shape), (len(w), 2, -(-blocks // 4) * 4))
    found, values = integers(fmt, stored, 32 * blocks), dequantise(fmt, stored, scales, w.shape[1])
    for r, row in enumerate(w.tolist()):
        padded = [*row, *[0.0] * (-len(row) % 32)]
        for n in range(blocks):
            q, s, o = block_with_offset(name, padded[32 * n : 32 * n + 32])
            assert (scales[r, 0, n], scales[r, 1, n]) == (np.float16(s), np.float16(o))
            assert found[r, 32 * n : 32 * n + 32].tolist() == q
            meant = [f32(k * s + o) if name == "q4_1" else f32((k - o) * s) for k in q]
            assert values[r, 32 * n : 32 * n + 32].tolist() == meant[: w.shape[1] - 32 * n]
        q4 = [8 + k for k in integers(FORMATS["q4"], stored[r : r + 1], 32 * blocks)[0].tolist()]
        assert q4 == found[r].tolist(), "integers do not lie as those of q4"


@pytest.mark.parametrize("name", WITH_OFFSETS)
def test_offsets_lower_the_error_where_values_lie_on_one_side(name: str) -> None:
    w = 1 + np.random.default_rng(1).standard_normal((64, 512), np.float32)
    lost = {n: np.square(as_stored(n, w) - w).sum() / np.square(w).sum() for n in ("q4", name)}
    assert lost[name] < 0.6 * lost["q4"]


def test_float_formats_pass_through_as_stored() -> None:
    w = np.random.default_rng(0).standard_normal((5, 33), np.float32)
    for name in ("f32", "f16", "bf16"):
        fmt = FORMATS[name]
        np.testing.assert_array_equal(as_stored(name, w), fmt.decode(fmt.encode(w), 33))


@pytest.mark.parametrize("name", QUANTISED)
def test_ordinary_weights_lose_little(name: str) -> None:
    """Normal weights: Σ(w − ŵ)² / Σw², as measured; a change for the worse is a mistake."""
    w = np.random.default_rng(1).standard_normal((64, 512), np.float32)
    lost = np.square(as_stored(name, w) - w).sum() / np.square(w).sum()
    assert lost < {"q8": 3e-5, "q4": 6.7e-3, "q5": 1.66e-3, "q6": 4.1e-4}[name]
