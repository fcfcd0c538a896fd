"""Memory that one call of the forward pass works in, allocated once."""

from typing import Any, NamedTuple

import numpy as np

from pi_runtime.kernels.memory import Floats, Ints
from pi_runtime.kernels.table import Shape

GROUP = 64
"""Neurons one thread walks through at once: a placement group."""
CHUNKS = 32
"""Partial sums of an FFN; as many threads can share them."""
BLOCK_TOKENS = 64
"""Most tokens of one call."""


class Buffers(NamedTuple):
    """Everything one call writes, allocated once. T stands for up to `BLOCK_TOKENS`; flat where T varies."""

    x_TD: Floats
    """The residual stream; on return it holds the normed states the head was applied to."""
    normed_TD: Floats
    qkv_TQ: Floats
    mixed_TQ: Floats
    h_TF: Floats
    other_TF: Floats
    r_TR: Floats
    r_R: Floats
    h_F: Floats
    index_F: Ints
    counts_B2: Ints
    sums_CD: Floats
    rows_L2: Ints
    """Rows of `first` read and neurons kept, per layer, of the last single-token call."""
    tally_L3: Ints
    """Per layer, over the tokens of the last block with selection: neurons that fire, that are read, and both."""
    logits_TV: Floats


def buffers(s: Shape, layers: int, largest_rank: int, tokens: int = BLOCK_TOKENS) -> Buffers:
    """Buffers for calls of up to `tokens` tokens."""
    f32: Any = np.float32
    return Buffers(
        x_TD=np.empty((tokens, s.d_model), f32),
        normed_TD=np.empty((tokens, s.d_model), f32),
        qkv_TQ=np.empty((tokens, (s.heads + 2 * s.kv_heads) * s.head_dim), f32),
        mixed_TQ=np.empty((tokens, s.heads * s.head_dim), f32),
        h_TF=np.empty(tokens * s.d_ff, f32),
        other_TF=np.empty(tokens * s.d_ff, f32),
        r_TR=np.empty(tokens * largest_rank, f32),
        r_R=np.empty(largest_rank, f32),
        h_F=np.empty(s.d_ff, f32),
        index_F=np.empty(s.d_ff, np.int64),
        counts_B2=np.empty((-(-s.d_ff // GROUP), 2), np.int64),
        sums_CD=np.empty((CHUNKS, s.d_model), f32),
        rows_L2=np.zeros((layers, 2), np.int64),
        tally_L3=np.zeros((layers, 3), np.int64),
        logits_TV=np.empty((tokens, s.vocabulary), f32),
    )
