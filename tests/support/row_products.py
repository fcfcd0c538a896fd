"""Products of rows with vectors by any kernel that computes them."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from pi_runtime.kernels.data.matrix_view import RowList, Vectors
from support.stored import StoredMatrix, quantised_inputs


def products(
    compute: Any, w: StoredMatrix, x_TD: np.ndarray, rows: Sequence[int] | None = None, tokens: Sequence[int] = ()
) -> np.ndarray:
    """(T, N): some rows of w, or all in turn, times some vectors, or all in turn; nothing is written around them."""
    x, index = quantised_inputs(w.fmt, x_TD), np.array(rows if rows is not None else (), np.int64)
    chosen, count = np.array(tokens, np.int64), len(w.values) if rows is None else len(rows)
    around = np.full((len(tokens or x_TD) + 2, count + 3), np.float32(7))
    listed = RowList(0, 0 if rows is None else index.ctypes.data, count, count)
    vectors = Vectors(x.ctypes.data, x.strides[0], chosen.ctypes.data if tokens else 0, len(tokens or x_TD))
    compute(w.view, listed, vectors, around[1:].ctypes.data, around.strides[0])
    assert np.all(around[[0, -1]] == 7), "wrote before or after the results"
    assert np.all(around[:, count:] == 7), "wrote beside the results"
    return around[1:-1, :count]


def at_the_end_of_memory(array: np.ndarray) -> np.ndarray:
    """A copy of an array behind which nothing can be read: a wrong read would end the process."""
    nbytes = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = np.frombuffer(mmap.mmap(-1, nbytes + mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(room.ctypes.data + nbytes), mmap.PAGESIZE, 0) == 0
    found = room[nbytes - array.nbytes : nbytes].view(array.dtype).reshape(array.shape)
    found[:] = array
    return found
