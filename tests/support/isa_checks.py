"""Every kernel made of vector instructions against float64, with the instruction set that PI_ISA names.

`isa_checks.py [FORMAT…]` prints that name. A process of its own, because the choice is made once; few kernels, because
each set compiles its own.
"""

import sys
import zlib

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_SUM, input_nbytes, padded_width
from pi_runtime.kernels import reference
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Floats, RowList
from pi_runtime.kernels.ffn.network import serial_add_neurons
from pi_runtime.kernels.ops import row_sums
from pi_runtime.kernels.ops.activations import EMITTED, activate
from pi_runtime.kernels.ops.block_sums import add_block_rows
from pi_runtime.kernels.ops.linear import linear
from support.rounding import product
from support.stored import BLOCK_FORMATS, ROW_FORMATS, StoredMatrix, ends, ffn_layer, store, store_integers
from support.synthetic import small_decoder

WIDTHS = (1, 33, 97, 225, 257, 700)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def times(w: StoredMatrix, x_TD: np.ndarray) -> np.ndarray:
    room = np.empty(len(x_TD) * input_nbytes(x_TD.shape[1]), np.uint8)
    y_TN = np.empty((len(x_TD), len(w.values)), np.float32)
    linear(w.view, len(w.values), 0, x_TD, room.ctypes.data, y_TN)
    return y_TN


def check_products(fmt: str) -> None:
    for columns in WIDTHS:
        w, x_TD = store(fmt, random(columns, 37, columns)), random(1, 5, columns)
        for tokens in (1, 5):
            assert product(w, x_TD[:tokens]).holds(times(w, x_TD[:tokens])), (columns, tokens)


def check_extremes(fmt: str) -> None:
    """The largest integers of either sign, where sums of pairs might saturate."""
    for integer in ends(fmt):
        w, x_TD = store_integers(fmt, np.full((1, 300), integer), 1.0), np.full((2, 300), np.float32(127))
        x_TD[1] = -127
        wanted = integer * x_TD.sum(1, keepdims=True)
        np.testing.assert_array_equal(times(w, x_TD), wanted)
        np.testing.assert_array_equal(times(w, x_TD[:1]), wanted[:1])


def check_sums(fmt: str) -> None:
    compute = row_sums.vector_row_sums if ISA.lanes else row_sums.portable_row_sums
    scratch = np.empty(BLOCK_SUM.end, np.uint8)
    for count, columns in ((1, 31), (33, 97), (70, 300), (5, 512), (9, 700)):
        w, h_TK = store(fmt, random(count, 90, columns)), np.zeros((2, 72), np.float32)
        h_TK[:, :count] = random(2, 2, count)
        index_K = np.random.default_rng(0).permutation(90)[:count]
        y_TP, listed = np.zeros((2, padded_width(columns)), np.float32), (index_K.ctypes.data, count, count)
        if w.quantised:
            for h_K, y_P in zip(h_TK, y_TP, strict=True):
                add_block_rows(w.view, *listed, h_K.ctypes.data, y_P, scratch.ctypes.data)
        else:
            factors, sums = (h_TK.ctypes.data, h_TK.strides[0]), (y_TP.ctypes.data, y_TP.strides[0])
            compute(w.view, RowList(0, *listed), *factors, 2, *sums)
        wanted_TD, error = h_TK[:, :count] @ w.values[index_K], 1e-4 * np.abs(h_TK).sum() * np.abs(w.values).max()
        assert np.abs(y_TP[:, :columns] - wanted_TD).max() <= error, (count, columns)


def check_ffn(fmt: str) -> None:
    layer = ffn_layer(small_decoder(d_model=133, d_ff=200, activation="silu"), fmt, 1, 0)
    x_TD = random(3, 1, 133)
    y_TD, tally_T3 = np.zeros((1, 133), np.float32), np.zeros((1, 3), np.int64)
    serial_add_neurons(layer.ffn, layer.batch("gate", 0, 200, 1), x_TD, tally_T3, y_TD)
    np.testing.assert_allclose(y_TD, reference.ffn(layer.decoder, layer.values, x_TD), rtol=1e-3, atol=1e-4)


ACTIVATED = 3597740540
"""A checksum of the bits of all activations but GELU, whose error function is the C library's."""


@public
def activate_row(activation: int, limit: np.float32, z_K: Floats) -> None:
    activate(activation, limit, z_K)


def check_activations() -> None:
    found = 0
    for activation in EMITTED:
        z_K = np.arange(-1701, 1701).astype(np.float32) / np.float32(128)
        activate_row(activation, np.float32(0.01), z_K)
        found = zlib.crc32(z_K.tobytes(), found)
    assert found == ACTIVATED, found


def main() -> None:
    formats = sys.argv[1:] or [*ROW_FORMATS]
    for fmt in formats:
        check_products(fmt)
        check_sums(fmt)
        check_ffn(fmt)
        if fmt in BLOCK_FORMATS:
            check_extremes(fmt)
    check_activations()
    print(ISA.name)


if __name__ == "__main__":
    main()
