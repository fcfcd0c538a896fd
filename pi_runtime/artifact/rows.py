"""Rows in a run that reads them from disk: their bytes, and the memory beside them. Placing and running share
these counts.

A run within a budget has what every run on the CPU has: the process, resident weights, the cache of keys and values,
buffers. Where what is left holds all rows of the FFNs, they are all there. Else a sixteenth of it at most is for tokens
of a long prompt and a sixteenth for rows that are staged, and the rest holds rows.
"""

from dataclasses import dataclass
from itertools import product

from pi_runtime.artifact.buffers import cpu_workspace, rotary_tables, table_bytes
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import BLOCK_TOKENS, FEW_TOKENS, chunk_places, padded_width
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import BY_NEURON, WHOLE, ArraySpec, scales_name

ROW_ARRAYS = ("first", "rest")
"""The arrays of an FFN whose rows are read when they are needed; scales of block formats stay in memory."""

UNITS = 2
"""Slots for whole matrices of an FFN, the fewest: one is used while another is read."""
EMBEDDING_ARRAYS = ("embedding", scales_name("embedding"))
"""The arrays of an embedding whose rows are read when their tokens come, unless a tied head needs all of them."""
MAPPED = ("layer_embedding", scales_name("layer_embedding"))
"""Arrays that stay in the file, of which a token reads a row a layer: no memory is set aside for them."""
PROCESS_NBYTES = 192 << 20
"""What a budget of RAM counts for the process itself: interpreter, libraries, compiled kernels, tokenizer, server, and
what aligning arrays takes."""
WORKERS = 64
"""Most reads that are under way at once."""
PIECE_NBYTES = 1 << 17
"""Most bytes of one read, unless a row is wider."""
BATCHES = 4
"""Batches of reads that can be under way at once, each waited for by itself."""
PROMPT_TOKENS = (1024, 512, 256, 128)
"""Tokens of a prompt that can go through a layer together, where there is room for them."""
SLOT_NBYTES = 3 * 8
"""What is kept about the row in a slot."""
TWO_PHASES_FROM = 0.15
"""A layer's `rest` is read after its `first` where that saves this share of the bytes."""
_STAGED_SHARE = 1 / 16
"""Share of the rows' memory for rows that stay for one step only, where that is enough for a chunk and no more than a
layer."""
PROMPT_SHARE = 1 / 16
"""Share of the rows' memory for the tokens of a long prompt, which save passes over the file."""


@dataclass(frozen=True)
class RowBuffers:
    """What a run takes of its rows' memory before the first row stays."""

    tokens: int
    """Most tokens of a prompt that go through a layer before the next one is read; 0 for one block of the kernels."""
    staged: int
    """Rows of each array that stay for one step only, in each of two regions; two further ones, for rows that are read
    ahead, have half as many."""
    left: int
    """Bytes that are left for rows that stay."""


def row_nbytes(d: Decoder, fmt: str) -> dict[str, int]:
    """Bytes of one neuron's stored values in each of `ROW_ARRAYS`."""
    row = ArraySpec(fmt, (1, d.neuron_width)).nbytes
    return {"first": row, "rest": row * (2 if d.ffn == "gated" else 1)}


def slot_nbytes(d: Decoder, fmt: str) -> dict[str, int]:
    """Bytes that one more slot takes in each of `ROW_ARRAYS`: the row and what is kept about it."""
    return {name: nbytes + SLOT_NBYTES for name, nbytes in row_nbytes(d, fmt).items()}


def embedding_rows(d: Decoder) -> int:
    """Rows of the embedding that are in memory at once: those of a block of tokens, or with a tied head all."""
    return d.vocab_size if d.tied_head else min(d.vocab_size, BLOCK_TOKENS)


def embedding_on_disk_nbytes(d: Decoder, fmt: str) -> int:
    """Bytes of the embedding that are not in memory."""
    return ArraySpec(fmt, (d.vocab_size - embedding_rows(d), d.d_embedding)).nbytes_with_scales


def least_row_buffers(d: Decoder, both: int) -> int:
    """The fewest bytes that hold the rows of one step; `both` are those of a slot of either array."""
    return both + chunk_places(d.d_ff) * _staged_nbytes(both)


def all_rows(d: Decoder, both: int) -> int:
    """Bytes of slots for all rows of the model; `both` are those of a slot of either array."""
    return len(d.ffn_layers) * d.neurons * both


