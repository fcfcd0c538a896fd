"""Rotation, cache and attention against NumPy."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.synthetic import frequencies, small_decoder

from pi_runtime.artifact.buffers import CACHE_FORMATS, kv_page
from pi_runtime.artifact.footprint import ATTENTION_TOKENS, CHUNKS, POSITIONS
from pi_runtime.artifact.quantisation import as_stored
from pi_runtime.execution.pages import by_position
from pi_runtime.kernels import reference
from pi_runtime.kernels.ops.attention import LayerCache, attend, norm_heads, rotate, store_kv
from pi_runtime.kernels.ops.page_rows import LARGEST_HALF

NONE, TURNED = (0, 0), (3, 2)
FEW = settings(max_examples=30, deadline=None, derandomize=True)


class Pages:
    """One sequence's pages: the middle one of three layers, in an order in which they do not lie in memory."""

    def __init__(
        self, groups: int, positions: int, width: int, fmt: str, window: int = 0, turned: tuple[int, int] = NONE
    ) -> None:
        count = -(-positions // POSITIONS)
        page = kv_page(small_decoder(n_layers=3, n_kv_heads=groups, n_heads=groups, head_dim=width), fmt, 3)
        # All bits set are NaN, in the scales of q8 as well.
        self.pages = np.full((count, page.nbytes), 255, np.uint8).view(page.dtype).reshape(count, *page.shape)
        self.order = np.random.default_rng(count).permutation(count)
        self.table = np.array([self.pages[n].ctypes.data for n in self.order])
        self.fmt, held = fmt, CACHE_FORMATS[fmt]
        self.cache = LayerCache(held.keys.code, held.values.code, LAYER, groups, width, window, 0, 1, 0, *turned)

    @property
    def values_2GSE(self) -> np.ndarray:
        """The layer's keys and values as they are held, in the order of positions."""
        pages = [self._unpacked(page) for page in self.pages[self.order, LAYER]]
        return np.concatenate(pages, axis=2)

    def _unpacked(self, page: np.ndarray) -> np.ndarray:
        """(2, G, S, E) of a page: the keys' integers, scales and reference by head, then the values by head and row."""
        if page.dtype != np.uint8:
            return np.stack(by_position(page))
        groups, blocks, held = self.cache.groups, -(-self.cache.width // 32), CACHE_FORMATS[self.fmt]
        sizes = [blocks * (4 * one.bits + 2) for one in (held.keys, held.values)]
        sizes[0] += 2 * blocks * (self.fmt == "q4")
        keys, values = np.split(page, [groups * POSITIONS * sizes[0]])
        found = []
        for head in keys.reshape(groups, -1):
            q, scales = np.split(head, [POSITIONS * blocks * 4 * held.keys.bits])
            scales, references = np.split(scales.view(np.float16).astype(np.float32), [POSITIONS * blocks])
            scale_SE = np.repeat(scales.reshape(blocks, POSITIONS).T, 32, axis=1)
            x_SE = self._integers(held.keys.bits, q, by_columns=True) * scale_SE
            found.append(x_SE + references if self.fmt == "q4" else x_SE)
        for row in values.reshape(groups * POSITIONS, -1):
            q, scales = np.split(row, [blocks * 4 * held.values.bits])
            scale_E = np.repeat(scales.view(np.float16).astype(np.float32), 32)
            found.append(self._integers(held.values.bits, q, by_columns=False) * scale_E)
        both = np.concatenate([np.stack(found[:groups]).ravel(), np.stack(found[groups:]).ravel()])
        return both.reshape(2, groups, POSITIONS, 32 * blocks)[..., : self.cache.width].astype(np.float32)

    def _integers(self, bits: int, packed: np.ndarray, *, by_columns: bool) -> np.ndarray:
        """(S, E) or (E,) integers: bytes of lower bits, then a word for each 32 upper ones, the first in its lowest."""
        blocks = -(-self.cache.width // 32)
        if bits == 8:
            q = packed.view(np.int8)
            return q.reshape(32 * blocks, POSITIONS).T if by_columns else q
        low, high = np.split(packed, [16 * blocks * (POSITIONS if by_columns else 1)])
        planes = np.unpackbits(high, bitorder="little").reshape(-1, bits - 4, 32).astype(np.int64)
        upper = sum(planes[:, n] << 4 + n for n in range(bits - 4))
        low = low.reshape(blocks, 16, -1)
        lower = np.concatenate([low & 15, low >> 4], axis=1).reshape(32 * blocks, -1)
        q = (lower + upper if by_columns else lower.ravel() + upper.ravel()) - (1 << bits - 1)
        return q.T if by_columns else q

    def as_held(self, x_2GTE: np.ndarray, start: int, first_2GE: np.ndarray) -> np.ndarray:
        """What the cache holds of keys and values from position `start` on; the first of their page were others."""
        if self.fmt != "q4":
            return as_stored(self.fmt, np.ascontiguousarray(x_2GTE))
        places = start + np.arange(x_2GTE.shape[2])
        pages, steady = places // POSITIONS * POSITIONS, steady_columns(self.cache)
        firsts = np.where((pages < start)[:, None], first_2GE[0, :, None], x_2GTE[0][:, np.maximum(pages - start, 0)])
        references = hadamard(firsts * steady).astype(np.float16).astype(np.float32)
        keys = rounded(hadamard(x_2GTE[0]) - references, 6) + references
        return np.stack([keys, rounded(hadamard(x_2GTE[1]), 5)])

    def as_given(self, x_XE: np.ndarray) -> np.ndarray:
        """Heads as they were before the cache rotated them."""
        return hadamard(x_XE) if self.fmt == "q4" else x_XE


def steady_columns(cache: LayerCache) -> np.ndarray:
    """1 for columns that a page's keys have in common, else 0."""
    angles, unsteady = cache.angles, cache.unsteady
    column = np.arange(cache.width)
    turned = (column < 2 * angles) & (column % max(1, angles) < unsteady)
    return np.where(turned, np.float32(0), np.float32(1))


def rounded(x_XE: np.ndarray, bits: int) -> np.ndarray:
    """The nearest that integers of so many bits hold, in blocks of 32 columns: −1 is the largest magnitude."""
    found, zero = np.empty(x_XE.shape, np.float32), 1 << bits - 1
    for low in range(0, x_XE.shape[-1], 32):
        block = x_XE[..., low : low + 32]
        largest = np.take_along_axis(block, np.abs(block).argmax(-1)[..., None], -1)
        scale = np.clip(largest / np.float32(-zero), -LARGEST_HALF, LARGEST_HALF).astype(np.float16).astype(np.float32)
        q = np.where(scale == 0, np.float32(0), np.rint(block / np.where(scale == 0, np.float32(1), scale)))
        found[..., low : low + 32] = np.clip(q, -zero, zero - 1) * scale
    return found


def hadamard(x_XE: np.ndarray) -> np.ndarray:
    """H x / √n for each part of so many columns as the largest power of two that is left."""
    width = x_XE.shape[-1]
    n = 1 << width.bit_length() - 1
    x = x_XE[..., :n]
    step = 1
    while step < n:
        pairs = x.reshape(*x_XE.shape[:-1], n // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(*x_XE.shape[:-1], n)
        step *= 2
    x = x * x.dtype.type(1 / np.sqrt(n))
    return x if n == width else np.concatenate([x, hadamard(x_XE[..., n:])], axis=-1)


LAYER = 1


def write(qkv_TQ: np.ndarray, start: int, pages: Pages) -> None:
    """Write one sequence's keys and values."""
    store_kv(pages.cache, qkv_TQ.copy(), np.array([[0, len(qkv_TQ), start, pages.table.ctypes.data]]))


def attended(qkv_TQ: np.ndarray, heads: int, runs: Sequence[tuple[int, int, int, Pages]]) -> np.ndarray:
    """Attention of runs (first token, their number, first position, pages), whose pages have the same shape."""
    cache = runs[0][3].cache
    width = cache.width
    run_R4 = np.array([[*run[:3], run[3].table.ctypes.data] for run in runs])
    out_TQ = np.full((len(qkv_TQ), heads * width), np.nan, np.float32)
    floats = ATTENTION_TOKENS * heads // cache.groups * (width + POSITIONS + 4)
    scratch_CX = np.full((CHUNKS, floats), np.nan, np.float32)
    unpacked_CBE = np.full((CHUNKS, POSITIONS, width), np.nan, np.float32)
    attend(cache, qkv_TQ.copy(), run_R4, unpacked_CBE, scratch_CX, out_TQ)
    return out_TQ


def naive(qkv_TQ: np.ndarray, heads: int, start: int, pages: Pages) -> np.ndarray:
    """softmax(q kᵀ / √E) v in float64, token by token and head by head."""
    cache_2GSE = pages.as_given(pages.values_2GSE.astype(np.float64))
    _, groups, _, width = cache_2GSE.shape
    out = np.empty((len(qkv_TQ), heads, width))
    for t, token in enumerate(qkv_TQ.astype(np.float64)):
        for h, q_E in enumerate(token[: heads * width].reshape(heads, width)):
            low = max(0, start + t + 1 - pages.cache.window) if pages.cache.window else 0
            k_SE, v_SE = cache_2GSE[:, h // (heads // groups), low : start + t + 1].astype(np.float64)
            score = k_SE @ q_E / np.sqrt(width)
            p = np.exp(score - score.max())
            out[t, h] = p @ v_SE / p.sum()
    return out.reshape(len(qkv_TQ), -1)


@FEW
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(0, 70),
    st.sampled_from(sorted(CACHE_FORMATS)),
    st.sampled_from([0, 1, 7, 32, 33]),
)
@example(1, 1, 1, 1, 0, "f32", 0)
@example(64, 2, 3, 17, 5, "f32", 0)
@example(64, 2, 3, 40, 5, "f16", 0)
@example(90, 1, 2, 8, 40, "f32", 20)
@example(1, 1, 2, 8, 69, "q8", 5)
@example(1, 1, 2, 8, 69, "q4", 5)
@example(40, 2, 2, 64, 31, "q4", 0)
@example(3, 1, 1, 80, 60, "q4", 33)
@example(3, 2, 1, 97, 0, "q4", 0)
def test_attend(tokens: int, groups: int, share: int, width: int, start: int, fmt: str, window: int) -> None:
    heads, rng = groups * share, np.random.default_rng(tokens)
    qkv_TQ = rng.standard_normal((tokens, (heads + 2 * groups) * width), np.float32)
    cache = Pages(groups, start + tokens, width, fmt, window, TURNED if width >= 6 else NONE)
    before_TQ = rng.standard_normal((start, 2 * groups * width), np.float32)
    write(before_TQ, 0, cache)
    untouched = cache.pages.copy()
    write(qkv_TQ, start, cache)
    keys_values = qkv_TQ[:, heads * width :].reshape(tokens, 2, groups, width)
    found, wanted = cache.values_2GSE[:, :, start : start + tokens], keys_values.transpose(1, 2, 0, 3)
    first = start // POSITIONS * POSITIONS
    firsts = before_TQ[first].reshape(2, groups, width) if first < start else wanted[:, :, 0]
    np.testing.assert_array_equal(found, cache.as_held(wanted, start, firsts))
    others = np.arange(3) != LAYER
    np.testing.assert_array_equal(cache.pages[:, others].view(np.uint8), untouched[:, others].view(np.uint8))
    out_TQ = attended(qkv_TQ, heads, [(0, tokens, start, cache)])
    np.testing.assert_allclose(out_TQ, naive(qkv_TQ, heads, start, cache), rtol=2e-5, atol=2e-6)


@FEW
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.sampled_from(sorted(CACHE_FORMATS)), st.data())
def test_a_token_gets_the_same_bits_in_any_piece_and_company(
    groups: int, share: int, width: int, fmt: str, data: st.DataObject
) -> None:
    heads, rng = groups * share, np.random.default_rng(width)
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    every = [rng.standard_normal((n, (heads + 2 * groups) * width), np.float32) for n in lengths]
    window = data.draw(st.sampled_from([0, 1, 20, 33]))
    caches = [Pages(groups, 100, width, fmt, window) for _ in every]
    alone = []
    for qkv_TQ, cache in zip(every, caches, strict=True):
        write(qkv_TQ, 0, cache)
        one = [attended(qkv_TQ[t : t + 1], heads, [(0, 1, t, cache)]) for t in range(len(qkv_TQ))]
        alone.append(np.concatenate(one))
    cuts = [data.draw(st.integers(0, n - 1)) for n in lengths]
    pieces = [qkv_TQ[cut:] for qkv_TQ, cut in zip(every, cuts, strict=True)]
    firsts = np.cumsum([0, *map(len, pieces)])
    runs = [(f, len(p), cut, c) for f, p, cut, c in zip(firsts, pieces, cuts, caches, strict=False)]
    found = attended(np.concatenate(pieces), heads, runs)
    np.testing.assert_array_equal(found, np.concatenate([a[cut:] for a, cut in zip(alone, cuts, strict=True)]))


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e18])
def test_attend_neither_overflows_nor_loses_its_sum(scale: float) -> None:
    rng = np.random.default_rng(1)
    qkv_TQ = rng.standard_normal((3, 3 * 8), np.float32)
    qkv_TQ[:, :16] *= np.float32(scale)
    cache = Pages(1, 3, 8, "f32")
    write(qkv_TQ, 0, cache)
    out_TQ = attended(qkv_TQ, 1, [(0, 3, 0, cache)])
    np.testing.assert_allclose(out_TQ, naive(qkv_TQ, 1, 0, cache), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 8, 24, 64, 80, 97, 256])
