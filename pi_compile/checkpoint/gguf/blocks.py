"""Blocks of GGUF's tensors as number formats of ours hold them: the integers, and what lies beside them.

The formats themselves are ggml's (ggml-common.h, ggml-quants.c); the values are the same, bit for bit. Shape letters: R
rows, B blocks of a row, G groups of 256 columns, D columns.
"""

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from pi_runtime.artifact.formats import FORMATS, Format
from pi_runtime.artifact.quantisation import meant, records

Bytes = npt.NDArray[np.uint8]
Found = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def taken(fmt: Format, data: Bytes, factor: float = 1.0) -> Found:
    """Rows of a tensor in the format that keeps its type: signed integers (R, D), and scales as
    `quantisation.pack_rows` takes them; `factor` multiplies those of NVFP4."""
    q, beside = _READ.get(KEPT[fmt.name], _plain)(fmt, _blocks(fmt, data))
    if fmt.row_scaled:
        beside = np.concatenate([np.full((len(data), 1), factor, "<f4").view(np.uint8), beside], axis=1)
    return meant(fmt, q.reshape(len(data), -1)), beside


def has_lowest(fmt: Format, data: Bytes) -> bool:
    """Whether a byte of Q8_0 is −128, which has no counterpart above 0."""
    return bool((_blocks(fmt, data)[..., 2:] == 128).any())


def _blocks(fmt: Format, data: Bytes) -> Bytes:
    """The bytes (R, B, …) of blocks, or of groups."""
    nbytes = gguf.GGML_QUANT_SIZES[KEPT[fmt.name]][1]
    return np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1, nbytes)


def _nibbles(stored: Bytes) -> Bytes:
    """Lower halves, then upper ones, of the bytes of the last axis."""
    return np.concatenate([stored & 15, stored >> 4], axis=-1)


def _plain(fmt: Format, blocks: Bytes) -> Found:
    """Blocks of 32: 2 bytes of scale, 2 of a minimum, 4 of fifth bits, 16 of nibbles; or a byte for each column."""
    head, upper = 4 if fmt.offset else 2, 4 * (fmt.bits - 4)
    beside = np.ascontiguousarray(blocks[..., :head]).view("<f2").swapaxes(1, 2)
    if fmt.bits == 8:
        return blocks[..., head:] ^ np.uint8(fmt.zero), beside[:, 0]
    q = _nibbles(blocks[..., head + upper :])
    if upper:
        q |= np.unpackbits(blocks[..., head : head + upper], axis=-1, bitorder="little") << np.uint8(4)
    return q, beside if fmt.offset else beside[:, 0]


def _with_minima(fmt: Format, blocks: Bytes) -> Found:
    """Q4_K, Q5_K: d, dmin, 12 bytes of scales and minima, a bit of each column, nibbles of 64 columns after 64."""
    heads = np.ascontiguousarray(blocks[..., :4]).view("<u2")
    heads[..., 1] ^= 0x8000  # a minimum is added here; a number that is none is not computed with
    low, middle, high = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    q = _nibbles(blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    if fmt.bits > 4:
        q |= (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << np.uint8(4)
    return q, records(fmt, heads.view("<f2"), np.stack([scales, minima], axis=-1))


def _of_halves(fmt: Format, blocks: Bytes) -> Found:
    """Q6_K: nibbles and two bits of each column, for 128 columns after 128; signed scales of 16 columns; d."""
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).reshape(*blocks.shape[:2], 2, 4, 32)
    upper = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = blocks[..., 192:208] ^ np.uint8(fmt.scale_zero)
    heads = np.ascontiguousarray(blocks[..., 208:]).view("<f2")
    return low | upper << np.uint8(4), records(fmt, heads, scales.reshape(*blocks.shape[:2], 8, 2))


def _of_table(fmt: Format, blocks: Bytes) -> Found:
    """IQ4_XS: d, two upper bits of each scale, four lower ones, nibbles of 32 columns after 32."""
    lower = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*blocks.shape[:2], 8, 1)
    words = np.ascontiguousarray(blocks[..., :4]).view("<u2")
    upper = (words[..., 1:] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)[..., None]
    q = _nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))
    return q, records(fmt, words[..., :1].view("<f2"), lower | upper << np.uint8(4))


def _with_bytes(fmt: Format, blocks: Bytes) -> Found:
    """MXFP4, NVFP4: a byte for each scale, then nibbles of its columns after those of the one before."""
    scales = 1 if fmt.scales == 1 else 2 * fmt.scales  # of one block of 32, or of two
    q = _nibbles(blocks[..., scales:].reshape(*blocks.shape[:2], scales, -1))
    return q, blocks[..., :scales].reshape(len(blocks), -1)


_READ: Mapping[Type, Callable[[Format, Bytes], Found]] = {
    Type.Q4_K: _with_minima,
    Type.Q5_K: _with_minima,
    Type.Q6_K: _of_halves,
    Type.IQ4_XS: _of_table,
    Type.MXFP4: _with_bytes,
    Type.NVFP4: _with_bytes,
}
KEPT: Mapping[str, Type] = {f.name: Type[f.gguf] for f in FORMATS.values() if f.gguf and f.quantised}
"""Block format → the tensor type whose blocks it holds as they are."""
