"""The buffers of a run on a GPU, and of the RAM that it copies from and to, as tables like those of `buffers`.

Shape letters: T tokens of a block, D model width, W width of the embedding, H heads, G key-value heads, E head width,
Q = (H + 2 G) E, O = H E, M tokens that are decoded together, X experts of which a token goes to K, F neurons of all K,
R rank of a predictor, V vocabulary, L layers, N neurons of one dense product.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from math import prod

from pi_runtime.artifact.buffers import Buffer, kv_pages, narrow_width, rotary_tables, table_bytes
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import (
    ATTENTION_SPLITS,
    BLOCK_TOKENS,
    FFN_SPLITS,
    GEMM_NEURONS,
    dense_rows,
    padded_width,
)
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.schema import ArrayEntry
from pi_runtime.artifact.sizes import ArraySpec, without_scales

BATCH_TOKENS = (8, 4, 2, 1)
"""Numbers of tokens, each of its own sequence, that a GPU has room to decode together."""
PROMPT_TOKENS = (512, 256, 128, 64, 16, 1)
"""Sizes of a prompt's blocks on a GPU."""
STREAMED_TOKENS = 64
"""Fewest tokens of a block for which copying cold weights to the GPU may pay."""
WEIGHT_ALIGN = 128
"""On a GPU each array of weights begins at a multiple of so many bytes: a cache line, whole vector loads."""
NEURON_ARRAYS = ("/ffn/first", "/ffn/rest", "/ffn/first_bias", "/ffn/up_bias")
"""Arrays with rows for each neuron, which a cut divides between GPU and CPU."""

StoredArrays = Mapping[str, ArraySpec] | Mapping[str, ArrayEntry]


def handover_slots(d: Decoder) -> int:
    """Experts that a handover names: those of a token, or none where there is one expert."""
    return d.experts_per_token if d.n_experts > 1 else 0


