"""Bytes of a model's parts, and the constants by which kernels divide and pad their work.

Placing, packing and running share these counts, as they share `sizes` for the arrays and `buffers` for what a run
allocates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.artifact.sizes import ArraySpec

CHUNKS, GROUP = 32, 32
"""Parts of attention and of an FFN: so many threads can share the work. And neurons of a group, which belong to one
chunk."""
BLOCK_TOKENS = 64
"""Most tokens of one call of the CPU's kernels."""
FEW_TOKENS = 16
"""Most tokens for which each chunk has sums of its own."""
SUM_NEURONS, STRIP = 256, 512
"""Neurons of a chunk whose rows of a block format are summed in integers at once, so that 32 bits hold the sums; and
columns that are summed at once."""
POSITIONS, ATTENTION_TOKENS = 32, 16
"""Positions of a cache that attention takes at once, and tokens of a prompt."""
LATENT_HEADS = 8
"""Heads that share a latent when it is read once."""
KEPT, STATE_HEADER = 8, 16
"""Positions of a sequence that may be taken back from its states, and 4-byte numbers before a layer's states."""
SUM_ROWS = 8
"""Rows that are summed at once; a list of factors has room for so many zeros behind them."""
FFN_SPLITS, ATTENTION_SPLITS, GEMM_NEURONS = 32, 8, 1024
"""On a GPU: partial sums of one FFN, splits of one token's attention, and neurons of one dense product."""
PAD = 128
"""Columns to a multiple of which inputs are padded."""


ROWS_OF_TOKENS = ("embedding", "layer_embedding")
"""Arrays of which a token reads a row."""


class InputLayout(NamedTuple):
    """The parts of a product's input behind its float32 numbers: where each begins, in bytes for `PAD` columns."""

    row_order: int
    scales: int
    block_sums: int
    half_sums: int
    column_order: int
    end: int


