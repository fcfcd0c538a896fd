"""What an FFN's kernels take: the FFN, a batch of one expert's tokens, and the memory of each chunk of its neurons.

Neurons are dealt to `CHUNKS` chunks in groups of `GROUP`: neuron i goes to chunk reversed((i / GROUP) mod CHUNKS).
Inside its chunk it belongs to the block i / `block_neurons`. Both follow from its number alone, so a sum by blocks and
chunks has the same bits whichever other neurons, tokens or threads take part.

Shape letters: F neurons of the layer (with experts, of one expert) in stored order, D model width, X experts, T tokens
of a call, N of them that take one expert, C chunks, K places for the neurons of a chunk or for its tokens' lists, P
padded columns, B blocks of a chunk, U lists: one for each block and each of a few tokens.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS, GROUP, SUM_NEURONS, SUM_ROWS
from pi_runtime.kernels.codegen.intrinsics import chunk_layout, chunk_places, padded_width
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    Ints,
    MatrixView,
    address_of,
    in_slots,
    integers,
    is_quantised,
    matrix,
    pointer_of,
    row_stride,
    strided_rows,
    vector,
)
from pi_runtime.kernels.data.weight_table import KernelConfig, LayerRecord, LayerRecords
from pi_runtime.kernels.data.workspace import Workspace

Places = npt.NDArray[np.int32]
BLOCK_NBYTES = 2**19
"""Bytes of one matrix in a block of a chunk's neurons: a third of the second-level cache at most, and more than most
tokens need."""
FIRES, READ, KEPT = range(3)
"""What is counted for each token: neurons that fire (of all, if asked for), rows of `first` read, neurons kept."""
WHOLE, END = np.int32(-1), np.int32(-2)
"""In the lists of many tokens (`kept_of`): a block that has a factor for every place; and the end of a block's list."""
_BITS = CHUNKS.bit_length() - 1
assert CHUNKS == 1 << _BITS


class Ffn(NamedTuple):
    """What stays the same in all calls: sizes, and the addresses of inputs and of the chunks' memory (see `Workspace`).

    It is flat and holds no array: Python hands it over quickly, and `prange` takes it.
    """

    d_model: int
    """Numbers that its neurons read and make."""
    d_ff: int
    gated: bool
    activation: int
    threshold: float
    """The model's own."""
    ffn_format: int
    predictor_format: int
    tokens: int
    """Room for so many tokens."""
    inputs: int
    """The tokens as inputs of products."""
    low_rank: int
    """down x of the predictor."""
    low_rank_inputs: int
    """The same as inputs of products; or the factors, where `down` is a matrix."""
    scores: int
    scored_T: int
    asking_T: int
    list_CK: int
    count_C: int
    h_CTK: int
    up_CTK: int
    tally_CT3: int
    squares_CT: int
    sums_CTP: int
    scratch_CX: int


class Batch(NamedTuple):
    """What is computed: the neurons [low, high) of one expert of a layer, for its tokens."""

    w_X: LayerRecords
    """The layer's experts."""
    expert: int
    low: int
    high: int
    token_N: Ints
    select_N: Ints
    """1 where the token skips what the layer's rung skips."""
    route_weight_N: Floats
    """What the token multiplies the expert's result by."""
    first: int
    """Tokens of the batch that come before these."""


@public
def ffn_of(cfg: KernelConfig, ws: Workspace) -> Ffn:
    """The FFN of a model with the memory in a workspace, valid as long as that is."""
    return Ffn(
        d_model=cfg.neuron_width,
        d_ff=cfg.d_ff,
        gated=cfg.rows_per_neuron == 2,
        activation=cfg.activation,
        threshold=cfg.threshold,
        ffn_format=cfg.ffn_format,
        predictor_format=cfg.predictor_format,
        tokens=ws.x_TD.shape[0],
        inputs=address_of(ws.inputs),
        low_rank=address_of(ws.low_rank_flat),
        low_rank_inputs=address_of(ws.low_rank_inputs),
        scores=address_of(ws.score_TF),
        scored_T=address_of(ws.scored_T),
        asking_T=address_of(ws.asking_T),
        list_CK=address_of(ws.list_CK),
        count_C=address_of(ws.count_C),
        h_CTK=address_of(ws.h_CTK),
        up_CTK=address_of(ws.up_CTK),
        tally_CT3=address_of(ws.tally_CT3),
        squares_CT=address_of(ws.squares_CT),
        sums_CTP=address_of(ws.sums_CTP),
        scratch_CX=address_of(ws.scratch_CX),
    )


