"""Which tokens take an expert: all who gather tokens by expert on the CPU ask here.

Shape letters: T tokens, K experts taken for each token, N tokens that take one expert.
"""

import numpy as np

from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Floats, Ints

Taken = tuple[int, Ints, Floats]
"""An expert, the tokens that take it, and the weight of its sum for each."""


@public
def take_expert(expert_TK: Ints, route_weight_TK: Floats, expert: int, token_T: Ints, weight_T: Floats) -> int:
    """List the tokens that take an expert, in order, and how much its result weighs; returns how many they are."""
    count = 0
    for t in range(expert_TK.shape[0]):
        for k in range(expert_TK.shape[1]):
            if expert_TK[t, k] == expert:
                token_T[count], weight_T[count] = t, route_weight_TK[t, k]
                count += 1
                break  # an expert is taken once, or there would be more than there is room for
    return count


def tokens_of(expert_TK: Ints, route_weight_TK: Floats, expert: int) -> tuple[Ints, Floats]:
    """(N,) the tokens that take an expert, in order, and (N,) how much its result weighs."""
    token_T, weight_T = np.empty(len(expert_TK), np.int64), np.empty(len(expert_TK), np.float32)
    count = take_expert(expert_TK, route_weight_TK, expert, token_T, weight_T)
    return token_T[:count], weight_T[:count]


def tokens_by_expert(expert_TK: Ints, route_weight_TK: Floats, experts: int) -> list[Taken]:
    """Each expert with `tokens_of` it; experts that no token takes are left out."""
    if experts == 1:
        return [(0, np.arange(len(expert_TK)), route_weight_TK[: len(expert_TK), 0])]
    taken = sorted(set(expert_TK.ravel().tolist()) & set(range(experts)))  # a place may be left empty
    return [(expert, *tokens_of(expert_TK, route_weight_TK, expert)) for expert in taken]
