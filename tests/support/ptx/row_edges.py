"""Cases at the edges of kernels that read stored rows: one row, rows that do not follow each other, rows far apart."""

import mmap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from pi_runtime.cuda.kernels import dequantise, row_dot
from support.gpu_kernels import Stored, normal
from support.ptx.cases import CPU, ROWS, SMALL_DOTS, Case, put, room


def of_numbers() -> Iterator[Case]:
    """Stored rows from one on, as f16, in rows that do not follow each other; and one token's added, by few threads."""
    rng, columns = np.random.default_rng(8), 660
    m, y = Stored(CPU, "q8", normal(rng, 40, columns)), room(33, columns, torch.float16)
    wanted = m.values[5:38].astype(np.float16).astype(np.float32)
    yield Case("_dequantise_words", "f16", lambda: dequantise.dequantise_rows(m.matrix, None, 5, y), y, wanted, 1e-6)
    for fmt, kernel in (("f32", "_dequantise"), ("q8", "_dequantise_words")):
        positions, x, row = Stored(CPU, fmt, normal(rng, 9, columns)), normal(rng, 1, columns), torch.tensor([3])
        launch = partial(dequantise.dequantise_rows, positions.matrix, row, 2, x_TD := put(x), add=True)
        yield Case(kernel, f"{fmt}, one token", launch, x_TD, x + positions.values[5:6], 1e-6)


def _far(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """The same rows, each `stride` numbers behind the one before it. Memory that is not written is not taken."""
    rows, columns = tensor.shape
    size, no_reserve = ((rows - 1) * stride + columns) * tensor.itemsize, 0x4000
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    found = torch.frombuffer(memory, dtype=tensor.dtype).as_strided((rows, columns), (stride, 1))
    return found.copy_(tensor)


def of_far_rows() -> Iterator[Case]:
    """Row times stride is more than 32 bits hold."""
    rng = np.random.default_rng(9)
    for fmt, columns, stride in (("f16", 300, 1 << 29), ("q8", 660, (1 << 31) - 64)):
        m, x, y = Stored(CPU, fmt, normal(rng, 6, columns)), normal(rng, 1, columns), torch.full((1, 6), 1.0)
        scales = None if m.matrix.scales is None else _far(m.matrix.scales, 1 << 29)
        far, x_MD, bias = replace(m.matrix, values=_far(m.matrix.values, stride), scales=scales), put(x), torch.zeros(6)
        launch = partial(row_dot.linear, far, bias, x_MD, y, SMALL_DOTS, add=True)
        yield Case("_linear", f"{fmt}, far rows", launch, y, 1 + x @ m.values.T, 2e-5)
    m, rows = Stored(CPU, "f16", normal(rng, ROWS, 300)), torch.arange(70)
    far_y = _far(torch.ones(70, 300), 1 << 26)
    store = partial(dequantise.dequantise_rows, m.matrix, rows, 0, far_y, add=True)
    yield Case("_dequantise", "f16, far results", store, far_y, 1 + m.values[:70], 1e-6)
