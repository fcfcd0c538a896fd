"""Memory that one call of the forward pass works in, allocated once; `buffers.cpu_workspace` has its sizes.

Shape letters: T up to `BLOCK_TOKENS` tokens, D model width, W embedding width, Q numbers
of a token's queries, keys and values (in `mixed_TQ` of its queries), X experts (in `expert_TK` K of them a token), F
neurons of one expert, C chunks, K places for a chunk's neurons, P padded columns, B positions of a page, E head width,
L layers, or the width of narrower experts, V vocabulary. An array is `flat` where its shape varies.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.buffers import cpu_workspace
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.sizes import BY_NEURON
from pi_runtime.kernels.data.matrix_view import Floats, Ints


class Workspace(NamedTuple):
    """Everything that one call writes."""

    x_TD: Floats
    """The residual stream; on return it holds the normed states that the head was applied to."""
    normed_TD: Floats
    attended_TD: Floats
    residual_TD: Floats
    """The residual beside the FFN, where its sum is normed alone and its input is another."""
    beside_TF: Floats
    """Factors of the FFN beside the experts, and behind them its products with `up`."""
    layer_embedding_TP: Floats
    """What a layer reads of the layers' embedding, and behind it what is multiplied by that."""
    token_row: Floats
    """A part of a row of that embedding, from where a group of columns begins."""
    narrow_TL: Floats
    """What experts read, where they are narrower than the model."""
    narrow_sum_TL: Floats
    """Their sum."""
    embedding_TW: Floats
    """States as wide as the embedding, where the model has another width."""
    qkv_TQ: Floats
    """Rows as wide as those of any layer; so are the next and `mixed_TQ`."""
    gate_TQ: Floats
    """What attention's sums, or those of states, are multiplied by."""
    gates_TG: Floats
    """Two numbers for each head with a state."""
    query_TQ: Floats
    """The queries, where they are made of a latent."""
    latent_TQ: Floats
    """Each head's query of latents, then the sum of these."""
    latent_inputs: npt.NDArray[np.uint8]
    """Inputs of products by head, for each part of the work."""
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
    unpacked_CBE: Floats
    """A head's keys or values of one page as float32, for each part of attention, where they are packed."""
    low_rank_flat: Floats
    inputs: npt.NDArray[np.uint8]
    """Inputs of matrix products, one a token (see `quantised_input`)."""
    low_rank_inputs: npt.NDArray[np.uint8]
    """The same for the second matrix of a predictor."""
    score_TF: Floats
    """Scores of the selector."""
    list_CK: Ints
    """Neurons of each chunk, in ascending order."""
    count_C: Ints
    """Length of each list."""
    h_CTK: Floats
    """Factors of the rows of `down`."""
    up_CTK: Floats
    """Products with the up rows of a gated FFN."""
    scored_T: Ints
    """Which of the scores are a token's, or −1."""
    asking_T: Ints
    """The tokens whose neurons are scored."""
    tally_CT3: Ints
    """What each chunk counts for each token."""
    squares_CT: Floats
    """Sums of the chunks' squared factors, where these are normed."""
    sums_CTP: Floats
    """Sums of the chunks for a few tokens."""
    scratch_CX: Floats
    """What a chunk works in: lists of a few tokens, and integer sums (see `memory.TokenLists`)."""
    counts_LT3: Ints
    """For each layer and token of the last call what `network.add_neurons` counts."""
    logits_TV: Floats


def allocate_workspace(
    decoder: Decoder, largest_rank: int, tokens: int = BLOCK_TOKENS, cache: str = "f16", layout: str = BY_NEURON
) -> Workspace:
    """The workspace for calls of up to `tokens` tokens with a cache in this format and FFNs in this layout."""
    table = cpu_workspace(decoder, largest_rank, tokens, cache, layout)
    found = Workspace(**{name: buffer.in_ram() for name, buffer in table.items()})
    found.token_T[:] = np.arange(tokens)
    return found