def whole_batch(f: Ffn, w_X: LayerRecords, expert: int, token_N: Ints, select_N: Ints, route_weight_N: Floats) -> Batch:
    """All neurons of an expert for some tokens."""
    own = w_X[expert]["d_ff"]
    return Batch(w_X, expert, 0, own if own > 0 else f.d_ff, token_N, select_N, route_weight_N, 0)


whole_expert = device(whole_batch)
"""The same for kernels to call."""


def every_token(
    w_X: LayerRecords, expert: int, low: int, high: int, tokens: int, select: bool = True, route_weight: float = 1.0
) -> Batch:
    """The neurons [low, high) of an expert for all tokens of a call, which are treated alike."""
    token_N, select_N = np.arange(tokens), np.full(tokens, int(select))
    return Batch(w_X, expert, low, high, token_N, select_N, np.full(tokens, route_weight, np.float32), 0)


@device
def some_tokens(e: Batch, first: int, low: int, high: int) -> Batch:
    """A few tokens of the batch from number `first` on. Where `high` is 0 they fetch nothing of the next chunk."""
    some = slice(first, min(e.token_N.shape[0], first + FEW_TOKENS))
    tokens = e.token_N[some], e.select_N[some], e.route_weight_N[some]
    return Batch(e.w_X, e.expert, low, high, *tokens, first)


@device
def weights_of(e: Batch) -> LayerRecord:
    """Where the expert's weights are, and how its layer is run."""
    return e.w_X[e.expert]


@device
def first_rows(f: Ffn, e: Batch) -> MatrixView:
    """The neurons' rows of `first`."""
    w = weights_of(e)
    rows = matrix(w.first_format, w.first, w.first_scales, f.d_model)
    return in_slots(rows, w.first_slots, row_stride(f.ffn_format, f.d_model))


@device
def up_rows(f: Ffn, e: Batch) -> MatrixView:
    """The neurons' rows of `up`; only a gated FFN has them."""
    return _rest_rows(f, e, 2, 0)


@device
def down_rows(f: Ffn, e: Batch) -> MatrixView:
    """The neurons' rows of `down`."""
    return _rest_rows(f, e, 2, 1) if f.gated else _rest_rows(f, e, 1, 0)


@device
def _rest_rows(f: Ffn, e: Batch, of: int, number: int) -> MatrixView:
    w = weights_of(e)
    rows = strided_rows(matrix(w.rest_format, w.rest, w.rest_scales, f.d_model), of, number)
    return in_slots(rows, w.rest_slots, of * row_stride(f.ffn_format, f.d_model))


@device
def bit_reversed(group: int) -> int:
    """The chunk that a group of a round goes to, and the group that a chunk gets.

    Neurons are stored by how often they fire. So neighbouring chunks, which one thread takes, get as many as others.
    """
    found = 0
    for bit in range(_BITS):
        found |= (group >> bit & 1) << (_BITS - 1 - bit)
    return found


@device
def list_neurons(f: Ffn, e: Batch, chunk: int) -> None:
    """List the chunk's neurons of [low, high) in ascending order."""
    list_K, count, first = (
        integers(f.list_CK + 8 * chunk * chunk_places(f.d_ff), chunk_places(f.d_ff)),
        0,
        e.low // GROUP,
    )
    group = first + (bit_reversed(chunk) - first) % CHUNKS
    while group * GROUP < e.high:
        for i in range(max(e.low, group * GROUP), min(e.high, (group + 1) * GROUP)):
            list_K[count] = i
            count += 1
        group += CHUNKS
    counts_of(f)[chunk] = count


@device
def block_neurons(f: Ffn, e: Batch) -> int:
    """Neurons of a block of all chunks together."""
    w = weights_of(e)
    if is_quantised(w.rest_format):
        return CHUNKS * SUM_NEURONS
    places = BLOCK_NBYTES // row_stride(w.rest_format, f.d_model) // GROUP * GROUP
    return CHUNKS * max(GROUP, min(SUM_NEURONS, places))


