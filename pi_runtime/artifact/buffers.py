"""The buffers that a run allocates, as one table for each purpose: name, shape, number type and first content.

Executors allocate what a table holds. Placing, planning, packing and choosing a plan count the same table. So what is
counted is what is allocated. A further buffer is one more entry. Those of a GPU are in `gpu_buffers`.

Shape letters: T tokens of a block, D model width, W width of the embedding, H heads, G key-value heads, E head width,
Q = (H + 2 G) E, X experts of which a token goes to K, F neurons of one expert, R rank of a predictor, V vocabulary,
L layers, S positions, J pairs of columns that are rotated, P padded columns, C chunks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import (
    CHUNKS,
    FEW_TOKENS,
    KEPT,
    POSITIONS,
    STATE_HEADER,
    attention_floats,
    chunk_places,
    ffn_floats,
    input_nbytes,
    padded_width,
)
from pi_runtime.artifact.formats import BLOCK, FORMATS, GROUP, Format
from pi_runtime.artifact.sizes import BY_NEURON


@dataclass(frozen=True)
class Buffer:
    """One array that a run allocates."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    """A name that NumPy and torch share, or `bfloat16`."""
    fill: int | None = None
    """What it holds at first in RAM; None where it is written before it is read. On a GPU all begin as zeros."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)

    def in_ram(self) -> npt.NDArray[Any]:
        """Allocate it in RAM."""
        if self.fill is None:
            return np.empty(self.shape, self.dtype)
        # Pages of zeros are mapped only when they are written.
        return np.full(self.shape, self.fill, self.dtype) if self.fill else np.zeros(self.shape, self.dtype)


Buffers = Mapping[str, Buffer]


def table_bytes(*tables: Buffers) -> int:
    """Bytes of all buffers of these tables."""
    return sum(buffer.nbytes for table in tables for buffer in table.values())


