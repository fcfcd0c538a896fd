"""Which experts stay in memory: policies on three traces, of one text, of changing subjects, and of several users.

nox -s bench -- disk --parts residency

All layers share one cache, which begins with the experts that a profile of all subjects names most often. Several users
are four texts on four subjects in one step. Printed is the share of experts that were missed, and that ÷ the better of
what never changes and LRU.
"""

from typing import Any

import numpy as np
from support.row_traces import Trace

from disk_tier import policies
from disk_tier.routing import SUBJECTS, Routing, text
from pi_runtime.disk.whole_experts import Heat

TOKENS, USERS = 600, 4
SHARES = 0.5, 0.25, 0.125
SMALL = Routing(layers=6, d_model=512, experts=32, taken=4, common=0.3, subject=0.1, likeness=0.3)
LARGE = Routing(layers=6, d_model=512, experts=128, taken=8, common=0.38, subject=0.1, likeness=0.35)


def steps_of(routing: Routing, taken_STLK: np.ndarray) -> Trace:
    """The experts that each layer of each step needs, as places in the order of the profile.

    `taken_STLK`: the experts of texts that are written side by side.
    """
    rank_U = np.empty(routing.layers * routing.experts, np.int64)
    rank_U[np.argsort(-routing.profiled().ravel(), kind="stable")] = np.arange(len(rank_U))
    first_L = routing.experts * np.arange(routing.layers)
    return [
        np.unique(rank_U[first + taken_STLK[:, t, n].ravel()])
        for t in range(taken_STLK.shape[1])
        for n, first in enumerate(first_L.tolist())
    ]


def warm(trace: Trace, room: int, layers: int, profile_U: np.ndarray) -> int:
    """The runtime's: what has least heat makes room, as `RowStore` and `neuron_cache` have it; returns hits.

    `profile_U`: how often a token uses each expert, by the profile.
    """
    heat, hits = Heat(profile_U), 0
    held_U = np.arange(len(profile_U)) < room
    for n, step in enumerate(trace):
        if n % layers == 0:
            heat.age()
        hits += int(held_U[step].sum())
        heat.use(step)
        for k, unit in enumerate(step):
            free_U = held_U.copy()
            free_U[step[max(0, k - 2) :]] = False  # two are on their way, or used
            if not held_U[unit] and free_U.any():
                free_I = np.flatnonzero(free_U)
                held_U[free_I[np.argmin(heat.value_U[free_I])]] = False
                held_U[unit] = True
    return hits


def missed(routing: Routing, trace: Trace, room: int, after: int = 0) -> dict[str, float]:
    """The share of experts that each policy misses, in the steps from `after` on."""
    count_U = -np.sort(-routing.profiled().ravel())
    profile_U = count_U * (routing.layers * routing.taken / count_U.sum())
    every = {
        "static": policies.prefix,
        "LRU": policies.lru,
        "half pinned, GCLOCK": policies.POLICIES["half pinned, GCLOCK"],
        "ours": lambda steps, room, _held: warm(steps, room, routing.layers, profile_U),
        "Belady": policies.belady,
    }
    need = sum(map(len, trace[after:]))
    found = {}
    for name, policy in every.items():
        hits = policy(trace, room, range(room)) - (policy(trace[:after], room, range(room)) if after else 0)
        found[name] = 1 - hits / need
    return found


def compare() -> list[dict[str, Any]]:
    """Print and return what each policy misses on each trace."""
    rows, changing = list[dict[str, Any]](), list(range(SUBJECTS))
    for routing in (SMALL, LARGE):
        kinds = {
            "one text": [text(TOKENS)],
            "changing subjects": [text(TOKENS, changing)],
            "several users": [text(TOKENS // 2, [user], seed=user) for user in range(USERS)],
        }
        for kind, texts in kinds.items():
            trace = steps_of(routing, np.stack([routing.of(one) for one in texts]))
            for share in SHARES:
                found = missed(routing, trace, int(share * routing.layers * routing.experts))
                better = min(found["static"], found["LRU"])
                line = ", ".join(f"{name} {one:.3f} ({one / better:.2f})" for name, one in found.items())
                print(f"{routing.taken} of {routing.experts}, {kind}, {share:g} in memory: {line}", flush=True)
                rows.append({"experts": routing.experts, "text": kind, "share": share, "missed": found})
    return rows