@device
def block_end(neurons: int, list_K: Ints, begin: int) -> int:
    """The place behind the block of so many neurons that the one at place `begin` of a list belongs to."""
    behind, end = (list_K[begin] // neurons + 1) * neurons, begin + 1
    while end < list_K.shape[0] and list_K[end] < behind:
        end += 1
    return end


@device
def counts_of(f: Ffn) -> Ints:
    """How many neurons each chunk has in this call."""
    return integers(f.count_C, CHUNKS)


@device
def list_of(f: Ffn, chunk: int) -> Ints:
    """The chunk's neurons."""
    return integers(f.list_CK + 8 * chunk * chunk_places(f.d_ff), counts_of(f)[chunk])


@device
def factors_of(f: Ffn, chunk: int, tokens: int) -> Floats:
    """The chunk's factors (T, K), one for each token and place of its list."""
    places = chunk_places(f.d_ff)
    return carray(pointer_of(f.h_CTK + 4 * chunk * f.tokens * places), (tokens, places), np.float32)


@device
def ups_of(f: Ffn, chunk: int, tokens: int) -> Floats:
    """The chunk's products (T, K) with the rows of `up`, one for each token and place of its list."""
    places = chunk_places(f.d_ff)
    return carray(pointer_of(f.up_CTK + 4 * chunk * f.tokens * places), (tokens, places), np.float32)


@device
def kept_of(f: Ffn, chunk: int, tokens: int) -> Places:
    """The rows of `down` that each of many tokens needs, block by block, as places behind its first one; their factors
    are where they are listed.

    They take the place of `ups_of`, which is needed no longer once a block has its factors.
    """
    places = chunk_places(f.d_ff)
    return carray(pointer_of(f.up_CTK + 4 * chunk * f.tokens * places), (tokens, places), np.int32)


@device
def tally_of(f: Ffn, chunk: int, tokens: int) -> Ints:
    """What the chunk counts for each token (T, 3)."""
    return carray(pointer_of(f.tally_CT3 + 8 * chunk * f.tokens * 3), (tokens, 3), np.int64)


@device
def squares_of(f: Ffn, chunk: int, tokens: int) -> Floats:
    """The chunk's sums (T,) of squared factors."""
    return vector(f.squares_CT + 4 * chunk * f.tokens, tokens)


@device
def sums_of(f: Ffn, chunk: int, tokens: int) -> Floats:
    """The chunk's sums (T, P) for a few tokens."""
    width = padded_width(f.d_model)
    return carray(pointer_of(f.sums_CTP + 4 * chunk * min(f.tokens, FEW_TOKENS) * width), (tokens, width), np.float32)


class TokenLists(NamedTuple):
    """The lists of a few tokens, each of its own neurons of a block, one after the other; in memory of the chunk.

    They go by block and token: the n-th token of block u has number u · `FEW_TOKENS` + n. Behind them is room for rows
    that are only fetched, and in the last places (`spare_place`) for one list more and zeros.
    """

    list_K: Ints
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
def lists_of(f: Ffn, chunk: int) -> TokenLists:
    """The tokens' lists of a chunk."""
    at = chunk_layout(f.d_ff)
    own, lists = f.scratch_CX + at.end * chunk, at.blocks * FEW_TOKENS
    return TokenLists(
        list_K=integers(own, at.places),
        h_K=vector(own + at.h, at.places),
        product_K=vector(own + at.product, at.places),
        start_U=integers(own + at.starts, lists),
        count_U=integers(own + at.counts, lists),
        block_B=integers(own + at.block, at.blocks + 1),
        whole_B=integers(own + at.whole, at.blocks),
        size_2=integers(own + at.size, 2),
        sums=own + at.sums,
    )


@device
def spare_place(own: TokenLists) -> int:
    """The first place of the list behind all others."""
    return own.list_K.shape[0] - SUM_NEURONS - SUM_ROWS


Taken = tuple[int, Ints, Floats]
"""An expert, the tokens that take it, and the weight of its sum for each."""


@public
def take_expert(expert_TK: Ints, route_weight_TK: Floats, expert: int, token_T: Ints, weight_T: Floats) -> int:
    """List the tokens that take an expert, in order, and how much its result weighs; returns how many they are."""
    count = 0
    for t in range(expert_TK.shape[0]):
        for k in range(expert_TK.shape[1]):
            if expert_TK[t, k] == expert:
                token_T[count], weight_T[count] = t, route_weight_TK[t, k]
                count += 1
                break  # an expert is taken once, or there would be more than there is room for
    return count


def tokens_of(expert_TK: Ints, route_weight_TK: Floats, expert: int) -> tuple[Ints, Floats]:
    """(N,) the tokens that take an expert, in order, and (N,) how much its result weighs."""
    token_T, weight_T = np.empty(len(expert_TK), np.int64), np.empty(len(expert_TK), np.float32)
    count = take_expert(expert_TK, route_weight_TK, expert, token_T, weight_T)
    return token_T[:count], weight_T[:count]


def tokens_by_expert(expert_TK: Ints, route_weight_TK: Floats, experts: int) -> list[Taken]:
    """Each expert with `tokens_of` it; experts that no token takes are left out."""
    if experts == 1:
        return [(0, np.arange(len(expert_TK)), route_weight_TK[: len(expert_TK), 0])]
    taken = sorted(set(expert_TK.ravel().tolist()) & set(range(experts)))  # a place may be left empty
    return [(expert, *tokens_of(expert_TK, route_weight_TK, expert)) for expert in taken]
