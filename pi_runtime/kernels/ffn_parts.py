"""The FFN of one expert in steps, for weights that are not all in memory: between two steps their rows are read.

A step takes a range of chunks. A chunk's sum needs no other chunk, and chunks are added in order at the end. So the
ranges change no bit of what `ffn.add_some` computes at once. Up to `FEW_TOKENS` tokens: name → list → sum → merge. Any
number: name → factors and sums together.

Shape letters: as in `ffn`.
"""

from numba import prange

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS
from pi_runtime.kernels.codegen.jit import public, public_parallel
from pi_runtime.kernels.data.matrix_view import Floats, Ints, address_of
from pi_runtime.kernels.data.neuron_chunks import Chunks, asking_of, lists_of, scored_of, tally_of
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ffn import (
    SLICES,
    count_chunk,
    factor_chunk,
    input_format,
    list_chunk,
    merge_slice,
    number_scored,
    sum_chunk,
    sum_some_tiles,
)
from pi_runtime.kernels.ops.linear import prepare_inputs
from pi_runtime.kernels.ops.neuron_selection import Inputs, score, scores_of


@public
def prepare(cfg: KernelConfig, w: Ints, x_TD: Floats, ws: Workspace) -> None:
    """Prepare the inputs of a layer's FFN, for all its experts."""
    prepare_inputs(input_format(cfg, w), x_TD, address_of(ws.inputs))


@public
def name_neurons(
    cfg: KernelConfig, w: Ints, x_TD: Floats, token_N: Ints, select_N: Ints, m: Chunks, x: Inputs, named_F: Ints
) -> int:
    """List the neurons that the selector names for any of these tokens, in ascending order; returns how many.

    These are all neurons where a token does not select, or the layer has no selector.
    """
    tokens = token_N.shape[0]
    scored = number_scored(w, token_N, select_N, False, m)
    if scored > 0:
        score(cfg, w, x_TD, asking_of(m, scored), 0, cfg.d_ff, True, x)
    scored_N, everything, count = scored_of(m, tokens), scored < tokens, 0
    for neuron in range(cfg.d_ff):
        wanted = everything
        for n in range(tokens if not everything else 0):
            wanted |= scores_of(cfg, x, scored_N[n] + 1)[scored_N[n]][neuron] > 0
        named_F[count] = neuron
        count += wanted
    return count


@public_parallel
def list_chunks(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, begin: int, end: int
) -> None:
    """List what fires in the chunks [begin, end), for a few tokens whose neurons are named."""
    list_chunk()
    for chunk in prange(begin, end):
        list_chunk(cfg, w, m, x, token_N, select_N, 0, cfg.d_ff, chunk)


@public
def firing(cfg: KernelConfig, m: Chunks, tokens: int, fire_F: Ints) -> int:
    """List the neurons that fire for any of a few tokens, in ascending order; returns how many."""
    fire_F[: cfg.d_ff] = 0
    for chunk in range(CHUNKS):
        own = lists_of(m, chunk)
        for block in range(own.size_2[0]):
            for u in range(block * FEW_TOKENS, block * FEW_TOKENS + tokens):
                for k in range(own.start_U[u], own.start_U[u] + own.count_U[u]):
                    fire_F[own.list_K[k]] = 1
    count = 0
    for neuron in range(cfg.d_ff):
        found = fire_F[neuron]
        fire_F[count] = neuron
        count += found
    return count


@public_parallel
def sum_chunks(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, route_weight_N: Floats, begin: int, end: int
) -> None:
    """Compute the sums of the chunks [begin, end), of what is listed for a few tokens."""
    sum_chunk()
    for chunk in prange(begin, end):
        sum_chunk(cfg, w, m, x, token_N, route_weight_N, chunk)


@public_parallel
def merge(cfg: KernelConfig, m: Chunks, token_N: Ints, y_TD: Floats) -> None:
    """y ← y + the sums of all chunks, for a few tokens."""
    merge_slice()
    for part in prange(SLICES):
        merge_slice(cfg, m, token_N, part, y_TD)


@public_parallel
def add_chunks(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats,
    count_all: bool, begin: int, end: int, carried_ND: Floats, y_TD: Floats,
) -> None:  # fmt: skip
    """The factors and sums of the chunks [begin, end): y ← y + the sums of all chunks, after the last of them.

    `carried_ND` holds the sums until then. `count_all` counts what fires, for which every neuron is computed.
    """
    factor_chunk()
    count_chunk()
    sum_some_tiles()
    if count_all:
        for chunk in prange(begin, end):
            count_chunk(cfg, w, m, x, token_N, select_N, route_weight_N, 0, cfg.d_ff, chunk)
    else:
        for chunk in prange(begin, end):
            factor_chunk(cfg, w, m, x, token_N, select_N, route_weight_N, 0, cfg.d_ff, chunk)
    for part in prange(CHUNKS):
        sum_some_tiles(cfg, w, m, token_N, begin, end, part, carried_ND, y_TD)


@public
def add_counts(m: Chunks, token_N: Ints, tally_T3: Ints) -> None:
    """tally ← tally + what all chunks counted."""
    tokens = token_N.shape[0]
    for chunk in range(CHUNKS):
        tally_N3 = tally_of(m, chunk, tokens)
        for n in range(tokens):
            for k in range(3):
                tally_T3[token_N[n], k] += tally_N3[n, k]