@dataclass(frozen=True)
class CacheFormat:
    """How keys and values are held."""

    keys: Format
    """A float format; or one whose integers are packed in blocks of 32 columns, each with a scale in float16."""
    values: Format
    """Such a format too, a float format where that of keys is one."""

    def page_nbytes(self, width: int, latents: bool) -> int:
        """Bytes of a head's keys and values at one position, or of a latent; packed ones up to the last block's end."""
        keys, values = (BLOCK * one.bits // 8 + FORMATS["scale"].itemsize for one in (self.keys, self.values))
        # Below 8 bits a page has a reference, in as many bytes as scales.
        reference = FORMATS["scale"].itemsize if self.keys.bits < 8 else 0
        return -(-width // BLOCK) * (keys if latents else keys + reference + values)


CACHE_FORMATS = {name: CacheFormat(FORMATS[name], FORMATS[name]) for name in ("f32", "f16", "q8")} | {
    "q4": CacheFormat(FORMATS["q6"], FORMATS["q5"])
}
"""Formats that keys and values can be asked for in; besides `auto`."""


def cache_format(attention: str, wanted: str = "auto") -> str:
    """The format of keys and values beside attention weights of this format.

    Unless asked otherwise they are float16, half as much to hold and to read, but float32 where the weights are.
    """
    return wanted if wanted != "auto" else "f32" if attention == "f32" else "f16"


def kv_cache(d: Decoder, attention: str, positions: int, layers: int) -> Buffer:
    """Keys and values of so many layers on a GPU, in whole pages (2, G, S, E) for so many positions."""
    shape = (layers, kv_pages(positions), *_page_shape(d, d.cached_width))
    return Buffer(shape, FORMATS[cache_format(attention)].number)


def _page_shape(d: Decoder, row: int) -> tuple[int, ...]:
    return (POSITIONS, row) if d.latent_rank else (2, d.n_kv_heads, POSITIONS, row)


def kv_pages(positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-positions // POSITIONS)


def kv_page(d: Decoder, fmt: str, layers: int) -> Buffer:
    """One page of the cache in RAM: keys and values of so many layers for `POSITIONS` positions in this format.

    Values (S, E) lie row by row, keys (E, S) column by column, so that one vector holds a column of several positions.
    Of packed numbers the blocks' scales are behind the integers of their row, or of all keys: `ops.page_rows` says what
    a row is, and keys of all heads come before values. A page of latents has a row for each position.
    """
    held, heads = CACHE_FORMATS[fmt], 1 if d.latent_rank else d.n_kv_heads
    if held.values.quantised:
        # Bytes behind the last column are never written.
        row = held.page_nbytes(d.cached_width, d.latent_rank > 0)
        return Buffer((layers, heads * POSITIONS * row), "uint8", fill=0)
    return Buffer((layers, *_page_shape(d, d.cached_width)), held.values.stored.name)


def state_page(d: Decoder) -> Buffer:
    """The states of a sequence's layers with a recurrence, after any number of positions.

    A layer has an integer, the positions that its states are of; then for the convolution the columns of the positions
    before, and of `KEPT` positions behind, which may be taken back: those of its channels, and of its gates;
    then the states (heads, key_dim, value_dim).
    """
    inputs = (d.state_columns - 1 + KEPT) * (sum(d.qkv_parts) + d.state_gates)
    states = d.state_heads * d.state_key_dim * d.state_value_dim
    return Buffer((len(d.recurrent_layers), STATE_HEADER + inputs + states), fill=0)


def kv_bytes(d: Decoder, attention: str, positions: int) -> int:
    """Bytes of one layer's keys and values for so many positions, for attention weights of this format."""
    return kv_cache(d, attention, positions, layers=1).nbytes


def read_bytes(d: Decoder, attention: str, layer: int, positions: int) -> int:
    """Bytes of a layer's cache that a token behind so many positions goes through: keys and values that it sees, or
    states, which are read and written."""
    if layer in d.recurrent_layers:
        return 2 * state_page(d).nbytes // len(d.recurrent_layers)
    return kv_bytes(d.of_layer(layer), attention, d.seen(layer, positions))


def rotary_tables(d: Decoder, positions: int) -> dict[str, Buffer]:
    """Cosines and sines of the angles, behind them those of layers with a window; empty where positions are learned."""
    rows, angles = positions * (2 if d.windowed_frequencies else 1), max(one.rotary_dim // 2 for one in d.kinds)
    return dict.fromkeys(("cos_SJ", "sin_SJ"), Buffer((rows, angles)))


def rotary_table(decoder: Decoder, length: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin (length, J) of the angles position · frequency_j, times `rotary_scale`.

    The angles are float32, as in transformers; cos and sin are rounded from 64 bits, because NumPy's in 32 depend on
    the processor. J = 0 where positions are learned.
    """
    frequency_J = np.array(decoder.rotary_frequencies, np.float32)
    angles = np.outer(np.arange(length, dtype=np.float32), frequency_J).astype(np.float64)
    scale = np.float32(decoder.rotary_scale)
    return np.cos(angles).astype(np.float32) * scale, np.sin(angles).astype(np.float32) * scale


def query_factors(decoder: Decoder, length: int) -> npt.NDArray[np.float32]:
    """(length,): scale · (1 + growth · ln(1 + ⌊position / period⌋)), the factors of queries; rounded from 64 bits."""
    turns = np.arange(length) // max(1, decoder.query_period)
    return (decoder.score_scale * (1 + decoder.query_growth * np.log1p(turns))).astype(np.float32)


def narrow_width(d: Decoder) -> int:
    """Width of an embedding that is not as wide as the model, else 0."""
    return d.d_embedding if d.d_embedding != d.d_model else 0


def cpu_workspace(d: Decoder, rank: int, tokens: int, cache: str = "f16", layout: str = BY_NEURON) -> dict[str, Buffer]:
    """Buffers on the CPU for calls of up to `tokens` tokens, for predictors up to this rank, a cache in this format,
    and FFNs in this layout.

    `kernels.data.workspace.Workspace` says what each is for.
    """
    widths = ("mixed", "qkv", "gate", "cached")
    mixed, made, gates, cached = (max(getattr(one, f"{of}_width") for one in d.kinds) for of in widths)
    t, latents = tokens, d.n_heads if d.latent_rank else 0
    packed = cache in CACHE_FORMATS and CACHE_FORMATS[cache].values.quantised
    widest = max(d.d_model, d.d_embedding, mixed, rank, d.query_rank, d.beside_ff, d.layer_embedding)
    places = chunk_places(d.d_ff)
    routed = (d.n_experts + d.shared_gate) * (2 if d.router_choice_bias or d.router_groups > 1 else 1)
    # A product with `down` has the factors of all neurons as its input.
    low = rank if layout == BY_NEURON else max(rank, d.widest_ff)
    factors = Buffer((CHUNKS, t, chunk_places(d.widest_ff)))
    return {
        "x_TD": Buffer((t, d.d_model)),
        "normed_TD": Buffer((t, d.d_model)),
        "attended_TD": Buffer((t, d.d_model)),
        "residual_TD": Buffer((t if d.block == "sandwich" else 0, d.d_model)),
        "beside_TF": Buffer((2 * t, d.beside_ff)),
        **_layer_embedding(d.layer_embedding, t),
        "narrow_TL": Buffer((t, d.expert_width)),
        "narrow_sum_TL": Buffer((t, d.expert_width)),
        "embedding_TW": Buffer((t, narrow_width(d))),
        "qkv_TQ": Buffer((t, made)),
        "gate_TQ": Buffer((t, gates)),
        "gates_TG": Buffer((t, d.state_gates)),
        "query_TQ": Buffer((t, latents * d.head_dim if d.query_rank else 0)),
        "latent_TQ": Buffer((t, latents * d.cached_width)),
        "latent_inputs": Buffer((min(CHUNKS, latents) * t * input_nbytes(max(d.head_dim, d.latent_rank)),), "uint8"),
        "mixed_TQ": Buffer((t, mixed)),
        "router_TX": Buffer((t, routed)),
        "expert_TK": Buffer((t, d.most_experts), "int64", fill=0),
        "route_weight_TK": Buffer((t, d.most_experts), fill=1),
        "token_T": Buffer((t,), "int64"),
        "one_T": Buffer((t,), fill=1),
        "taken_T": Buffer((t,), "int64"),
        "taken_select_T": Buffer((t,), "int64"),
        "taken_weight_T": Buffer((t,)),
        "attention_CX": Buffer((CHUNKS, max(map(attention_floats, d.kinds)))),
        "unpacked_CBE": Buffer((CHUNKS, POSITIONS if packed else 0, cached)),
        "low_rank_flat": Buffer((t * rank,)),
        "inputs": Buffer((t * input_nbytes(widest),), "uint8"),
        "low_rank_inputs": Buffer((t * input_nbytes(low),), "uint8"),
        "score_TF": Buffer((t, d.d_ff)),
        "list_CK": Buffer((CHUNKS, places), "int64"),
        "count_C": Buffer((CHUNKS,), "int64"),
        "h_CTK": factors,
        "up_CTK": factors,
        "scored_T": Buffer((t,), "int64"),
        "asking_T": Buffer((t,), "int64"),
        "tally_CT3": Buffer((CHUNKS, t, 3), "int64"),
        "squares_CT": Buffer((CHUNKS, t if d.inner_norms else 0)),
        "sums_CTP": Buffer((CHUNKS, min(t, FEW_TOKENS), padded_width(d.neuron_width))),
        "scratch_CX": Buffer((CHUNKS, ffn_floats(d.d_ff))),
        "counts_LT3": Buffer((d.n_layers, t, 3), "int64", fill=0),
        "logits_TV": Buffer((t, d.vocab_size)),
    }


def _layer_embedding(width: int, tokens: int) -> dict[str, Buffer]:
    row = GROUP * BLOCK + width if width else 0
    return {"layer_embedding_TP": Buffer((2 * tokens, width)), "token_row": Buffer((row,))}


def workspace_bytes(d: Decoder, rank: int, tokens: int, context: int) -> int:
    """Bytes of RAM for calls of up to `tokens` tokens: the workspace and the tables of rotary angles."""
    return table_bytes(cpu_workspace(d, rank, tokens), rotary_tables(d, context))
