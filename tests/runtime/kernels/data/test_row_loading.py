"""Stored rows as float32."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.stored import BLOCK_FORMATS, ROW_FORMATS, StoredMatrix, ends, store, store_integers

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.kernels.data.row_loading import load_row, stored_index

FEW = settings(max_examples=60, deadline=None, derandomize=True)
FMT = st.sampled_from(ROW_FORMATS)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def loaded(m: Any, row: int, first: int, columns: int) -> np.ndarray:
    around = np.full(columns + 2, np.float32(7))
    load_row(m, row, first, around[1:-1])
    assert np.all(around[[0, -1]] == 7), "wrote outside the result"
    return around[1:-1]


@FEW
@given(FMT, st.integers(1, 800), st.data())
@example("q4", 257, None)
@example("q8", 512, None)
def test_load_row(fmt: str, columns: int, data: st.DataObject | None) -> None:
    first = 256 * data.draw(st.integers(0, (columns - 1) // 256)) if data else 256
    count = data.draw(st.integers(1, columns - first)) if data else 1
    w = store(fmt, random(columns, 3, columns))
    for row in range(3):
        np.testing.assert_array_equal(loaded(w.view, row, first, count), w.values[row, first : first + count])


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_every_integer_lies_in_its_place(fmt: str) -> None:
    """Bytes put together one by one, apart from the code that packs them."""
    rng = np.random.default_rng(0)
    low, high = ends(fmt)
    w = store_integers(fmt, rng.integers(low, high + 1, (4, 300)), rng.standard_normal((4, 10)))
    for row in range(4):
        np.testing.assert_array_equal(loaded(w.view, row, 0, 300), w.values[row])


def every_number(fmt: str) -> StoredMatrix:
    """All 65536 bit patterns of a 16-bit format, one a column."""
    stored = np.arange(65536, dtype=np.uint16).view(FORMATS[fmt].stored).reshape(1, -1)
    return StoredMatrix(fmt, stored, FORMATS[fmt].decode(stored, 65536))


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_every_bit_pattern_converts(fmt: str) -> None:
    w = every_number(fmt)
    found = loaded(w.view, 0, 0, 65536)
    np.testing.assert_array_equal(found, w.values[0])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(w.values[0]))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_every_scale_converts(fmt: str) -> None:
    """All finite numbers of binary16 as scales, one a block."""
    patterns = np.arange(65536, dtype=np.uint16).view(np.float16)
    scales = patterns[np.isfinite(patterns)].reshape(992, 64)
    if FORMATS[fmt].offset == "minimum":
        scales = np.clip(scales, -8188, 8188)  # eight times as much is the minimum
    w = store_integers(fmt, np.full((992, 64 * 32), -3), scales)
    for row in range(992):
        np.testing.assert_array_equal(loaded(w.view, row, 0, 64 * 32), w.values[row])


def test_places_are_what_the_format_says() -> None:
    for blocks in (1, 7, 8, 9, 23):
        wanted = list(range(blocks * 32))
        for group in range(blocks // 8):
            for block, k, j in np.ndindex(8, 8, 4):
                wanted[256 * group + 32 * block + 4 * k + j] = 256 * group + 32 * k + 4 * block + j
        assert [stored_index(column, blocks) for column in range(blocks * 32)] == wanted