INPUT = InputLayout(4 * PAD, 5 * PAD, 41 * PAD // 8, 42 * PAD // 8, 43 * PAD // 8, 51 * PAD // 8)
"""4 a column as float32, 1 a column twice as bytes, 12 a block for scale and sums."""


class SumLayout(NamedTuple):
    """The memory of an integer sum of rows of a block format: where each part begins, in bytes."""

    c: int
    n: int
    g: int
    sums: int
    rows: int
    later: int
    end: int


def _sum_layout() -> SumLayout:
    blocks = STRIP // BLOCK
    n = 4 * SUM_NEURONS * blocks
    g = n + 2 * SUM_NEURONS * blocks
    rows = g + 8 * blocks
    later = rows + 8 * (SUM_NEURONS + 1)
    return SumLayout(0, n, g, g + 4 * blocks, rows, later, later + 8 * (SUM_NEURONS + 1))


BLOCK_SUM = _sum_layout()


class ChunkLayout(NamedTuple):
    """The memory of one chunk of an FFN: how many places and blocks it has, and where each part begins, in bytes."""

    places: int
    blocks: int
    place: int
    h: int
    product: int
    starts: int
    counts: int
    block: int
    whole: int
    size: int
    sums: int
    end: int


@dataclass(frozen=True, kw_only=True)
class PartBytes:
    """Stored bytes that running a model reads, by the parts that can be in one memory or another.

    Quantised matrices count with their scales. Neuron order and counts are not read and belong to no part.
    """

    embedding: int
    """The matrices of tokens, and those that convert them."""
    embedding_row: int
    positions: int
    head: int
    """The matrix, or 0 where it is the embedding's (`tied_head`)."""
    final_norm: int
    attention: int
    """One layer's attention, both norms, router, and what is beside its FFN; the mean where layers differ."""
    ffn_bias: int
    """One layer's `down_bias`, which is added once where the residual is."""
    neuron: int
    """One neuron's rows of `first` and `rest`, and its biases."""
    first: int
    """What of these is read to know whether it fires: its row of `first`, and its biases."""

    @classmethod
    def of(cls, specs: Mapping[str, ArraySpec], d: Decoder) -> Self:
        """The parts of a model, from its arrays."""

        def total(*starts: str) -> int:
            return sum(s.nbytes for name, s in specs.items() if name.startswith(starts))

        def of_layers(layers: Sequence[int], *starts: str) -> int:
            return total(*(f"layers/{n}/{start}" for n in layers for start in starts)) // len(layers)

        ffn, every = f"layers/{d.ffn_layers[0]}/ffn/", range(d.n_layers)
        first = total(f"{ffn}first", f"{ffn}up_bias")
        return cls(
            embedding=total("embedding", "layer_embedding"),
            embedding_row=sum(specs[n].nbytes_with_scales for n in ROWS_OF_TOKENS if n in specs) // d.vocab_size,
            positions=total("positions"),
            head=total("head"),
            final_norm=total("final_norm"),
            attention=of_layers(
                every, "attention/", "ffn/norm/", "ffn/router", "ffn/beside", "ffn/embedding", "ffn/experts_"
            ),
            ffn_bias=total(f"{ffn}down_bias"),
            neuron=(first + total(f"{ffn}rest")) // d.neurons,
            first=first // d.neurons,
        )

    def total(self, decoder: Decoder) -> int:
        """The bytes of a whole model without predictors: all parts, each once."""
        ends = self.embedding + self.positions + self.head + self.final_norm
        layers = decoder.n_layers * (self.attention + self.ffn_bias)
        return ends + layers + len(decoder.ffn_layers) * decoder.neurons * self.neuron


def predictor_bytes(specs: Mapping[str, ArraySpec], layer: int) -> int:
    """Bytes of one layer's predictor; 0 where it has none."""
    return sum(s.nbytes for name, s in specs.items() if name.startswith(f"layers/{layer}/predictor/"))


def padded_width(columns: int) -> int:
    """The columns of an input with its padding."""
    return -(-columns // PAD) * PAD


def input_nbytes(columns: int) -> int:
    """Bytes of a product's input."""
    return padded_width(columns) // PAD * INPUT.end


def attention_floats(decoder: Decoder) -> int:
    """4-byte numbers that one part of attention works with: for each query its sum, weights, and four numbers more; or
    of a recurrence a head's state, and twice its query or key, and value."""
    key, value = decoder.state_key_dim, decoder.state_value_dim
    own = key * value + 2 * (key + value)
    if decoder.latent_rank:
        return ATTENTION_TOKENS * min(LATENT_HEADS, decoder.n_heads) * (decoder.latent_rank + POSITIONS + 4)
    shared = decoder.n_heads // max(1, decoder.n_kv_heads)
    return max(own, ATTENTION_TOKENS * shared * (decoder.head_dim + POSITIONS + 4))


def chunk_places(neurons: int) -> int:
    """Places for the neurons of one chunk."""
    return -(-neurons // (GROUP * CHUNKS)) * GROUP


def list_places(neurons: int) -> int:
    """Places for the lists of a few tokens in one chunk, for rows to fetch ahead, for one list more, and for zeros."""
    return FEW_TOKENS * chunk_places(neurons) + 2 * SUM_NEURONS + SUM_ROWS


def chunk_layout(neurons: int) -> ChunkLayout:
    """Where the parts of a chunk of neurons lie: lists, factors and products, blocks, integer sums."""
    places, blocks = list_places(neurons), chunk_places(neurons) // GROUP
    h = 16 * places
    start = h + 8 * places
    block = start + 16 * blocks * FEW_TOKENS
    whole = block + 8 * (blocks + 1)
    size = whole + 8 * blocks
    sums = size + 16
    parts = 8 * places, h, h + 4 * places, start, start + 8 * blocks * FEW_TOKENS, block, whole, size, sums
    return ChunkLayout(places, blocks, *parts, sums + BLOCK_SUM.end)


def ffn_floats(neurons: int) -> int:
    """4-byte numbers that one chunk of an FFN works in."""
    return chunk_layout(neurons).end // 4


def dense_rows(tokens: int) -> int:
    """Rows of block formats that a GPU unpacks at once for a dense product with so many tokens."""
    return min(GEMM_NEURONS, 16 * tokens)
