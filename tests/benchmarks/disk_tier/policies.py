"""Cache policies on one recorded trace: which share of the rows that decoding needs is in memory already.

The trace is what the predictors name, layer by layer, token by token. The caches of all policies hold as many rows.
Belady's policy knows the future and is the bound.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from support.row_traces import Trace

Policy = Callable[[Trace, int, Iterable[int]], int]
"""(trace, rows that the cache holds, rows that it begins with) → rows that were there when they were needed."""


def load_traces(path: Path) -> list[Trace]:
    """The trace of each layer, as `engine.trace` writes them."""
    with np.load(path) as file:
        counts = [file[f"{n}_counts"] for n in range(len(file.files) // 2)]
        return [np.split(file[f"{n}"], np.cumsum(count_T)[:-1]) for n, count_T in enumerate(counts)]


def prefix(trace: Trace, room: int, _held: Iterable[int]) -> int:
    """No cache: the rows that are stored first stay."""
    return sum(int((step < room).sum()) for step in trace)


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


def pinned(policy: Policy) -> Policy:
    """Half of the room keeps the rows that are stored first."""

    def with_pinned(trace: Trace, room: int, _held: Iterable[int]) -> int:
        keep = room // 2
        hits = sum(int((step < keep).sum()) for step in trace)
        others = [step[step >= keep] for step in trace]
        return hits + policy(others, room - keep, range(keep, room))

    return with_pinned


def by_pages(rows: int) -> Policy:
    """The system's page cache without read-ahead: LRU by pages, each of which holds so many rows."""

    def paged(trace: Trace, room: int, held: Iterable[int]) -> int:
        cache, hits = OrderedDict.fromkeys(row // rows for row in held), 0
        for step in trace:
            hits += sum(row // rows in cache for row in step.tolist())
            for page in dict.fromkeys((step // rows).tolist()):
                cache.pop(page, None)
                cache[page] = None
            while len(cache) > room // rows:
                cache.popitem(last=False)
        return hits

    return paged


POLICIES: dict[str, Policy] = {
    "rows that fire most often": prefix,
    "LRU": lru,
    "GCLOCK": lambda *call: clock(*call, 3),
    "LFU, decaying": lfu,
    "half pinned, LRU": pinned(lru),
    "half pinned, GCLOCK": pinned(lambda *call: clock(*call, 3)),
    "half pinned, LFU": pinned(lfu),
    "Belady": belady,
}


def hit_rates(
    traces: Sequence[Trace], neurons: int, shares: Sequence[float], rows_per_page: int
) -> Iterator[tuple[str, list[float]]]:
    """Each policy's hit rate, for caches of these shares of a layer's rows."""
    need = sum(len(step) for trace in traces for step in trace)
    for name, policy in {**POLICIES, "LRU by pages": by_pages(rows_per_page)}.items():
        rooms = [int(share * neurons) for share in shares]
        yield name, [sum(policy(trace, room, range(room)) for trace in traces) / need for room in rooms]