def handover_ends(d_model: int, slots: int, tokens: int) -> list[int]:
    """Where the parts of a handover end that come before its rows, in words of 4 bytes: each begins a vector load.

    They are the tokens' inputs, their experts' weights, their experts and the number of their rows.
    """
    return list(accumulate(-(-tokens * words // 4) * 4 for words in (d_model, slots, slots, 1)))


def handover_words(d: Decoder, tokens: int) -> int:
    """Words of 4 bytes of a handover between GPU and CPU (see `cuda.memory.handover`)."""
    return handover_ends(d.d_model, handover_slots(d), tokens)[-1] + tokens * d.experts_per_token * d.d_ff


def token_words(context: int, tokens: int) -> int:
    """Numbers that say which tokens are decoded and where: ids, positions, and tables of pages."""
    return tokens * (2 + kv_pages(context))


def gpu_workspace(d: Decoder, rank: int, context: int, tokens: int) -> dict[str, Buffer]:
    """Buffers on a GPU for decoding so many tokens together, and for predictors up to this rank.

    `cuda.memory.workspace.Workspace` says what each is for.
    """
    m = tokens
    experts = d.n_experts if d.n_experts > 1 else 0
    listed = d.experts_per_token * d.d_ff
    routed = listed if experts else 0
    mixed = d.n_heads * d.head_dim
    return {
        "token_words": Buffer((token_words(context, m),), "int64"),
        "x_MD": Buffer((m, d.d_model)),
        "narrow_MW": Buffer((m, narrow_width(d))),
        "handover": Buffer((handover_words(d, m),), "int32"),
        "qkv_MQ": Buffer((m, mixed + 2 * d.n_kv_heads * d.head_dim)),
        "attn_out_MO": Buffer((m, mixed)),
        "partial_out": Buffer((m * ATTENTION_SPLITS * mixed,)),
        "partial_max": Buffer((m * ATTENTION_SPLITS * d.n_heads,)),
        "partial_sum": Buffer((m * ATTENTION_SPLITS * d.n_heads,)),
        "r_MR": Buffer((m, d.experts_per_token * max(rank, 1))),
        "router_MX": Buffer((m, experts)),
        "cuts_L2X": Buffer((d.n_layers, 2, experts), "int32"),
        "marks_MF": Buffer((m, listed)),
        "counts_MF": Buffer((m, listed), "int32"),
        **_lists("hot", m, listed),
        **_lists("expert_hot", m, routed),
        "expert_hot_rows_MF": Buffer((m, routed), "int32"),
        **_lists("expert_cold", m, routed),
        "h_MF": Buffer((m, listed)),
        **_lists("kept", m, listed),
        "kept_h_MF": Buffer((m, listed)),
        "sums_flat": Buffer((m * FFN_SPLITS * d.d_model,)),
        "host_sum_MD": Buffer((m, d.d_model)),
        "rows_ML2": Buffer((m, d.n_layers, 2), "int32"),
        "logits_MV": Buffer((m, d.vocab_size)),
        **rotary_tables(d, context),
    }


def _lists(name: str, tokens: int, room: int) -> dict[str, Buffer]:
    """A list of neurons for each token on a GPU, and how many it holds."""
    return {f"{name}_index_MF": Buffer((tokens, room), "int32"), f"{name}_length_M": Buffer((tokens,), "int32")}


def pinned_buffers(d: Decoder, context: int, tokens: int) -> dict[str, Buffer]:
    """Pinned RAM that GPU and CPU copy from and to while so many tokens are decoded."""
    handover, x_MD = Buffer((handover_words(d, tokens),), "int32"), Buffer((tokens, d.d_model))
    return {
        "token_words": Buffer((token_words(context, tokens),), "int64"),
        **dict.fromkeys(("handover_to_host", "handover_to_device"), handover),
        **dict.fromkeys(("sum_to_host", "sum_to_device", "x_to_host", "x_to_device"), x_MD),
        "logits_MV": Buffer((tokens, d.vocab_size)),
        "rows_ML2": Buffer((tokens, d.n_layers, 2), "int32"),
    }


def pinned_prompt_block(d: Decoder, tokens: int) -> dict[str, Buffer]:
    """Pinned RAM for a block of a prompt's tokens: the residual, the FFN's input and the FFN's sum."""
    return dict.fromkeys(("host_x_TD", "host_normed_TD", "host_y_TD"), Buffer((tokens, d.d_model)))


def host_bytes(d: Decoder, context: int, batch: int, tokens: int) -> int:
    """Bytes of RAM of a run on a GPU beside those of any run within a budget of RAM: what is pinned but for weights on
    their way, what prompts in blocks of so many tokens work in, lists of cold neurons, and inputs kept for counts."""
    experts = (tokens, d.most_experts)
    own = {
        "carried_TD": Buffer((tokens, padded_width(d.d_model))),
        "residual_TD": Buffer((tokens, d.d_model)),
        "expert_TK": Buffer(experts, "int64"),
        "route_weight_TK": Buffer(experts),
        "cold_MF": Buffer((batch * (batch + 1) // 2, d.experts_per_token * d.d_ff), "int32"),
        "inputs_LTD": Buffer((d.n_layers, 1 + BLOCK_TOKENS, d.d_model)),
    }
    return table_bytes(pinned_buffers(d, context, batch), pinned_prompt_block(d, tokens), own)


def gpu_prompt_block(d: Decoder, tokens: int) -> dict[str, Buffer]:
    """Buffers on a GPU for a block of a prompt's tokens."""
    mixed = d.n_heads * d.head_dim
    return {
        "ids_T": Buffer((tokens,), "int64"),
        "x_TD": Buffer((tokens, d.d_model)),
        "normed_TD": Buffer((tokens, d.d_model)),
        "y_TD": Buffer((tokens, d.d_model)),
        "qkv_TQ": Buffer((tokens, mixed + 2 * d.n_kv_heads * d.head_dim)),
        "attn_out_TO": Buffer((tokens, mixed)),
    }


def gpu_products(d: Decoder, tokens: int) -> dict[str, Buffer]:
    """The most that dense products of such a block take beside it; torch hands it out while they run.

    Weights of block formats are dequantised N neurons, or rows, at a time.
    """
    t, n, mixed = tokens, dense_rows(tokens), d.n_heads * d.head_dim
    experts = d.n_experts if d.n_experts > 1 else 0
    return {
        "narrow_TW": Buffer((t, narrow_width(d))),
        "inputs_TD": Buffer((2, t, d.d_model)),
        "qkv_TQ": Buffer((t, mixed + 2 * d.n_kv_heads * d.head_dim)),
        "attn_out_TO": Buffer((t, mixed)),
        "activations_TN": Buffer((4, t, n)),
        "rows_ND": Buffer((n, max(d.d_model, mixed))),
        "gathered_TD": Buffer((2 if experts else 0, t, d.d_model)),
        "router_TX": Buffer((4, t, experts)),
        "routes_TK": Buffer((8 if experts else 0, t, d.experts_per_token)),
    }


def gpu_workspace_bytes(d: Decoder, rank: int, context: int, batch: int, tokens: int) -> int:
    """Bytes of a GPU's buffers for decoding `batch` tokens together, and for prompts in blocks of so many tokens."""
    return table_bytes(gpu_workspace(d, rank, context, batch), gpu_prompt_block(d, tokens), gpu_products(d, tokens))


def weight_chunk(arrays: StoredArrays, d: Decoder) -> dict[str, Buffer]:
    """Rows of up to N cold neurons of one expert that are streamed to the GPU, by the short names of their arrays."""
    found, count = {}, min(GEMM_NEURONS, d.d_ff)
    for name, array in arrays.items():
        if is_neuron_array(name) and name.startswith("layers/0/"):
            fmt = FORMATS[array.format]
            _, *row = fmt.stored_shape(array.shape)
            shape = (count * prod(row[:-1]), *row[-1:])
            found[name.split("/")[-1]] = Buffer(shape, fmt.number or fmt.stored.name)
    return found


def is_neuron_array(name: str) -> bool:
    """Whether an array, or the array whose scales it holds, has rows for each neuron."""
    return without_scales(name).endswith(NEURON_ARRAYS) and name.startswith("layers/")


def streamed_bytes(arrays: StoredArrays, d: Decoder) -> int:
    """Bytes on a GPU for the cold neurons that are streamed to it: two chunks, which take turns.

    None are where layers differ in their formats.
    """
    alike = len({(name.split("/")[-1], a.format) for name, a in arrays.items() if is_neuron_array(name)})
    chunk = weight_chunk(arrays, d)
    return 2 * table_bytes(chunk) if alike == len(chunk) else 0


def weight_padding(names: Iterable[str]) -> int:
    """Bytes that aligning a model's arrays takes at most on a GPU, whichever of them are there."""
    return WEIGHT_ALIGN * sum(not name.endswith(("/ffn/order", "/ffn/counts")) for name in names)


def prompt_block(needs: Callable[[int], int], pieces: int, room: int) -> tuple[int, int]:
    """Choose (tokens of a prompt that a GPU reads at once, bytes for cold weights that are streamed to it meanwhile).

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


def decoded_together(needs: Callable[[int], int], room: int) -> int:
    """Tokens, each of its own sequence, that a GPU decodes together: as many as need no more than `room`, or one."""
    return next((tokens for tokens in BATCH_TOKENS if needs(tokens) <= room), BATCH_TOKENS[-1])
