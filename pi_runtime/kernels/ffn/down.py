"""Sums of rows of `down` for a few tokens: of the rows that each needs, or of whole blocks of a chunk's neurons.

Shape letters: N tokens, K places of the chunk's list or of the tokens' lists, P padded columns.
"""

import numpy as np

from pi_runtime.artifact.footprint import FEW_TOKENS, SUM_ROWS
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    Ints,
    MatrixView,
    address_of,
    columns_from,
    is_quantised,
    listed_rows,
)
from pi_runtime.kernels.ffn.memory import (
    END,
    WHOLE,
    Batch,
    Ffn,
    Places,
    TokenLists,
    block_end,
    block_neurons,
    down_rows,
    factors_of,
    kept_of,
    list_of,
    lists_of,
    spare_place,
    weights_of,
)
from pi_runtime.kernels.ops.block_sums import add_block_rows
from pi_runtime.kernels.ops.block_tiles import add_block_tile
from pi_runtime.kernels.ops.list_sums import COLUMNS, list_sums
from pi_runtime.kernels.ops.row_sums import row_sums

_HAS_VECTORS = ISA.lanes > 0
_list_sums = by_address(list_sums)


@device
def few_at_a_time(e: Batch) -> bool:
    """Whether tokens go a few at a time, of which each chunk has sums: few ones, and those that all skip neurons.

    Each of these takes few rows, of which a few tokens at a time share enough.
    """
    found, tokens = weights_of(e).dense == 0, e.token_N.shape[0]
    for n in range(tokens):
        found &= e.select_N[n] != 0
    return found or tokens <= FEW_TOKENS


@device
def add_list(down: MatrixView, own: TokenLists, start: int, count: int, gaps: bool, known: int, y_P: Floats) -> None:
    """y ← y + the sum of the `count` rows listed from `start` on. The rows that follow in the lists are fetched ahead.

    `gaps`: many factors are 0, and their rows are not read.
    """
    if gaps:
        last = start
        for k in range(start, start + count):
            own.list_K[last], own.h_K[last] = own.list_K[k], own.h_K[k]
            last += own.h_K[k] != 0
        count = last - start
    listed, following = address_of(own.list_K) + 8 * start, count if gaps else known - start
    if is_quantised(down.fmt):
        add_block_rows(down, listed, count, following, address_of(own.h_K) + 4 * start, y_P, own.sums)
    else:
        h_K = own.product_K[spare_place(own) :][: count + SUM_ROWS]  # the products are no longer needed
        h_K[:count], h_K[count:] = own.h_K[start : start + count], np.float32(0)
        row_sums(down, listed_rows(listed, count, following), address_of(h_K), 0, 1, address_of(y_P), 0)


@device
def add_whole(
    down: MatrixView, own: TokenLists, list_K: Ints, begin: int, end: int, h_NK: Floats, y_NP: Floats
) -> None:
    """y ← y + the sums of the rows at the places [begin, end) of a list, times their factors, for a few tokens."""
    tokens, count = y_NP.shape[0], end - begin
    if _mostly(h_NK, tokens, begin, end):
        listed, h_at, h_stride = address_of(list_K) + 8 * begin, address_of(h_NK) + 4 * begin, 4 * h_NK.shape[1]
        if is_quantised(down.fmt):
            add_block_tile(down, listed, count, h_at, h_stride, y_NP, own.sums)
            return
        if count % SUM_ROWS == 0:
            rows = listed_rows(listed, count, count)
            row_sums(down, rows, h_at, h_stride, tokens, address_of(y_NP), 4 * y_NP.shape[1])
            return
    start = spare_place(own)
    for n in range(tokens):
        last = start
        for k in range(begin, end):
            own.list_K[last], own.h_K[last] = list_K[k], h_NK[n, k]
            last += h_NK[n, k] != 0
        add_list(down, own, start, last - start, False, last, y_NP[n])


@device
def keep(begin: int, end: int, h_NK: Floats, kept_NK: Places) -> None:
    """Write which rows have factors at the places [begin, end): all, or where these are few those of each token."""
    if _mostly(h_NK, h_NK.shape[0], begin, end):
        kept_NK[:, begin] = WHOLE
        return
    for n in range(h_NK.shape[0]):
        last = begin
        for k in range(begin, end):
            h = h_NK[n, k]
            h_NK[n, last], kept_NK[n, last] = h, k - begin
            last += h != 0
        if last < end:
            kept_NK[n, last] = END


@device
def add_tile(f: Ffn, e: Batch, chunk: int, part: int, low: int, columns: int, first: int, sums_NP: Floats) -> None:
    """Add a chunk's rows of `down` for some columns and the tokens from `first` on, in the lists of chunk `part`."""
    down, list_K, neurons, begin = (
        columns_from(down_rows(f, e), low, columns),
        list_of(f, chunk),
        block_neurons(f, e),
        0,
    )
    h_NK = factors_of(f, chunk, first + sums_NP.shape[0])[first:]
    kept_NK, own = kept_of(f, chunk, first + sums_NP.shape[0])[first:], lists_of(f, part)
    while begin < list_K.shape[0]:
        end = block_end(neurons, list_K, begin)
        if kept_NK[0, begin] == WHOLE:
            add_whole(down, own, list_K, begin, end, h_NK, sums_NP)
        else:
            _add_kept(down, own, list_K, begin, end, kept_NK, h_NK, sums_NP)
        begin = end


@device
def _add_kept(
    down: MatrixView, own: TokenLists, list_K: Ints, begin: int, end: int, kept_NK: Places, h_NK: Floats, y_NP: Floats
) -> None:
    """y ← y + the sums of the rows that each of a few tokens needs of the block at the places [begin, end)."""
    tokens, width = y_NP.shape[0], kept_NK.shape[1]
    for n in range(tokens):
        last = begin
        while last < end and kept_NK[n, last] != END:
            last += 1
        own.count_U[n] = last - begin
    if _HAS_VECTORS and down.columns % COLUMNS == 0 and not is_quantised(down.fmt):
        listed = listed_rows(address_of(list_K) + 8 * begin, end - begin, end - begin)
        lists = address_of(kept_NK) + 4 * begin, address_of(h_NK) + 4 * begin, 4 * width, address_of(own.count_U)
        _list_sums(down, listed, *lists, tokens, address_of(y_NP), 4 * y_NP.shape[1])
        return
    start = spare_place(own)
    for n in range(tokens):
        count = own.count_U[n]
        for k in range(count):
            own.list_K[start + k], own.h_K[start + k] = list_K[begin + kept_NK[n, begin + k]], h_NK[n, begin + k]
        add_list(down, own, start, count, False, start + count, y_NP[n])


@device
def _mostly(h_NK: Floats, tokens: int, begin: int, end: int) -> bool:
    """Whether most factors are not 0."""
    found = 0
    for n in range(tokens):
        for k in range(begin, end):
            found += h_NK[n, k] != 0
    return 2 * found > tokens * (end - begin)