def test_a_rotation_is_that_by_hadamards_matrix(width: int) -> None:
    """Each part's matrix has ±1 / √n, rows that are orthogonal, and by Sylvester the sign of the common bits."""
    x_TE, matrix_EE, first = np.random.default_rng(width).standard_normal((3, width)), np.zeros((width, width)), 0
    while first < width:
        n = 1 << (width - first).bit_length() - 1
        common = np.arange(n)[:, None] & np.arange(n)
        signs = 1 - 2 * (np.vectorize(int.bit_count)(common.astype(object)) % 2)
        matrix_EE[first : first + n, first : first + n] = signs.astype(float) / np.sqrt(n)
        first += n
    np.testing.assert_allclose(matrix_EE @ matrix_EE, np.eye(width), atol=1e-12)
    np.testing.assert_allclose(hadamard(x_TE), x_TE @ matrix_EE, atol=1e-12)


def test_q4_loses_little_of_what_the_keys_of_a_page_have_in_common() -> None:
    """Unsteady columns are no part of it: there a page's first key says nothing of the others."""
    rng, lost = np.random.default_rng(0), []
    common_E = 50 * rng.standard_normal(64, np.float32)
    common_E[[0, 1, 3, 4]] = 0
    for amount in (0, 1):
        qkv_TQ = rng.standard_normal((64, 3 * 64), np.float32)
        qkv_TQ[:, 64:128] += np.float32(amount) * common_E
        cache = Pages(1, 64, 64, "q4", turned=TURNED)
        write(qkv_TQ, 0, cache)
        lost.append(np.square(cache.as_given(cache.values_2GSE[0, 0, :64]) - qkv_TQ[:, 64:128]).mean())
    assert lost[1] < 1.5 * lost[0], lost


