"""Bytes that running a model needs in each memory: its parts, the key-value cache, and the workspace of a call.

Placing, packing and running share these counts, as they share `sizes` for the arrays.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.artifact.sizes import ArraySpec

CHUNKS, GROUP = 32, 16
"""Parts of attention and of an FFN: so many threads can share the work. And neurons of a group, which belong to one
chunk."""
FEW_TOKENS = 8
"""Most tokens for which each chunk has sums of its own."""
POSITIONS, ATTENTION_TOKENS = 32, 16
"""Positions of a cache that attention takes at once, and tokens of a prompt."""
SUM_ROWS = 8
"""Rows that are summed at once; a list of factors has room for so many zeros behind them."""
FFN_SPLITS, ATTENTION_SPLITS, GEMM_NEURONS = 32, 8, 1024
"""On a GPU: partial sums of one FFN, splits of one token's attention, and neurons of one dense product."""
PROMPT_TOKENS = (512, 256, 128, 64, 16, 1)
"""Sizes of a prompt's blocks on a GPU."""
STREAMED_TOKENS = 64
"""Fewest tokens of a block for which copying cold weights to the GPU may pay."""
PAD = 128
"""Columns to a multiple of which inputs are padded."""


class DecoderSizes(Protocol):
    """The fields of a `Decoder` that sizes depend on."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def d_embedding(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def n_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def rotary_dim(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class PartBytes:
    """Stored bytes that running a model reads, by the parts that can be in one memory or another.

    Quantised matrices count with their scales. Neuron order and counts are not read and belong to no part.
    """

    embedding: int
    """The matrix of tokens, and the matrix that converts it to the model's width."""
    embedding_row: int
    positions: int
    head: int
    """The matrix, or 0 where it is the embedding's (`tied_head`)."""
    final_norm: int
    attention: int
    """One layer's attention, both norms, and router."""
    ffn_bias: int
    """One layer's `down_bias`, which is added once where the residual is."""
    neuron: int
    """One neuron's rows of `first` and `rest`, and its biases."""
    first: int
    """What of these is read to know whether it fires: its row of `first`, and its biases."""

    @classmethod
    def of(cls, specs: Mapping[str, ArraySpec], vocab_size: int, neurons: int) -> Self:
        """The parts of a model, from its arrays (at least one layer) and the number of neurons in a layer."""

        def total(*starts: str) -> int:
            return sum(s.nbytes for name, s in specs.items() if name.startswith(starts))

        ffn = "layers/0/ffn/"
        first = total(f"{ffn}first", f"{ffn}up_bias")
        return cls(
            embedding=total("embedding"),
            embedding_row=specs["embedding"].nbytes_with_scales // vocab_size,
            positions=total("positions"),
            head=total("head"),
            final_norm=total("final_norm"),
            attention=total("layers/0/attention/", f"{ffn}norm/", f"{ffn}router"),
            ffn_bias=total(f"{ffn}down_bias"),
            neuron=(first + total(f"{ffn}rest")) // neurons,
            first=first // neurons,
        )

    def total(self, decoder: DecoderSizes) -> int:
        """The bytes of a whole model without predictors: all parts, each once."""
        ends = self.embedding + self.positions + self.head + self.final_norm
        layer = self.attention + self.ffn_bias + decoder.n_experts * decoder.d_ff * self.neuron
        return ends + decoder.n_layers * layer


def predictor_bytes(specs: Mapping[str, ArraySpec], layer: int) -> int:
    """Bytes of one layer's predictor; 0 where it has none."""
    return sum(s.nbytes for name, s in specs.items() if name.startswith(f"layers/{layer}/predictor/"))


def kv_shape(decoder: DecoderSizes, context: int) -> tuple[int, ...]:
    """Shape of the keys and values of `context` positions: (layers, 2, key-value heads, positions, head width)."""
    return (decoder.n_layers, 2, decoder.n_kv_heads, context, decoder.head_dim)


def kv_itemsize(attention: str) -> int:
    """Bytes of a number in the cache for attention weights of this format: float16, but float32 for float32."""
    return 4 if attention == "f32" else 2


def kv_bytes(decoder: DecoderSizes, attention: str, positions: int) -> int:
    """Bytes of one layer's keys and values for so many positions, for attention weights of this format."""
    return kv_itemsize(attention) * math.prod(kv_shape(decoder, positions)[1:])


