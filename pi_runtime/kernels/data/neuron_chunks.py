"""Which chunk of an FFN takes which neurons, and the memory that a chunk works in.

Neurons are dealt to `CHUNKS` chunks in groups of `GROUP`: neuron i goes to chunk turned((i / GROUP) mod CHUNKS). Inside
its chunk it belongs to the block i / `block_neurons`. Both follow from its number alone, so a sum by blocks and chunks
has the same bits whichever other neurons, tokens or threads take part.

Shape letters: F neurons of the layer (with experts, of one expert) in stored order, D model width, T tokens of a call,
C chunks, K places for the neurons of a chunk or for its tokens' lists, P padded columns, B blocks of a chunk, U lists:
one for each block and each of a few tokens.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from pi_runtime.artifact.footprint import BLOCK_SUM_FLOATS, CHUNKS, FEW_TOKENS, GROUP, SUM_NEURONS, SUM_ROWS
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    Ints,
    MatrixView,
    address_of,
    integers,
    is_quantised,
    pointer_of,
    vector,
)
from pi_runtime.kernels.data.quantised_input import padded_columns
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.data.workspace import Workspace

BLOCK_NBYTES = 2**19
"""Bytes of one matrix in a block of a chunk's neurons: a third of the second-level cache at most, and more than most
tokens need."""
FIRES, READ, KEPT = range(3)
"""What is counted for each token: neurons that fire (of all, if asked for), rows of `first` read, neurons kept."""
_TURNED_BITS = CHUNKS.bit_length() - 1
assert CHUNKS == 1 << _TURNED_BITS


class Chunks(NamedTuple):
    """Addresses of what the chunks work with, and its sizes; see `Workspace`."""

    neurons: int
    """F."""
    tokens: int
    """Room for so many tokens."""
    list_CK: int
    count_C: int
    h_CTK: int
    up_CTK: int
    scored_T: int
    asking_T: int
    tally_CT3: int
    sums_CTP: int
    scratch_CX: int


@public
def chunks_of(cfg: KernelConfig, ws: Workspace) -> Chunks:
    """The chunks' memory in a workspace, valid as long as that is."""
    return Chunks(
        cfg.d_ff,
        ws.x_TD.shape[0],
        address_of(ws.list_CK),
        address_of(ws.count_C),
        address_of(ws.h_CTK),
        address_of(ws.up_CTK),
        address_of(ws.scored_T),
        address_of(ws.asking_T),
        address_of(ws.tally_CT3),
        address_of(ws.sums_CTP),
        address_of(ws.scratch_CX),
    )


@device
def turned(group: int) -> int:
    """The number with its bits reversed: the chunk that a group of a round goes to, and the group that a chunk gets.

    Neurons are stored by how often they fire. So neighbouring chunks, which one thread takes, get as many as others.
    """
    found = 0
    for bit in range(_TURNED_BITS):
        found |= (group >> bit & 1) << (_TURNED_BITS - 1 - bit)
    return found


@device
def list_range(chunk: int, low: int, high: int, list_K: Ints) -> int:
    """List the chunk's neurons of [low, high) in ascending order; returns how many."""
    count, first = 0, low // GROUP
    group = first + (turned(chunk) - first) % CHUNKS
    while group * GROUP < high:
        for i in range(max(low, group * GROUP), min(high, (group + 1) * GROUP)):
            list_K[count] = i
            count += 1
        group += CHUNKS
    return count


@device
def block_neurons(first: MatrixView) -> int:
    """Neurons of a block of all chunks together, by the matrix of their `first` rows."""
    if is_quantised(first.fmt):
        return CHUNKS * SUM_NEURONS
    places = BLOCK_NBYTES // first.stride // GROUP * GROUP
    return CHUNKS * max(GROUP, min(SUM_NEURONS, places))