@np.errstate(invalid="ignore")
def test_q8_holds_large_numbers_and_what_is_no_number_stays_none() -> None:
    qkv_TQ = np.array([[0.0] * 40 + [1e5] * 40 + [1e-9] * 40, [0.0] * 40 + [np.nan] * 40 + [np.inf] * 40], np.float32)
    cache = Pages(1, 2, 40, "q8")
    write(qkv_TQ, 0, cache)
    keys, values = cache.values_2GSE[:, 0, :2]
    np.testing.assert_allclose(keys[0], 1e5, rtol=1e-2)
    assert (values[0] == 0).all()
    assert np.isnan(keys[1]).all()
    np.testing.assert_array_equal(values[1], LARGEST_HALF * 127)


@np.errstate(invalid="ignore")
@pytest.mark.parametrize("fmt", ["q8", "q4"])
@pytest.mark.parametrize("place", [0, 5, 39])
def test_a_block_with_something_that_is_no_number_is_none(fmt: str, place: int) -> None:
    qkv_TQ = np.ones((1, 120), np.float32)
    qkv_TQ[0, 40 + place] = np.nan
    cache = Pages(1, 1, 40, fmt)
    write(qkv_TQ, 0, cache)
    keys, values = cache.values_2GSE[:, 0, 0]
    block = slice(0, 32) if place < 32 else slice(32, 40)
    assert np.isnan(keys[block]).all()
    assert np.isfinite(values).all()


