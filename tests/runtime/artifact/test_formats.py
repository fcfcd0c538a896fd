"""Number formats against independent definitions: struct for halves, exact fractions for bf16."""

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_runtime.artifact.formats import BLOCK, FORMATS, ROW_ALIGN, ROW_FORMATS, WEIGHT_FORMATS

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
FLOATS = ("f32", "f16", "bf16", "scale")
BF16_MAX = float(np.uint32(0x7F7F0000).view(np.float32))


def encode_one(name: str, value: float) -> float:
    with np.errstate(over="ignore"):
        return float(FORMATS[name].decode(FORMATS[name].encode(np.array([value], np.float32)), 1)[0])


def nearest_bf16(value: float) -> float:
    """The multiple-of-2¹⁶ bit pattern nearest to `value`, the even one on a tie, infinity as the one above the last."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    below, above = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000

    def exact(pattern: int) -> Fraction:
        if pattern & 0x7FFFFFFF == 0x7F800000:
            return Fraction(2) ** 128 * (-1 if pattern >> 31 else 1)
        return Fraction(struct.unpack("<f", struct.pack("<I", pattern))[0])

    down, up = abs(Fraction(value) - exact(below)), abs(exact(above) - Fraction(value))
    chosen = below if down < up or (down == up and not below >> 16 & 1) else above
    return float(struct.unpack("<f", struct.pack("<I", chosen))[0])


@given(floats)
def test_f32_is_exact(value: float) -> None:
    assert encode_one("f32", value) == value


@given(st.one_of(floats, st.floats(width=16, allow_nan=False, allow_infinity=False)))
def test_bf16_rounds_to_nearest_even(value: float) -> None:
    assert encode_one("bf16", value) == nearest_bf16(value)


@given(st.integers(0, 0x7F7E), st.booleans())
def test_bf16_ties_go_to_even(upper: int, negative: bool) -> None:
    tie = (upper << 16 | 0x8000) | negative << 31
    value = struct.unpack("<f", struct.pack("<I", tie))[0]
    stored = int(FORMATS["bf16"].encode(np.array([value], np.float32))[0])
    assert stored == (upper + (upper & 1)) | negative << 15


@given(st.floats(-65519, 65519, width=32))
def test_f16_is_that_of_struct(value: float) -> None:
    assert encode_one("f16", value) == struct.unpack("<e", struct.pack("<e", value))[0]


@pytest.mark.parametrize("name", ["f16", "bf16"])
@given(value=st.one_of(floats, st.sampled_from([65519.99609375, 65520.0, 3.3961773e38, BF16_MAX, 2.0**128 - 2.0**119])))
def test_overflows_says_what_becomes_infinite(name: str, value: float) -> None:
    values = np.array([0, value], np.float32)
    assert FORMATS[name].overflows(values) == np.isinf(encode_one(name, value))
    assert FORMATS[name].overflows(-values) == np.isinf(encode_one(name, value))


def test_f32_never_overflows() -> None:
    assert not FORMATS["f32"].overflows(np.array([np.finfo(np.float32).max]))


@given(
    st.sampled_from([*FLOATS, "u32", "u64"]),
    st.lists(st.integers(1, 5), max_size=2),
    st.integers(1, 70),
    st.integers(0, 2**32 - 1),
)
def test_shapes_padding_and_round_trip(name: str, leading: list[int], columns: int, seed: int) -> None:
    fmt, shape = FORMATS[name], (*leading, columns)
    values = np.random.default_rng(seed).integers(0, 100, shape).astype("f4" if name in FLOATS else "i8")
    stored = fmt.encode(values)
    assert stored.flags.c_contiguous
    assert (stored.dtype, stored.shape) == (fmt.stored, fmt.stored_shape(shape))
    assert stored.nbytes == fmt.nbytes(shape)
    if leading:
        assert stored.strides[-2] % fmt.row_align == 0
        assert stored.shape[-1] - columns < fmt.row_align // fmt.itemsize
    assert not stored[..., columns:].any()
    decoded = fmt.decode(stored, columns)
    assert decoded.dtype == (np.float32 if name in FLOATS else fmt.stored)
    np.testing.assert_array_equal(decoded, values)


def test_encode_takes_any_strides() -> None:
    values = np.arange(64, dtype=np.float32).reshape(4, 16)[:, ::2]
    for name in FLOATS:
        np.testing.assert_array_equal(FORMATS[name].decode(FORMATS[name].encode(values), 8), values)
        np.testing.assert_array_equal(FORMATS[name].decode(FORMATS[name].encode(values[0]), 8), values[0])


def test_largest_integers() -> None:
    for name, value in (("u32", 2**32 - 1), ("u64", 2**64 - 1)):
        stored = FORMATS[name].encode(np.array([value], np.uint64))
        assert int(FORMATS[name].decode(stored, 1)[0]) == value


def test_names_and_codes() -> None:
    assert {name: (f.name, f.code) for name, f in FORMATS.items()} == {
        "f32": ("f32", 0),
        "f16": ("f16", 1),
        "bf16": ("bf16", 2),
        "q8": ("q8", 3),
        "q4": ("q4", 4),
        "q5": ("q5", 5),
        "q6": ("q6", 6),
        "q4_1": ("q4_1", 7),
        "q4z": ("q4z", 8),
        "q5_1": ("q5_1", 9),
        "q4_k": ("q4_k", 10),
        "q5_k": ("q5_k", 11),
        "q6_k": ("q6_k", 12),
        "iq4_nl": ("iq4_nl", 13),
        "iq4_xs": ("iq4_xs", 14),
        "mxfp4": ("mxfp4", 15),
        "nvfp4": ("nvfp4", 16),
        "scale": ("scale", 28),
        "u8": ("u8", 29),
        "u32": ("u32", 30),
        "u64": ("u64", 31),
    }


@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 5), st.integers(1, 300))
def test_rows_fill_whole_lines(name: str, rows: int, columns: int) -> None:
    fmt = FORMATS[name]
    items = fmt.stored_shape((rows, columns))[-1]
    assert items * fmt.itemsize % fmt.row_align == 0
    assert items * fmt.itemsize - fmt.row_align < fmt.row_nbytes(columns) <= items * fmt.itemsize
    assert 8 * items * fmt.itemsize >= columns * fmt.bits
    # Whole blocks of 5 bits fill no line of 32 bytes: two lines may hold more pairs of them than twice what one does.
    assert columns > 8 * items * fmt.itemsize // fmt.bits - 8 * fmt.row_align // fmt.bits - 2 * BLOCK * (fmt.bits < 8)
    assert fmt.nbytes((rows, columns)) == rows * items * fmt.itemsize


def test_bits_per_weight() -> None:
    bits = {name: 8 * FORMATS[name].nbytes((1, 1024)) / 1024 for name in WEIGHT_FORMATS}
    grouped = {"q4_k": 4, "q5_k": 5, "q6_k": 6}
    plain = {"f32": 32, "f16": 16, "bf16": 16, "q8": 8, "q4": 4, "q5": 5, "q6": 6, "q4_1": 4, "q4z": 4, "q5_1": 5}
    tables = dict.fromkeys(("iq4_nl", "iq4_xs", "mxfp4", "nvfp4"), 4)
    assert bits == plain | grouped | tables
    assert [*plain] == ROW_FORMATS
    narrow = {name for name in WEIGHT_FORMATS if FORMATS[name].bits < 8}
    assert all(FORMATS[name].row_align == (32 if name in narrow else ROW_ALIGN) for name in WEIGHT_FORMATS)
    beside = {}
    for name in grouped | tables:
        scales = FORMATS[FORMATS[name].scale_format]
        beside[name] = 8 * scales.nbytes(FORMATS[name].scales_shape((1, 1024))) / 1024
    # As in GGUF, but for the number of a row of nvfp4, padded to eight bytes.
    wanted = {"q4_k": 0.5, "q5_k": 0.5, "q6_k": 0.5625, "iq4_nl": 0.5, "iq4_xs": 0.25, "mxfp4": 0.25}
    assert beside == wanted | {"nvfp4": 0.5 + 64 / 1024}
    assert 8 * FORMATS["scale"].nbytes((1, 1024 // BLOCK)) / 1024 == 0.5