def useful_budgets(manifest: Manifest, fixed: int) -> tuple[int, int]:
    """The smallest budget with which a model runs, and the one from which on nothing is read any more."""
    d, both = manifest.decoder, sum(slot_nbytes(manifest.decoder, manifest.formats["ffn"]).values())
    embedding = embedding_on_disk_nbytes(d, manifest.formats["embedding"])
    if manifest.ffn_layout == WHOLE:
        unit = unit_nbytes(manifest)
        return fixed + UNITS * unit, fixed + len(units(manifest)) * unit + embedding
    least = fixed + least_row_buffers(d, both)
    return least, least + all_rows(d, both) + embedding


def unit_matrices(manifest: Manifest, layer: int) -> dict[str, tuple[str, int]]:
    """The whole matrices of a layer's FFN that are read when they are needed: (name of the array, bytes that one expert
    has of it) of each. Those of a dense layer beside layers of experts, which every token needs, stay in memory."""
    arrays, d = manifest.arrays, manifest.decoder
    if layer in d.uncut_layers:
        return {}
    found = {name: f"layers/{layer}/ffn/{name}" for name in ("first", "up", "down")}
    return {name: (full, arrays[full].nbytes // d.experts_alike) for name, full in found.items() if full in arrays}


def units(manifest: Manifest) -> list[tuple[int, int]]:
    """(Layer, expert) of each unit of whole matrices."""
    layers = [n for n in range(manifest.decoder.n_layers) if unit_matrices(manifest, n)]
    return list(product(layers, range(manifest.decoder.experts_alike)))


def unit_nbytes(manifest: Manifest) -> int:
    """Bytes of a slot for the matrices of one expert: those of the layer that has most."""
    layers = range(manifest.decoder.n_layers)
    return max(sum(nbytes for _, nbytes in unit_matrices(manifest, n).values()) for n in layers)


def row_buffers(d: Decoder, both: int, room: int) -> RowBuffers:
    """Divide `room` bytes, at least `least_row_buffers`; `both` are those of a slot of either array.

    More room never leaves less: a little above a threshold of `PROMPT_TOKENS` it is divided as a little below it.
    """
    edges = (_room_for(d, both, tokens) - 1 for tokens in PROMPT_TOKENS)
    sizes = (room, *(edge for edge in edges if edge < room))
    return max((_divided(d, both, size) for size in sizes), key=lambda found: found.left)


def _divided(d: Decoder, both: int, room: int) -> RowBuffers:
    least = least_row_buffers(d, both)
    if room - least >= all_rows(d, both):
        return RowBuffers(0, chunk_places(d.d_ff), room - least)
    tokens = next((t for t in PROMPT_TOKENS if room >= _room_for(d, both, t)), 0)
    room -= both + tokens * token_nbytes(d)
    staged_nbytes = _staged_nbytes(both)
    staged = max(chunk_places(d.d_ff), min(d.d_ff, int(room * _STAGED_SHARE) // staged_nbytes))
    return RowBuffers(tokens, staged, room - staged * staged_nbytes)


def _room_for(d: Decoder, both: int, tokens: int) -> int:
    """Bytes from which on so many tokens of a long prompt have room."""
    nbytes = tokens * token_nbytes(d)
    return max(both + int(nbytes / PROMPT_SHARE), least_row_buffers(d, both) + nbytes)


def _staged_nbytes(both: int) -> int:
    """Bytes of one staged row: twice, half as much for reading ahead, and its places in lists of reads."""
    return 3 * both + BATCHES * 2 * 9 * 8


def token_nbytes(d: Decoder) -> int:
    """Bytes of one token of a long prompt: residual, FFN input, sums, and experts."""
    return 8 * (d.d_model + d.expert_width) + 4 * padded_width(d.neuron_width) + 12 * d.most_experts


def read_nbytes(d: Decoder) -> int:
    """Most bytes of one read, and what each reader has to read into: any row of `rest` or of the embedding, in whatever
    format."""
    return max(PIECE_NBYTES, 2 * 4 * padded_width(d.d_model), 4 * padded_width(d.d_embedding))


def disk_workspace_bytes(d: Decoder, rank: int, tokens: int, context: int, cache: str, layout: str = BY_NEURON) -> int:
    """Bytes of a run's buffers beside those for rows, or for matrices by the layout.

    It makes calls of up to `tokens` tokens, with predictors up to this rank and a cache in this format.
    """
    if layout == WHOLE:
        buffers = cpu_workspace(d, rank, tokens, cache, layout), rotary_tables(d, context)
        return table_bytes(*buffers) + WORKERS * read_nbytes(d)
    buffers = cpu_workspace(d, rank, tokens, cache), cpu_workspace(d, rank, FEW_TOKENS, cache)
    tables = 8 * (2 * d.n_layers * d.neurons + 6 * d.neurons) + 4 * tokens * padded_width(d.neuron_width)
    return table_bytes(*buffers, rotary_tables(d, context)) + tables + WORKERS * read_nbytes(d)
