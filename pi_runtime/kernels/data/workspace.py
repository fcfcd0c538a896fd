"""Memory that one call of the forward pass works in, allocated once.

Shape letters: T up to `BLOCK_TOKENS` tokens, D model width, W embedding width (in `signs_TW` words of signs), Q numbers
of a token's queries, keys and values (in `mixed_TQ` of its queries), X experts (in `expert_TK` K of them a token), F neurons
of one expert, C chunks, K places for a chunk's neurons, P padded columns, L layers, V vocabulary. An array is `flat`
where its shape varies.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.footprint import (
    ATTENTION_TOKENS,
    CHUNKS,
    FEW_TOKENS,
    POSITIONS,
    SUM_ROWS,
    chunk_places,
    input_nbytes,
    padded_width,
    sign_words,
)
from pi_runtime.kernels.data.matrix_view import Floats, Ints, Words
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.data.row_loading import sum_columns

BLOCK_TOKENS = 64
"""Most tokens of one call."""


class Workspace(NamedTuple):
    """Everything that one call writes."""

    x_TD: Floats
    """The residual stream; on return it holds the normed states that the head was applied to."""
    normed_TD: Floats
    attended_TD: Floats
    embedding_TW: Floats
    """States as wide as the embedding, where the model has another width."""
    qkv_TQ: Floats
    mixed_TQ: Floats
    router_TX: Floats
    expert_TK: Ints
    """Experts that the router takes for each token; expert 0 where there is one."""
    route_weight_TK: Floats
    """Factor of each expert's result; 1 where there is one."""
    token_T: Ints
    """0, 1, 2, …"""
    one_T: Floats
    taken_T: Ints
    """The tokens that go to one expert, whether they select, and how much its result weighs."""
    taken_select_T: Ints
    taken_weight_T: Floats
    attention_CX: Floats
    low_rank_flat: Floats
    inputs: npt.NDArray[np.uint8]
    """Inputs of matrix products, one a token (see `quantised_input`)."""
    low_rank_inputs: npt.NDArray[np.uint8]
    """The same for the second matrix of a predictor."""
    signs_TW: Words
    """Signs of the inputs, packed."""
    candidates_F: Ints
    """Neurons that a selector names, where they go to two devices."""
    list_CK: Ints
    """Neurons of each chunk: those whose row of `first` is read, then those that are kept."""
    count_C: Ints
    """Length of each list."""
    h_CTK: Floats
    """Factors of the rows of `down`."""
    up_CTK: Floats
    """Products with the up rows of a gated FFN."""
    named_CTK: Floats
    """Scores of the selector, then 1 where it names a neuron for a token."""
    tally_CT3: Ints
    """What each chunk counts for each token."""
    sums_CTP: Floats
    """Sums of the chunks for a few tokens."""
    sum_columns_P: Ints
    """The column of each sum; those past the last are no column's."""
    rows_L2: Ints
    """For each layer in the last single-token call: rows of `first` read, and neurons kept."""
    counts_LT3: Ints
    """For each layer and token of the last call what `ffn.add_neurons` counts."""
    logits_TV: Floats


def allocate_workspace(cfg: KernelConfig, layers: int, largest_rank: int, tokens: int = BLOCK_TOKENS) -> Workspace:
    """The workspace for calls of up to `tokens` tokens."""
    f32: Any = np.float32
    places = chunk_places(cfg.d_ff)
    attention = ATTENTION_TOKENS * cfg.heads // cfg.kv_heads * (cfg.head_dim + POSITIONS + 4)
    widest = max(cfg.d_model, cfg.d_embedding, cfg.heads * cfg.head_dim, largest_rank)
    return Workspace(
        x_TD=np.empty((tokens, cfg.d_model), f32),
        normed_TD=np.empty((tokens, cfg.d_model), f32),
        attended_TD=np.empty((tokens, cfg.d_model), f32),
        embedding_TW=np.empty((tokens, cfg.d_embedding if cfg.d_embedding != cfg.d_model else 0), f32),
        qkv_TQ=np.empty((tokens, (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim), f32),
        mixed_TQ=np.empty((tokens, cfg.heads * cfg.head_dim), f32),
        router_TX=np.empty((tokens, cfg.experts), f32),
        expert_TK=np.zeros((tokens, cfg.experts_per_token), np.int64),
        route_weight_TK=np.ones((tokens, cfg.experts_per_token), f32),
        token_T=np.arange(tokens),
        one_T=np.ones(tokens, f32),
        taken_T=np.empty(tokens, np.int64),
        taken_select_T=np.empty(tokens, np.int64),
        taken_weight_T=np.empty(tokens, f32),
        attention_CX=np.empty((CHUNKS, attention), f32),
        low_rank_flat=np.empty(tokens * largest_rank, f32),
        inputs=np.empty(tokens * input_nbytes(widest), np.uint8),
        low_rank_inputs=np.empty(tokens * input_nbytes(largest_rank), np.uint8),
        signs_TW=np.empty((tokens, sign_words(cfg.d_model)), np.uint64),
        candidates_F=np.empty(cfg.d_ff, np.int64),
        list_CK=np.empty((CHUNKS, places), np.int64),
        count_C=np.empty(CHUNKS, np.int64),
        h_CTK=np.empty((CHUNKS, tokens, places + SUM_ROWS), f32),
        up_CTK=np.empty((CHUNKS, tokens, places + SUM_ROWS), f32),
        named_CTK=np.empty((CHUNKS, tokens, places + SUM_ROWS), f32),
        tally_CT3=np.empty((CHUNKS, tokens, 3), np.int64),
        sums_CTP=np.empty((CHUNKS, min(tokens, FEW_TOKENS), padded_width(cfg.d_model)), f32),
        sum_columns_P=sum_columns(cfg.ffn_format, cfg.d_model),
        rows_L2=np.zeros((layers, 2), np.int64),
        counts_LT3=np.zeros((layers, tokens, 3), np.int64),
        logits_TV=np.empty((tokens, cfg.vocabulary), f32),
    )
