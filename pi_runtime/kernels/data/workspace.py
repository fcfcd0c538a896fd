"""Memory that one call of the forward pass works in, allocated once."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.footprint import CHUNKS, SHARES, padded_width, record_nbytes, sign_words, sum_floats
from pi_runtime.kernels.data.matrix_view import Floats, Ints, Words
from pi_runtime.kernels.data.weight_table import Shape

BLOCK_TOKENS = 64
"""Most tokens of one call."""


class Buffers(NamedTuple):
    """Everything one call writes, allocated once. T stands for up to `BLOCK_TOKENS`; flat where T varies.

    P is a width padded to whole vectors (see `operand`).
    """

    x_TD: Floats
    """The residual stream; on return it holds the normed states the head was applied to."""
    normed_TD: Floats
    attended_TD: Floats
    narrow_TW: Floats
    """States as wide as the embedding, where the model is of another width."""
    qkv_TQ: Floats
    mixed_TQ: Floats
    router_TX: Floats
    taken_TK: Ints
    """Experts that the router takes for each token, and `share_TK` of each; expert 0, all of it, where there is one."""
    share_TK: Floats
    gathered_TD: Floats
    """Inputs of the tokens that go to one expert, and `places_T` which these are."""
    places_T: Ints
    h_flat: Floats
    other_flat: Floats
    r_flat: Floats
    records: npt.NDArray[np.uint8]
    """Inputs of row products as `operand` has them, one a token."""
    r_records: npt.NDArray[np.uint8]
    """The same for the middle of the predictor."""
    signs_TW: Words
    """Signs of the inputs, packed."""
    candidates_F: Ints
    """Neurons whose row of `first` is read."""
    index_F: Ints
    """Neurons that fire, and `h_F` how strongly."""
    h_F: Floats
    counts_B: Ints
    sums_CP: Floats
    scratch_CX: Floats
    rows_L2: Ints
    """Rows of `first` read and neurons kept, per layer, of the last single-token call."""
    tally_L3: Ints
    """Per layer, over the tokens of the last block with selection: neurons that fire, that are read, and both."""
    logits_TV: Floats


def buffers(s: Shape, layers: int, largest_rank: int, tokens: int = BLOCK_TOKENS) -> Buffers:
    """Buffers for calls of up to `tokens` tokens."""
    f32: Any = np.float32
    widest = max(s.d_model, s.d_embedding, s.heads * s.head_dim, largest_rank)
    return Buffers(
        x_TD=np.empty((tokens, s.d_model), f32),
        normed_TD=np.empty((tokens, s.d_model), f32),
        attended_TD=np.empty((tokens, s.d_model), f32),
        narrow_TW=np.empty((tokens, s.d_embedding if s.d_embedding != s.d_model else 0), f32),
        qkv_TQ=np.empty((tokens, (s.heads + 2 * s.kv_heads) * s.head_dim), f32),
        mixed_TQ=np.empty((tokens, s.heads * s.head_dim), f32),
        router_TX=np.empty((tokens, s.experts), f32),
        taken_TK=np.zeros((tokens, s.experts_per_token), np.int64),
        share_TK=np.ones((tokens, s.experts_per_token), f32),
        gathered_TD=np.empty((tokens if s.experts > 1 else 0, s.d_model), f32),
        places_T=np.empty(tokens, np.int64),
        h_flat=np.empty(tokens * s.d_ff, f32),
        other_flat=np.empty(tokens * s.d_ff, f32),
        r_flat=np.empty(tokens * largest_rank, f32),
        records=np.empty(tokens * record_nbytes(widest), np.uint8),
        r_records=np.empty(tokens * record_nbytes(largest_rank), np.uint8),
        signs_TW=np.empty((tokens, sign_words(s.d_model)), np.uint64),
        candidates_F=np.empty(s.d_ff, np.int64),
        index_F=np.empty(s.d_ff, np.int64),
        h_F=np.empty(s.d_ff, f32),
        counts_B=np.empty(SHARES, np.int64),
        sums_CP=np.empty((CHUNKS, padded_width(s.d_model)), f32),
        scratch_CX=np.empty((CHUNKS, sum_floats(s.d_model)), f32),
        rows_L2=np.zeros((layers, 2), np.int64),
        tally_L3=np.zeros((layers, 3), np.int64),
        logits_TV=np.empty((tokens, s.vocabulary), f32),
    )