def padded_width(columns: int) -> int:
    """The columns of an input with its padding."""
    return -(-columns // PAD) * PAD


def input_nbytes(columns: int) -> int:
    """Bytes of a product's input: 4 a column as float32, 1 a column twice as bytes, 8 a block for scale and sum."""
    return padded_width(columns) * 25 // 4


def attention_floats(decoder: DecoderSizes) -> int:
    """4-byte numbers that one part of attention works with: for each query its sum, weights, and four numbers more."""
    return ATTENTION_TOKENS * decoder.n_heads // decoder.n_kv_heads * (decoder.head_dim + POSITIONS + 4)


def chunk_places(neurons: int) -> int:
    """Places for the neurons of one chunk."""
    return -(-neurons // (GROUP * CHUNKS)) * GROUP


def sign_words(columns: int) -> int:
    """64-bit words that hold a sign for each column."""
    return -(-columns // 64)


def workspace_bytes(decoder: DecoderSizes, largest_rank: int, tokens: int, context: int) -> int:
    """Bytes of the workspace for calls of up to `tokens` tokens, and of the table of rotary angles.

    A test compares it with what the runtime allocates.
    """
    d, t = decoder, tokens
    heads = (d.n_heads + 2 * d.n_kv_heads) * d.head_dim + d.n_heads * d.head_dim
    narrow = d.d_embedding if d.d_embedding != d.d_model else 0
    places = chunk_places(d.d_ff)
    floats = t * (3 * d.d_model + narrow + heads + largest_rank + d.vocab_size)
    floats += t * (d.n_experts + d.experts_per_token) + 3 * CHUNKS * t * (places + SUM_ROWS)
    floats += CHUNKS * min(t, FEW_TOKENS) * padded_width(d.d_model)
    floats += CHUNKS * attention_floats(d) + 2 * t
    integers = d.d_ff + CHUNKS * (places + 1 + 3 * t) + padded_width(d.d_model) + (2 + 3 * t) * d.n_layers + 3 * t + 1
    integers += t * (sign_words(d.d_model) + d.experts_per_token)
    widest = max(d.d_model, d.d_embedding, d.n_heads * d.head_dim, largest_rank)
    records = t * (input_nbytes(widest) + input_nbytes(largest_rank))
    angles = context * d.rotary_dim
    return 4 * (floats + angles) + 8 * integers + records


def dense_rows(tokens: int) -> int:
    """Rows of block formats that a GPU unpacks at once for a dense product with so many tokens."""
    return min(GEMM_NEURONS, 16 * tokens)


def gpu_workspace_bytes(decoder: DecoderSizes, largest_rank: int, context: int, tokens: int) -> int:
    """Bytes of a GPU's workspace for decoding, and for prompts in blocks of so many tokens.

    Weights of block formats are unpacked to 16 bits for dense products. A test compares it with what is allocated.
    """
    d, t, k = decoder, tokens, decoder.experts_per_token
    mixed = d.n_heads * d.head_dim
    qkv = mixed + 2 * d.n_kv_heads * d.head_dim
    lists = 8 * k * d.d_ff + 2 * d.d_model + 64 + 2 * d.n_layers
    parts = d.n_heads * ATTENTION_SPLITS * (d.head_dim + 2)
    one = (FFN_SPLITS + 2) * d.d_model + qkv + mixed + k * largest_rank + d.vocab_size + lists + parts
    rows = dense_rows(t)
    block = t * (5 * d.d_model + 2 * qkv + 2 * mixed + 4 * rows) + rows * max(d.d_model, mixed)
    if d.n_experts > 1:
        # Candidates of a token's experts; the cuts of all experts; a block's tokens gathered for an expert.
        one += 3 * k * d.d_ff + 2 * k + (2 * d.n_layers + 1) * d.n_experts
        block += t * (2 * d.d_model + 4 * d.n_experts + 8 * k)
    return 4 * (one + block + context * d.rotary_dim)


def streamed_bytes(decoder: DecoderSizes, neuron: int) -> int:
    """Bytes on a GPU for cold neurons of so many bytes each that are copied to it: two pieces, which take turns."""
    return 2 * min(GEMM_NEURONS, decoder.d_ff) * neuron


def prompt_block(needs: Callable[[int], int], pieces: int, room: int) -> tuple[int, int]:
    """Choose (tokens of a prompt that a GPU reads at once, bytes for cold weights that are copied to it meanwhile).

    It is the largest block whose `needs` and `pieces` (0 where nothing is cold) are within `room`. There are no pieces
    where they would leave no room for `STREAMED_TOKENS`. A block has one token at least.
    """
    for tokens in PROMPT_TOKENS:
        if tokens >= STREAMED_TOKENS and needs(tokens) + pieces <= room:
            return tokens, pieces
    for tokens in PROMPT_TOKENS:
        if needs(tokens) <= room:
            return tokens, 0
    return PROMPT_TOKENS[-1], 0
