"""Products by AMX's tiles beside those by vectors, on one thread: 10⁹ multiplications a second, and their ratio.

nox -s bench -- tiles [--formats q8,q4,q4_k] [--shapes 5632x2048,4864x896] [--vectors 32,64] [--rounds 15]

Both run in one process and take turns, for a machine's clock may wander: the ratio is the median of the rounds, the
rates are the best of them. Inputs are prepared before. The results are compared bit for bit.
"""

import argparse
import sys
import time

import numpy as np
from support.stored import quantised_inputs, store

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import MatrixView, RowList, Vectors
from pi_runtime.kernels.data.weight_formats import GROUP_COLUMNS
from pi_runtime.kernels.ops.linear import ROWS_AT_ONCE
from pi_runtime.kernels.ops.row_products import tiled_row_products, vector_row_products
from pi_runtime.kernels.ops.tile_packing import FEWEST, TILED


@public
def products(tiles: bool, m: MatrixView, rows: int, x: Vectors, out: int, stride: int) -> None:
    for first in range(0, rows, ROWS_AT_ONCE):
        some = RowList(first, 0, min(ROWS_AT_ONCE, rows - first), rows - first)
        if tiles:
            tiled_row_products(m, some, x, out + 4 * first, stride)
        else:
            vector_row_products(m, some, x, out + 4 * first, stride)


def measured(fmt: str, rows: int, columns: int, tokens: int, rounds: int) -> str:
    rng = np.random.default_rng(0)
    w = store(fmt, rng.standard_normal((rows, columns), np.float32))
    inputs = quantised_inputs(w.fmt, rng.standard_normal((tokens, columns), np.float32))
    x, y_2TN = Vectors(inputs.ctypes.data, inputs.strides[0], 0, tokens), np.zeros((2, tokens, rows), np.float32)
    seconds_R2 = np.empty((rounds + 1, 2))
    for seconds_2 in seconds_R2:
        for n, tiles in enumerate((True, False)):
            began = time.perf_counter()
            products(tiles, w.view, rows, x, y_2TN[n].ctypes.data, y_2TN.strides[1])
            seconds_2[n] = time.perf_counter() - began
    assert np.array_equal(*y_2TN), "other bits"
    tiles_s, vectors_s = seconds_R2[1:].T
    rates = (rows * columns * tokens / s.min() / 1e9 for s in (tiles_s, vectors_s))
    return f"{tokens}: {' and '.join(f'{rate:.0f}' for rate in rates)}, × {np.median(vectors_s / tiles_s):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="q8,q4,q4_k")
    parser.add_argument("--shapes", default="5632x2048,1536x8960,4864x896")
    parser.add_argument("--vectors", default="32,64")
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    if not ISA.tiles:
        sys.exit(f"{ISA.name}: this process has no tiles")
    if others := [name for name in a.formats.split(",") if FORMATS[name].code not in TILED]:
        parser.error(f"{', '.join(others)}: no tiles compute it")
    if min(int(n) for n in a.vectors.split(",")) < FEWEST:
        parser.error(f"fewer than {FEWEST} vectors are not laid as tiles: both ways would be the same")
    for fmt in a.formats.split(","):
        for shape in a.shapes.split(","):
            rows, columns = map(int, shape.split("x"))
            if not FORMATS[fmt].grouped or columns % GROUP_COLUMNS == 0:
                found = [measured(fmt, rows, columns, int(n), a.rounds) for n in a.vectors.split(",")]
                print(f"{fmt} {shape}  {'   '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
