"""Bytes of a model's parts, and the constants by which kernels divide and pad their work.

Placing, packing and running share these counts, as they share `sizes` for the arrays and `buffers` for what a run
allocates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.artifact.sizes import ArraySpec

CHUNKS, SEGMENTS = 32, 128
"""Partial sums of one FFN, and segments that its neurons are split into: so many threads can share the work."""
FFN_SPLITS, ATTENTION_SPLITS, GEMM_NEURONS = 32, 8, 1024
"""On a GPU: partial sums of one FFN, splits of one token's attention, and neurons of one dense product."""
PAD, GROUP_ROWS = 128, 32
"""Columns to a multiple of which inputs are padded, and rows of block formats that are summed together."""


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

    def total(self, decoder: Decoder) -> int:
        """The bytes of a whole model without predictors: all parts, each once."""
        ends = self.embedding + self.positions + self.head + self.final_norm
        layer = self.attention + self.ffn_bias + decoder.n_experts * decoder.d_ff * self.neuron
        return ends + decoder.n_layers * layer


def predictor_bytes(specs: Mapping[str, ArraySpec], layer: int) -> int:
    """Bytes of one layer's predictor; 0 where it has none."""
    return sum(s.nbytes for name, s in specs.items() if name.startswith(f"layers/{layer}/predictor/"))


def padded_width(columns: int) -> int:
    """The columns of an input with its padding."""
    return -(-columns // PAD) * PAD


def input_nbytes(columns: int) -> int:
    """Bytes of a product's input: 4 a column as float32, 1 a column twice as bytes, 8 a block for scale and sum."""
    return padded_width(columns) * 25 // 4


def gather_floats(columns: int) -> int:
    """4-byte numbers of the workspace of a gathered sum.

    Each block has a factor and half a pair of 16-bit ones for each row, and three numbers more. Each row has its 8-byte
    address and that of a row to prefetch.
    """
    blocks = padded_width(columns) // BLOCK
    return blocks * (GROUP_ROWS + GROUP_ROWS // 2 + 3) + 4 * (GROUP_ROWS + 1)


def sign_words(columns: int) -> int:
    """64-bit words that hold a sign for each column."""
    return -(-columns // 64)


def dense_rows(tokens: int) -> int:
    """Rows of block formats that a GPU unpacks at once for a dense product with so many tokens."""
    return min(GEMM_NEURONS, 16 * tokens)