def test_q4_holds_large_numbers_and_limits_what_is_larger() -> None:
    qkv_TQ = np.array([[0.0] * 40 + [6e4] * 40 + [1e-9] * 40, [0.0] * 40 + [1e6] * 40 + [np.inf] * 40], np.float32)
    cache = Pages(1, 2, 40, "q4")
    write(qkv_TQ, 0, cache)
    keys, values = cache.as_given(cache.values_2GSE[:, 0, :2])
    np.testing.assert_allclose(keys[0], 6e4, rtol=1e-2)
    assert (values[0] == 0).all()
    np.testing.assert_allclose(keys[1], LARGEST_HALF, rtol=1e-2)
    np.testing.assert_allclose(values[1], LARGEST_HALF, rtol=1e-2)


def test_what_float16_cannot_hold_becomes_its_largest_number() -> None:
    qkv_TQ = np.array([[0.0, 1e6, -1e6]], np.float32)
    cache = Pages(1, 1, 1, "f16")
    write(qkv_TQ, 0, cache)
    np.testing.assert_array_equal(cache.values_2GSE[:, 0, 0, 0], [LARGEST_HALF, -LARGEST_HALF])


@FEW
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(2, 11),
    st.integers(1, 5),
    st.sampled_from([1.0, 1.25]),
    st.integers(0, 40),
)
def test_rotate(tokens: int, heads: int, others: int, width: int, pairs: int, scale: float, start: int) -> None:
    rotated = 2 * min(pairs, width // 2)
    decoder = small_decoder(head_dim=width, rotary_frequencies=frequencies(rotated), rotary_scale=scale)
    before = np.random.default_rng(0).standard_normal((tokens, (heads + others) * width), np.float32)
    qkv_TQ = before.copy()
    cos_SE, sin_SE = reference.rotary_table(decoder, start + tokens)
    rotate(cos_SE, sin_SE, cos_SE.shape[1], np.arange(start, start + tokens), heads, width, qkv_TQ)
    # The definition rotates from position 0: put the tokens behind `start` others.
    padded = np.zeros((start + tokens, heads, width), np.float32)
    padded[start:] = before[:, : heads * width].reshape(tokens, heads, width)
    wanted = reference.rotate(decoder, padded)[start:].reshape(tokens, -1)
    np.testing.assert_allclose(qkv_TQ[:, : heads * width], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(qkv_TQ[:, heads * width :], before[:, heads * width :])


@FEW
@given(st.integers(1, 5), st.integers(0, 3), st.integers(1, 3), st.integers(1, 40), st.sampled_from([1e-30, 1.0, 1e9]))
def test_norm_heads(tokens: int, first: int, heads: int, width: int, size: float) -> None:
    rng, decoder = np.random.default_rng(width), small_decoder(norm_eps=1e-5)
    before = rng.standard_normal((tokens, (first + heads + 1) * width), np.float32) * np.float32(size)
    weight_E, qkv_TQ = rng.standard_normal(width, np.float32), before.copy()
    norm_heads(np.float32(1e-5), weight_E.ctypes.data, first, heads, width, qkv_TQ)
    wanted = before.reshape(tokens, -1, width)
    wanted[:, first : first + heads] = reference.rms(decoder, wanted[:, first : first + heads]) * weight_E
    np.testing.assert_allclose(qkv_TQ, wanted.reshape(tokens, -1), rtol=1e-5, atol=0)


def test_rotation_depends_on_the_distance_alone() -> None:
    """(R_m q) · (R_n k) is the same for all pairs of one distance: what rotary positions are for."""
    decoder = small_decoder(head_dim=16)
    q_E, k_E = np.random.default_rng(2).standard_normal((2, 16), np.float32)
    cos_SE, sin_SE = reference.rotary_table(decoder, 60)
    products = []
    for position in (0, 7, 50):
        q_TE, k_TE = q_E[None].copy(), k_E[None].copy()
        rotate(cos_SE, sin_SE, cos_SE.shape[1], np.array([position]), 1, 16, q_TE)
        rotate(cos_SE, sin_SE, cos_SE.shape[1], np.array([position + 9]), 1, 16, k_TE)
        products.append(float(q_TE[0] @ k_TE[0]))
    np.testing.assert_allclose(products, products[0], rtol=1e-4)
