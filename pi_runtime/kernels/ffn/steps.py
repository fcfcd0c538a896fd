"""The steps of `network` for Python, for weights that are not all in memory: between two steps their rows are read.

A step takes a range of chunks. A chunk's sum needs no other chunk, and chunks are added in order at the end. So the
ranges change no bit of what `network.add_batch` computes at once. Up to `FEW_TOKENS` tokens: name → list → sum → merge.
Any number: name → factors and sums together.

Shape letters: as in `network`.
"""

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Floats, Ints
from pi_runtime.kernels.ffn import matrices, network, selection
from pi_runtime.kernels.ffn.memory import Batch, Ffn, lists_of

prepare, add_counts, add_matrices = network.prepare, network.add_counts, matrices.add_matrices


@public
def name_neurons(f: Ffn, e: Batch, named_F: Ints) -> int:
    """List the neurons that the selector names for any of these tokens, in ascending order; returns how many.

    These are all neurons where a token does not select, or the layer has no selector.
    """
    tokens, count = e.token_N.shape[0], 0
    everything = selection.name_neurons(f, e, False, True) < tokens
    scored_N = selection.scored_of(f, tokens)
    for neuron in range(f.d_ff):
        wanted = everything
        for n in range(tokens if not everything else 0):
            wanted |= selection.scores_of(f, scored_N[n])[neuron] > 0
        named_F[count] = neuron
        count += wanted
    return count


@public
def list_chunks(f: Ffn, e: Batch, begin: int, end: int) -> None:
    """List what fires in the chunks [begin, end), for a few tokens whose neurons are named."""
    network.list_chunks(f, e, begin, end)


@public
def firing(f: Ffn, e: Batch, fire_F: Ints) -> int:
    """List the neurons that fire for any of a few tokens, in ascending order; returns how many."""
    fire_F[: f.d_ff] = 0
    for chunk in range(CHUNKS):
        own = lists_of(f, chunk)
        for block in range(own.size_2[0]):
            for u in range(block * FEW_TOKENS, block * FEW_TOKENS + e.token_N.shape[0]):
                for k in range(own.start_U[u], own.start_U[u] + own.count_U[u]):
                    fire_F[own.list_K[k]] = 1
    count = 0
    for neuron in range(f.d_ff):
        found = fire_F[neuron]
        fire_F[count] = neuron
        count += found
    return count


@public
def sum_chunks(f: Ffn, e: Batch, begin: int, end: int) -> None:
    """Compute the sums of the chunks [begin, end), of what is listed for a few tokens."""
    network.sum_chunks(f, e, begin, end)


@public
def merge(f: Ffn, e: Batch, y_TD: Floats) -> None:
    """y ← y + the sums of all chunks, for a few tokens."""
    network.merge(f, e, y_TD)


@public
def add_chunks(f: Ffn, e: Batch, begin: int, end: int, carried_ND: Floats, y_TD: Floats) -> None:
    """The factors and sums of the chunks [begin, end): y ← y + the sums of all chunks, after the last of them.

    `carried_ND` holds the sums until then.
    """
    network.factor_chunks(f, e, begin, end)
    network.sum_tiles(f, e, begin, end, carried_ND, y_TD)
