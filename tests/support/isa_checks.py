"""Every kernel made of vector instructions against float64, with the instruction set that PI_ISA names.

Prints that name. A process of its own, because the choice is made once; few kernels, because each set compiles its own.
"""

import numpy as np

from pi_runtime.artifact.footprint import gather_floats, input_nbytes
from pi_runtime.kernels import ffn, reference
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.quantised_input import padded_columns
from pi_runtime.kernels.ops.gathered_sum import add_gathered
from pi_runtime.kernels.ops.linear import linear
from pi_runtime.kernels.ops.row_dot import row_dot
from support.rounding import product
from support.stored import WEIGHT_FORMATS, StoredMatrix, ffn_layer, quantised_inputs, store, store_integers
from support.synthetic import small_decoder

WIDTHS = (1, 33, 97, 225, 257, 700)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def dots(w: StoredMatrix, x_D: np.ndarray) -> np.ndarray:
    x_at = quantised_inputs(w.fmt, x_D[None])
    return np.float32([row_dot(w.view, row, row, x_at.ctypes.data) for row in range(len(w.values))])


def times(w: StoredMatrix, x_TD: np.ndarray) -> np.ndarray:
    room = np.empty(len(x_TD) * input_nbytes(x_TD.shape[1]), np.uint8)
    y_TN = np.empty((len(x_TD), len(w.values)), np.float32)
    linear(w.view, len(w.values), 0, x_TD, room.ctypes.data, y_TN)
    return y_TN


def check_products(fmt: str) -> None:
    for columns in WIDTHS:
        w, x_TD = store(fmt, random(columns, 37, columns)), random(1, 5, columns)
        assert product(w, x_TD[:1]).holds(dots(w, x_TD[0])), columns
        for tokens in (1, 5):
            assert product(w, x_TD[:tokens]).holds(times(w, x_TD[:tokens])), (columns, tokens)


def check_extremes(fmt: str) -> None:
    """The largest integers of either sign, where sums of pairs might saturate."""
    for integer in (127, -127) if fmt == "q8" else (7, -8):
        w, x_TD = store_integers(fmt, np.full((1, 300), integer), 1.0), np.full((2, 300), np.float32(127))
        x_TD[1] = -127
        wanted = integer * x_TD.sum(1, keepdims=True)
        np.testing.assert_array_equal(times(w, x_TD), wanted)
        np.testing.assert_array_equal([dots(w, x_D) for x_D in x_TD], wanted)


def check_weighted_sums(fmt: str) -> None:
    for count, columns in ((1, 31), (33, 97), (70, 300), (5, 512)):
        w, h_K = store(fmt, random(count, 90, columns)), random(2, count)
        index_K = np.random.default_rng(0).permutation(90)[:count]
        y_P, workspace = np.zeros(padded_columns(columns), np.float32), np.empty(gather_floats(columns), np.float32)
        add_gathered(w.view, index_K, h_K, index_K, y_P, workspace.ctypes.data)
        # Every term may be off by half of 1/32767 of the largest one.
        error = count * 0.6 / 32767 * np.abs(h_K).max() * np.abs(w.values).max()
        assert np.abs(y_P[:columns] - h_K @ w.values[index_K]).max() <= error, (count, columns)


def check_ffn(fmt: str) -> None:
    layer = ffn_layer(small_decoder(d_model=133, d_ff=200, activation="silu"), fmt, 1, 0)
    x_TD = random(3, 1, 133)
    ffn.serial_step(layer.cfg, layer.on("gate"), x_TD[0], 0, 200, np.float32(1), False, layer.ws)
    y_D = np.zeros(133, np.float32)
    ffn.add_sums(layer.ws.sums_CP, y_D)
    np.testing.assert_allclose(y_D, reference.ffn(layer.decoder, layer.values, x_TD)[0], rtol=1e-3, atol=1e-4)


def main() -> None:
    for fmt in WEIGHT_FORMATS:
        check_products(fmt)
        check_weighted_sums(fmt)
        check_ffn(fmt)
    for fmt in ("q8", "q4"):
        check_extremes(fmt)
    print(ISA.name)


if __name__ == "__main__":
    main()
