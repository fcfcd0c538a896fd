"""Products with a stored matrix, and norms.

T tokens, D columns of the matrix, N rows. Every output is computed by one thread in one order, so the bits do not
depend on how many threads there are.
"""

import numpy as np
from numba import prange

from pi_runtime.kernels.compiling import leaf, operator
from pi_runtime.kernels.memory import F32, Floats, row_dot, row_load, vector

ROWS = 32
"""Rows a thread takes at once."""
COLUMNS = 256
"""Columns a thread takes at once where rows are summed."""


@operator
def linear(fmt: int, address: int, stride: int, rows: int, bias: int, x_TD: Floats, y_TN: Floats) -> None:
    """y = x Wᵀ + bias, W's rows `stride` bytes apart; `bias` is an address or 0."""
    tokens, columns = x_TD.shape
    for block in prange((rows + ROWS - 1) // ROWS):
        first, last = block * ROWS, min(rows, (block + 1) * ROWS)
        if tokens == 1:
            for n in range(first, last):
                y_TN[0, n] = row_dot(fmt, address + n * stride, x_TD[0])
        else:
            w_4D = np.empty((4, columns), np.float32)
            for n in range(first, last, 4):
                for i in range(4):  # past the end the last row is computed again, and dropped
                    row_load(fmt, address + min(n + i, last - 1) * stride, w_4D[i])
                for t in range(0, tokens, 4):
                    _tile(w_4D, x_TD, t, min(last - n, 4), n, y_TN)
        if bias != 0:
            b_N = vector(bias, rows)
            for t in range(tokens):
                for n in range(first, last):
                    y_TN[t, n] += b_N[n]


@leaf
def _tile(w_4D: Floats, x_TD: Floats, t: int, count: int, n: int, y_TN: Floats) -> None:
    """Four rows by four tokens at once: each number loaded is used four times."""
    tokens, columns = x_TD.shape
    x0, x1 = x_TD[t], x_TD[min(t + 1, tokens - 1)]
    x2, x3 = x_TD[min(t + 2, tokens - 1)], x_TD[min(t + 3, tokens - 1)]
    for i in range(0, count, 2):
        w0, w1 = w_4D[i], w_4D[i + 1]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
        for j in range(columns):
            a0 += w0[j] * x0[j]
            a1 += w0[j] * x1[j]
            a2 += w0[j] * x2[j]
            a3 += w0[j] * x3[j]
            b0 += w1[j] * x0[j]
            b1 += w1[j] * x1[j]
            b2 += w1[j] * x2[j]
            b3 += w1[j] * x3[j]
        _store(y_TN, t, n + i, a0, a1, a2, a3)
        if i + 1 < count:
            _store(y_TN, t, n + i + 1, b0, b1, b2, b3)


@leaf
def _store(y_TN: Floats, t: int, n: int, a0: float, a1: float, a2: float, a3: float) -> None:
    tokens = y_TN.shape[0]
    y_TN[t, n] = a0
    if t + 1 < tokens:
        y_TN[t + 1, n] = a1
    if t + 2 < tokens:
        y_TN[t + 2, n] = a2
    if t + 3 < tokens:
        y_TN[t + 3, n] = a3


@operator
def combine(fmt: int, address: int, stride: int, columns: int, h_TN: Floats, y_TD: Floats) -> None:
    """y ← y + h W: rows of W weighted by h and summed in row order, skipping zeros. A thread owns columns."""
    tokens, rows = h_TN.shape
    itemsize = 4 if fmt == F32 else 2
    for tile in prange((columns + COLUMNS - 1) // COLUMNS):
        first, last = tile * COLUMNS, min(columns, (tile + 1) * COLUMNS)
        w_4C = np.empty((4, last - first), np.float32)
        for n in range(0, rows, 4):
            loaded = False
            for t in range(tokens):
                h0, h1 = h_TN[t, n], h_TN[t, n + 1] if n + 1 < rows else np.float32(0)
                h2 = h_TN[t, n + 2] if n + 2 < rows else np.float32(0)
                h3 = h_TN[t, n + 3] if n + 3 < rows else np.float32(0)
                if h0 != 0 or h1 != 0 or h2 != 0 or h3 != 0:
                    if not loaded:
                        for i in range(4):  # past the end any row will do, its weight is zero
                            row_load(fmt, address + min(n + i, rows - 1) * stride + first * itemsize, w_4C[i])
                        loaded = True
                    y_C, w0, w1, w2, w3 = y_TD[t, first:last], w_4C[0], w_4C[1], w_4C[2], w_4C[3]
                    for j in range(last - first):
                        y_C[j] += h0 * w0[j] + h1 * w1[j] + h2 * w2[j] + h3 * w3[j]


@leaf
def norm(centred: int, eps: float, weight: int, bias: int, x_TD: Floats, y_TD: Floats) -> None:
    """rms: x / √(mean x² + eps) · weight;  centred (layer norm): (x − mean) / √(var + eps) · weight + bias."""
    tokens, width = x_TD.shape
    w_D = vector(weight, width)
    for t in range(tokens):
        mean = np.float32(0)
        if centred:
            for j in range(width):
                mean += x_TD[t, j]
            mean /= np.float32(width)
        square = np.float32(0)
        for j in range(width):
            square += (x_TD[t, j] - mean) * (x_TD[t, j] - mean)
        scale = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
        for j in range(width):
            y_TD[t, j] = (x_TD[t, j] - mean) * scale * w_D[j]
        if centred:
            add_vector(bias, y_TD[t])


@leaf
def add_vector(address: int, y_D: Floats) -> None:
    """y ← y + the vector at an address; 0 for none."""
    if address != 0:
        b_D = vector(address, y_D.shape[0])
        for j in range(y_D.shape[0]):
            y_D[j] += b_D[j]
