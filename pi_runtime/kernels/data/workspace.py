"""Memory that one call of the forward pass works in, allocated once.

Shape letters: T up to `BLOCK_TOKENS` tokens, D model width, W embedding width (in `signs_TW` words of signs), Q numbers
of a token's queries, keys and values (in `mixed_TQ` of its queries), X experts, K experts taken for a token, F neurons
of one expert, S segments, C chunks, P padded columns, L layers, V vocabulary. An array is `flat` where T varies.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.footprint import CHUNKS, SEGMENTS, gather_floats, input_nbytes, padded_width, sign_words
from pi_runtime.kernels.data.matrix_view import Floats, Ints, Words
from pi_runtime.kernels.data.weight_table import KernelConfig

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
    gathered_TD: Floats
    """Inputs of the tokens that go to one expert."""
    token_T: Ints
    """Which tokens these are."""
    h_flat: Floats
    up_flat: Floats
    """Products with the up rows of a gated FFN, then the scores of the selection."""
    low_rank_flat: Floats
    inputs: npt.NDArray[np.uint8]
    """Inputs of matrix products, one a token (see `quantised_input`)."""
    low_rank_inputs: npt.NDArray[np.uint8]
    """The same for the second matrix of a predictor."""
    signs_TW: Words
    """Signs of the inputs, packed."""
    candidates_F: Ints
    """Neurons that a selector names: their row of `first` is read."""
    kept_F: Ints
    """Neurons that fire."""
    h_F: Floats
    """How strongly each of them fires."""
    counts_S: Ints
    """Entries of each segment of a list, before it is compacted."""
    sums_CP: Floats
    """Partial sums of one token's FFN."""
    gather_CX: Floats
    rows_L2: Ints
    """For each layer in the last single-token call: rows of `first` read, and neurons kept."""
    tally_L3: Ints
    """For each layer, over the tokens of the last block with selection: neurons that fire, that are read, and both."""
    logits_TV: Floats


def allocate_workspace(cfg: KernelConfig, layers: int, largest_rank: int, tokens: int = BLOCK_TOKENS) -> Workspace:
    """The workspace for calls of up to `tokens` tokens."""
    f32: Any = np.float32
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
        gathered_TD=np.empty((tokens if cfg.experts > 1 else 0, cfg.d_model), f32),
        token_T=np.empty(tokens, np.int64),
        h_flat=np.empty(tokens * cfg.d_ff, f32),
        up_flat=np.empty(tokens * cfg.d_ff, f32),
        low_rank_flat=np.empty(tokens * largest_rank, f32),
        inputs=np.empty(tokens * input_nbytes(widest), np.uint8),
        low_rank_inputs=np.empty(tokens * input_nbytes(largest_rank), np.uint8),
        signs_TW=np.empty((tokens, sign_words(cfg.d_model)), np.uint64),
        candidates_F=np.empty(cfg.d_ff, np.int64),
        kept_F=np.empty(cfg.d_ff, np.int64),
        h_F=np.empty(cfg.d_ff, f32),
        counts_S=np.empty(SEGMENTS, np.int64),
        sums_CP=np.empty((CHUNKS, padded_width(cfg.d_model)), f32),
        gather_CX=np.empty((CHUNKS, gather_floats(cfg.d_model)), f32),
        rows_L2=np.zeros((layers, 2), np.int64),
        tally_L3=np.zeros((layers, 3), np.int64),
        logits_TV=np.empty((tokens, cfg.vocabulary), f32),
    )