@device
def block_end(neurons: int, list_K: Ints, begin: int, count: int) -> int:
    """The place behind the block that the neuron at place `begin` of a list belongs to."""
    behind, end = (list_K[begin] // neurons + 1) * neurons, begin + 1
    while end < count and list_K[end] < behind:
        end += 1
    return end


@device
def _chunk_places(neurons: int) -> int:
    """Places for the neurons of one chunk: `footprint.chunk_places`, for kernels."""
    groups = (neurons + GROUP - 1) // GROUP
    return (groups + CHUNKS - 1) // CHUNKS * GROUP


@device
def _list_places(neurons: int) -> int:
    """Places for the lists of a chunk: `footprint.list_places`, for kernels."""
    return FEW_TOKENS * _chunk_places(neurons) + 2 * SUM_NEURONS + SUM_ROWS


@device
def _ffn_floats(neurons: int) -> int:
    """4-byte numbers that a chunk works in: `footprint.ffn_floats`, for kernels."""
    blocks = _chunk_places(neurons) // GROUP
    return 6 * _list_places(neurons) + 4 * blocks * (FEW_TOKENS + 1) + 6 + BLOCK_SUM_FLOATS


@device
def list_of(m: Chunks, chunk: int) -> Ints:
    """The chunk's list of neurons; `counts_of` says how many of its places are taken."""
    places = _chunk_places(m.neurons)
    return integers(m.list_CK + 8 * chunk * places, places)


@device
def counts_of(m: Chunks) -> Ints:
    """Length of each chunk's list."""
    return integers(m.count_C, CHUNKS)


@device
def factors_of(m: Chunks, chunk: int, tokens: int) -> Floats:
    """The chunk's factors (T, K), one for each token and place of its list."""
    places = _chunk_places(m.neurons)
    return carray(pointer_of(m.h_CTK + 4 * chunk * m.tokens * places), (tokens, places), np.float32)


@device
def ups_of(m: Chunks, chunk: int, tokens: int) -> Floats:
    """The chunk's products (T, K) with the rows of `up`, one for each token and place of its list."""
    places = _chunk_places(m.neurons)
    return carray(pointer_of(m.up_CTK + 4 * chunk * m.tokens * places), (tokens, places), np.float32)


@device
def tally_of(m: Chunks, chunk: int, tokens: int) -> Ints:
    """What the chunk counts for each token (T, 3)."""
    return carray(pointer_of(m.tally_CT3 + 8 * chunk * m.tokens * 3), (tokens, 3), np.int64)


@device
def sums_of(cfg: KernelConfig, m: Chunks, chunk: int, tokens: int) -> Floats:
    """The chunk's sums (T, P) for a few tokens."""
    width = padded_columns(cfg.d_model)
    return carray(pointer_of(m.sums_CTP + 4 * chunk * min(m.tokens, FEW_TOKENS) * width), (tokens, width), np.float32)


@device
def scored_of(m: Chunks, tokens: int) -> Ints:
    """Which of the scores are a token's; −1 where it has none, and reads every neuron."""
    return integers(m.scored_T, tokens)


@device
def asking_of(m: Chunks, tokens: int) -> Ints:
    """The tokens whose neurons are scored, in the order of the scores."""
    return integers(m.asking_T, tokens)


class TokenLists(NamedTuple):
    """The lists of a few tokens, each of its own neurons of a block, one after the other; in memory of the chunk.

    They go by block and token: the n-th token of block u has number u · `FEW_TOKENS` + n. Behind them is room for rows
    that are only fetched, and in the last places (`spare_place`) for one list more and zeros.
    """

    list_K: Ints
    place_K: Ints
    """The neurons' places in the list of the chunk."""
    h_K: Floats
    product_K: Floats
    start_U: Ints
    count_U: Ints
    block_B: Ints
    """Where each block begins in the chunk's list, and where the last one ends."""
    whole_B: Ints
    """1 where a block's factors stand in `factors_of` for every place instead of in lists."""
    size_2: Ints
    """How many blocks there are, and how long the lists are together."""
    sums: int
    """The address of what integer sums work in."""


@device
def lists_of(m: Chunks, chunk: int) -> TokenLists:
    """The tokens' lists of a chunk."""
    places, blocks = _list_places(m.neurons), _chunk_places(m.neurons) // GROUP
    lists, at = blocks * FEW_TOKENS, m.scratch_CX + 4 * _ffn_floats(m.neurons) * chunk
    start = at + 24 * places
    block = start + 16 * lists
    size = block + 8 * (blocks + 1) + 8 * blocks
    return TokenLists(
        integers(at, places),
        integers(at + 8 * places, places),
        vector(at + 16 * places, places),
        vector(at + 20 * places, places),
        integers(start, lists),
        integers(start + 8 * lists, lists),
        integers(block, blocks + 1),
        integers(block + 8 * (blocks + 1), blocks),
        integers(size, 2),
        size + 16,
    )


@device
def spare_place(own: TokenLists) -> int:
    """The first place of the list behind all others."""
    return own.list_K.shape[0] - SUM_NEURONS - SUM_ROWS
