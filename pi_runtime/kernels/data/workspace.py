"""Memory that one call of the forward pass works in, allocated once; `buffers.cpu_workspace` has its sizes.

Shape letters: T up to `BLOCK_TOKENS` tokens, D model width, W embedding width (in `signs_TW` words of signs), Q numbers
of a token's queries, keys and values (in `mixed_TQ` of its queries), X experts, K experts taken for a token, F neurons
of one expert, S segments, C chunks, P padded columns, L layers, V vocabulary. An array is `flat` where T varies.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.buffers import cpu_workspace
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.kernels.data.matrix_view import Floats, Ints, Words

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


def allocate_workspace(decoder: Decoder, largest_rank: int, tokens: int = BLOCK_TOKENS) -> Workspace:
    """The workspace for calls of up to `tokens` tokens."""
    table = cpu_workspace(decoder, largest_rank, tokens)
    return Workspace(**{name: buffer.in_ram() for name, buffer in table.items()})
