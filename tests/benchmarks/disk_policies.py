"""Cache policies on one recorded trace: which share of the rows that decoding needs is in memory already.

    python tests/benchmarks/disk_policies.py ARTIFACT [--tokens 96] [--shares 0.5,0.25,0.1]

The trace is what the predictors name, layer by layer, token by token. The caches of all policies hold as many rows. The
pinned half of `plan_for` is part of the policies named so. Belady's policy knows the future and is the bound.
"""

import argparse
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.disk_models import from_disk

from pi_runtime.kernels import ffn_parts

Trace = Sequence[np.ndarray]
"""What one layer needs, token by token."""


def recorded(path: Path, tokens: int) -> list[Trace]:
    """The trace of each layer."""
    found: dict[int, list[np.ndarray]] = {}
    with from_disk(path, 1.5, "predicted", context=512, threads=1) as model:
        executor, name = model.executor, ffn_parts.name_neurons
        calls = iter(range(1 << 60))

        def spy(*arguments: object) -> int:
            count = int(name(*arguments))
            layer = next(calls) % len(model.manifest.layers)
            found.setdefault(layer, []).append(arguments[-1][:count].copy())  # type: ignore[index]
            return count

        ffn_parts.name_neurons = spy
        try:
            cache = model.new_cache()
            for token in np.random.default_rng(1).integers(0, model.manifest.decoder.vocab_size, tokens).tolist():
                model.decode(token, cache)
        finally:
            ffn_parts.name_neurons = name
        assert executor.disk is not None
    return [found[layer] for layer in sorted(found)]


def persistent(often_F: np.ndarray, keep: float, tokens: int) -> Trace:
    """A made trace: an active neuron is active in the next token with probability `keep`, at these frequencies."""
    rng = np.random.default_rng(0)
    stay_F, active_F, found = np.maximum(keep, often_F), rng.random(len(often_F)) < often_F, []
    begin_F = often_F * (1 - stay_F) / np.maximum(1 - often_F, 1e-6)
    for _ in range(tokens):
        drawn_F = rng.random(len(often_F))
        active_F = np.where(active_F, drawn_F < stay_F, drawn_F < begin_F)
        found.append(np.flatnonzero(active_F))
    return found


def lru(trace: Trace, room: int, held: Iterable[int]) -> int:
    cache, hits = OrderedDict.fromkeys(held), 0
    for step in trace:
        present = [row for row in step.tolist() if row in cache]
        hits += len(present)
        for row in present:
            cache.move_to_end(row)
        for row in set(step.tolist()).difference(present):
            cache[row] = None
        while len(cache) > room:
            cache.popitem(last=False)
    return hits


def clock(trace: Trace, room: int, held: Iterable[int], most: int) -> int:
    """GCLOCK, as `neuron_cache.obtain` has it."""
    slots, hits, hand = list(held)[:room], 0, 0
    slots += [-1] * (room - len(slots))
    credit, at = [0] * room, {row: n for n, row in enumerate(slots) if row >= 0}
    for step in trace:
        rows = step.tolist()
        present = [row for row in rows if row in at]
        used = {at[row] for row in present}
        hits += len(present)
        for slot in used:
            credit[slot] = min(most, credit[slot] + 1)
        tries = (most + 1) * room
        for row in rows:
            if row in at:
                continue
            while tries > 0:
                tries, slot, hand = tries - 1, hand, (hand + 1) % room
                if slot in used:
                    continue
                if credit[slot] > 0:
                    credit[slot] -= 1
                    continue
                at.pop(slots[slot], None)
                slots[slot], at[row], credit[slot] = row, slot, 0
                used.add(slot)
                break
    return hits


def lfu(trace: Trace, room: int, held: Iterable[int], decay: float = 0.9) -> int:
    """The rows with the largest decayed counts stay."""
    first = list(held)
    cache, hits = set(first), 0
    count = np.zeros(1 + max(int(step.max()) for step in trace if len(step)) + len(first))
    for step in trace:
        hits += len(cache.intersection(step.tolist()))
        count *= decay
        count[step] += 1
        candidates = np.array(sorted(cache.union(step.tolist())))
        best = np.argsort(-count[candidates], kind="stable")[:room]
        cache = set(candidates[best].tolist())
    return hits


def belady(trace: Trace, room: int, held: Iterable[int]) -> int:
    """The rows that are needed again first stay."""
    following: dict[int, list[int]] = {}
    for time in range(len(trace) - 1, -1, -1):
        for row in trace[time].tolist():
            following.setdefault(row, []).append(time)
    cache, hits = set(held), 0
    for step in trace:
        rows = step.tolist()
        hits += len(cache.intersection(rows))
        for row in rows:
            following[row].pop()
        both = cache.union(rows)
        next_use = {row: following[row][-1] if following.get(row) else len(trace) for row in both}
        cache = set(sorted(both, key=next_use.__getitem__)[:room])
    return hits


def pinned(policy: Callable[[Trace, int, Iterable[int]], int]) -> Callable[[Trace, int, Iterable[int]], int]:
    """Half of the room keeps the rows that are stored first."""

    def with_pinned(trace: Trace, room: int, _held: Iterable[int]) -> int:
        keep = room // 2
        hits = sum(int((step < keep).sum()) for step in trace)
        others = [step[step >= keep] for step in trace]
        return hits + policy(others, room - keep, range(keep, room))

    return with_pinned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--shares", default="0.5,0.25,0.1")
    parser.add_argument("--persistence", type=float, help="a made trace with the recorded frequencies instead")
    a = parser.parse_args()
    traces = recorded(a.artifact, a.tokens)
    neurons = 1 + max(int(step.max()) for trace in traces for step in trace)
    if a.persistence is not None:
        counts_F = np.bincount(np.concatenate([step for trace in traces for step in trace]), minlength=neurons)
        often_F = np.convolve(counts_F / len(traces) / a.tokens, np.ones(101) / 101, "same")
        traces = [persistent(np.maximum(often_F, 1e-3), a.persistence, a.tokens)]
    need = sum(len(step) for trace in traces for step in trace)
    for back in (1, 2, 4, 8):
        found = total = 0
        for trace in traces:
            for n in range(back, len(trace)):
                before = np.unique(np.concatenate(trace[n - back : n]))
                found, total = found + len(np.intersect1d(trace[n], before)), total + len(trace[n])
        print(f"active in one of the last {back} tokens: {found / total:.3f}")
    policies = {
        "pinned prefix alone": lambda trace, room, _held: sum(int((step < room).sum()) for step in trace),
        "LRU": lru,
        "LRU, pinned": pinned(lru),
        **{f"GCLOCK {k}": lambda *call, k=k: clock(*call, k) for k in (1, 3, 7)},
        **{f"GCLOCK {k}, pinned": pinned(lambda *call, k=k: clock(*call, k)) for k in (1, 3, 7)},
        "LFU": lfu,
        "LFU, pinned": pinned(lfu),
        "Belady": belady,
    }
    for share in map(float, a.shares.split(",")):
        room = int(share * neurons)
        for name, policy in policies.items():
            hits = sum(policy(trace, room, range(room)) for trace in traces)
            print(f"{share:5.0%}  {name:22}{hits / need:.3f}", flush=True)


if __name__ == "__main__":
    main()
