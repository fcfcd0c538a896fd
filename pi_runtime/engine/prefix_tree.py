"""What was computed and may be needed again: pages by the tokens before them and how these were computed.

A node is a place of 32 positions, with a page of each class of layers. The path to it spells the positions so far, each
a token with whether it was computed with selection: keys and values depend on all of these. Only a full page has
children. A page that is used in part is dropped once another holds the same positions and more. Each salt has a root of
its own: nothing tells what another's pages hold.

Layers with a window need their pages only where a sequence goes on. So a node may lack theirs, and a prefix is offered
where every class has what its window sees from there. States are one more class, which most nodes lack: those of a
node are of the length at which its positions end, and a prefix with states is offered up to there or not at all. They
are snapshots of sequences (see `sequence.snapshot_places`), and take at most `OF_STATES` of the pool's budget.

Memory is made by least waste (Abhyankar et al. 2024, InferCept): keeping a page costs bytes × the time until it is
expected back, dropping it the time to have it again. Of pages of one kind the least recently used has the most to lose
by staying, so each kind is a heap by last use, and the pages at the heads are compared:

    answers' tokens    with selection, which no prompt finds again: first
    calls of tools     expected back after as long as such calls took here, or after their age where that is less
    others             expected back after their age

The last page of a path goes first, so what is left of a path can still be begun with.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, Optional, TypeGuard

from pi_runtime.artifact.layer_classes import LayerClass
from pi_runtime.execution.kv_cache import KVCache, PageRun, all_pages, pages_of
from pi_runtime.execution.pages import PAGE_POSITIONS, PagePool
from pi_runtime.sequence.sequence import Outcome

Key = tuple[int, ...]
"""The positions of a page, each as one number: twice the token, plus one where it was computed with selection."""
LATEST = 0.2
"""Weight of the latest measurement."""
SPARE_ENTRIES = 64
OF_STATES = 0.5
"""Share of the pool's budget that states may take: where there are more, the least recently used go."""


class Measured:
    """A running average of measurements, which begins with an assumed value."""

    def __init__(self, assumed: float) -> None:
        self.value, self._is_assumed = assumed, True

    def count(self, value: float) -> None:
        """Count a measurement; the first replaces what was assumed."""
        self.value = value if self._is_assumed else self.value + LATEST * (value - self.value)
        self._is_assumed = False


class Prefix(NamedTuple):
    """A stored prefix. Nobody holds its pages but the tree: take references to them before anything is evicted."""

    runs: tuple[PageRun, ...]
    """By classes; the last page of each may be used in part."""
    length: int

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages of all classes."""
        return all_pages(self.runs)


@dataclass(eq=False)
class Node:
    """A place of a path."""

    key: Key
    pages: list[int | None]
    """One of each class; None where the tree has none."""
    parent: Optional["Node"]
    children: dict[Key, "Node"] = field(default_factory=dict)
    salt: str = ""
    """Separates the trees of those who share nothing; a root has it."""
    name: bytes = b""
    """What its pages are called on disk; empty until somebody asks, and of a root."""
    uses: list[int] = field(default_factory=list)
    """For each class the number of its page's last use."""
    used_s: float = 0.0
    """When it was used last."""
    outcome: Outcome | None = None
    """How the sequence that used it last ended; None while it runs."""
    asked: tuple[Outcome, float] | None = None
    """Where a prompt ended: how its answer ended, and when."""

    @property
    def is_whole(self) -> bool:
        """Whether all its positions are used."""
        return len(self.key) == PAGE_POSITIONS

    def ancestry(self) -> Iterator["Node"]:
        """The node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


Entry = tuple[int, Node, int]
"""A page that may be dropped: the number of its last use, its node and its class."""
Dropping = Callable[[Node, int, int], object]
"""Is told of a page that is about to be dropped, if a prompt may find it: its node, its class, the page."""
Price = Callable[[Node, int], float]
"""Seconds that it takes to have a page of a node and a class again."""


class _Snapshots:
    """The nodes that hold states, each with the number of their class."""

    def __init__(self, pool: PagePool) -> None:
        self._pool, self._kinds = pool, dict[Node, int]()

    def with_one_more(self, node: Node, kind: int) -> list[Node]:
        """Note a node; returns those whose states are too many: which were used longest ago."""
        self._kinds[node] = kind
        if self._pool.capacity is None:
            return []
        most = max(1, int(OF_STATES * self._pool.capacity) // self._pool.classes[kind].page.nbytes)
        return sorted(self._kinds, key=lambda one: -one.uses[kind])[most:]

    def forget(self, node: Node, kind: int) -> None:
        """Note that a node's page of a class is given back."""
        if self._kinds.get(node) == kind:
            del self._kinds[node]


class PrefixTree:
    """Pages of positions that were computed, found by the longest prefix, and dropped where that wastes least.

    `selection_matters`: whether a token has other keys and values where it was computed with selection.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        selection_matters: bool = True,
        dropping: Dropping = lambda *_: None,
        price_s: Price = lambda *_: 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._selection_matters = pool, selection_matters
        self._dropping, self._price_s, self._clock = dropping, price_s, clock
        self._roots: dict[str, Node] = {}
        """By their salts; each has children."""
        self._uses = count(1)
        self._answers: list[Entry] = []
        self._calls: list[Entry] = []
        self._others: list[Entry] = []
        self.size = 0
        """How many pages it holds. Any thread may ask."""
        self._snapshots = _Snapshots(pool)
        self.call_s = Measured(float("inf"))
        """Seconds for which calls of tools have taken: until the next turn began."""

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages it holds."""
        return tuple(page for node in self.nodes() for page in node.pages if page is not None)

    def nodes(self) -> Iterator[Node]:
        """Its nodes, each before those below it."""
        left = [child for root in self._roots.values() for child in root.children.values()]
        while left:
            node = left.pop()
            yield node
            left += node.children.values()

    def longest(
        self, tokens: Sequence[int], selected: Sequence[bool], salt: str = "", *, is_turn: bool = True
    ) -> Prefix:
        """The longest prefix of these tokens that is stored, computed as `selected` says; marks it as used now.

        `is_turn`: whether a talk goes on with them, so that a call of a tool before them is over.
        """
        root = self._roots.get(salt, Node((), [], None))
        path, rest = _walk(root, self.keys(tokens, selected))
        length = PAGE_POSITIONS * len(path)
        if is_turn:
            self._count_calls(path)
        closest, common = _closest(path[-1] if path else root, rest)
        if closest is not None:
            path.append(closest)
        length = _offered(self._pool.classes, path, length + common)
        self._use(path, length, None)
        return Prefix(
            tuple(_run(self._pool.classes, path, kind, length) for kind in range(len(self._pool.classes))), length
        )

    def insert(self, cache: KVCache, outcome: Outcome | None = None, prompt_tokens: int = 0) -> None:
        """Share the pages of a cache, as far as their positions are not held yet; marks all of them as used now.

        `outcome`: how the sequence ended that had the cache, of whose tokens so many were the prompt.
        """
        assert cache.pool is self._pool
        runs, keys = cache.runs, self.keys(cache.tokens, cache.selected)
        if not keys:
            return
        root = self._roots.setdefault(cache.salt, Node((), [], None, salt=cache.salt))
        path, _ = _walk(root, keys)
        for n in range(len(path), len(keys)):
            path.append(self._add(path[-1] if path else root, keys[n]))
        for place, node in enumerate(path):
            if node.key == keys[place]:  # else it holds more than this cache
                self._fill(node, [run.at(place) for run in runs])
        self._use(path, cache.length, outcome)
        if outcome is not None and 0 < (place := prompt_tokens // PAGE_POSITIONS) <= len(path):
            path[place - 1].asked = outcome, self._clock()
        self._prune(path[-1])

    def evict(self, nbytes: int) -> int:
        """Drop pages, where that wastes least, until so many bytes are free in the pool; returns the pages freed.

        Afterwards fewer bytes are free than asked for only where live caches hold all other pages.
        """
        before, now, held = self._pool.in_use, self._clock(), list[Entry]()
        while self._pool.free_nbytes < nbytes:
            if (entry := self._next(now)) is None:
                # What live caches hold may lie below pages that nobody else holds.
                hiding = [one for one in held if not one[1].children and self._hides_a_page(one[1])]
                held = [one for one in held if one not in hiding]
                for node in {node for _, node, _ in hiding}:
                    self._drop(node)
                if not hiding:
                    break
                continue
            _, node, kind = entry
            if not node.children and any(self._is_own(page) for page in node.pages):
                self._drop(node)
            elif self._pool.classes[kind].comes_alone and self._is_own(page := node.pages[kind]):
                self._tell(node, kind, page)
                self._release(node, kind)
            else:
                held.append(entry)
        for _, node, kind in held:
            if node.pages[kind] is not None:
                self._offer(node, kind)
        return before - self._pool.in_use

    def clear(self) -> None:
        """Drop everything."""
        for node in tuple(self.nodes()):
            for kind in range(len(node.pages)):
                self._release(node, kind)
            node.children.clear()
            node.parent = None
        for held in (self._roots, self._answers, self._calls, self._others):
            held.clear()

    def keys(self, tokens: Sequence[int], selected: Sequence[bool]) -> list[Key]:
        """The positions of a sequence as the tree's keys, one for each page."""
        pairs = zip(tokens, selected, strict=True)
        both = [2 * token + (select and self._selection_matters) for token, select in pairs]
        return [tuple(both[first : first + PAGE_POSITIONS]) for first in range(0, len(both), PAGE_POSITIONS)]

    def _count_calls(self, path: Sequence[Node]) -> None:
        """Count how long calls of tools took whose next turn this is."""
        for node in path:
            if node.asked is not None and node.asked[0].in_call:
                self.call_s.count(self._clock() - node.asked[1])
                node.asked = None

    def _add(self, parent: Node, key: Key) -> Node:
        """Add a node below another, in place of children that hold less; returns the child that holds its positions."""
        closest, common = _closest(parent, key)
        if closest is not None and common == len(key):
            return closest
        kinds = len(self._pool.classes)
        found = parent.children[key] = Node(key, [None] * kinds, parent, uses=[0] * kinds)
        for size in range(1, len(key)):
            if (shorter := parent.children.get(key[:size])) is not None:
                self._remove(shorter)
        return found

    def _fill(self, node: Node, pages: Sequence[int | None]) -> None:
        """Share these pages, of each class one, where a node lacks them."""
        for kind, page in enumerate(pages):
            if node.pages[kind] is None and page is not None:
                self._pool.share(page)
                node.pages[kind] = page
                self.size += 1
                self._mark(node, kind)
                if self._pool.classes[kind].is_state:
                    for older in self._snapshots.with_one_more(node, kind):
                        if self._is_own(own := older.pages[kind]):
                            self._tell(older, kind, own)
                        self._release(older, kind)

    # What is dropped first.

    def _use(self, path: Sequence[Node], length: int, outcome: Outcome | None) -> None:
        """Mark as used now what a sequence needs to go on from the first `length` positions of a path."""
        now, needed = self._clock(), [of.pages(length) for of in self._pool.classes]
        for place in reversed(range(pages_of(length))):
            node = path[place]
            node.used_s, node.outcome = now, outcome
            for kind, places in enumerate(needed):
                if place in places and node.pages[kind] is not None:
                    self._mark(node, kind)

    def _mark(self, node: Node, kind: int) -> None:
        """Let a page be the one that was used last."""
        node.uses[kind] = next(self._uses)
        self._offer(node, kind)

    def _offer(self, node: Node, kind: int) -> None:
        """Note a page that may be dropped: the last one of a path, or one of a window."""
        if not node.children or self._pool.classes[kind].comes_alone:
            heap = self._heap(node)
            heappush(heap, (node.uses[kind], node, kind))
            if len(heap) > 4 * self.size + SPARE_ENTRIES:
                heap[:] = {entry[0]: entry for entry in heap if self._holds(entry)}.values()
                heapify(heap)

    def newest_first(self) -> Iterator[Node]:
        """What a prompt may find: of the path that was used last first, from its beginning on."""
        leaves, done = [node for node in self.nodes() if not node.children], set[Node]()
        for leaf in sorted(leaves, key=lambda node: -node.used_s):
            for node in reversed([*leaf.ancestry()]):
                if node not in done and not self._is_over(node):
                    done.add(node)
                    yield node

    def _is_over(self, node: Node) -> bool:
        """Whether a node has tokens of an answer that has ended, and that no prompt finds again."""
        return self._selection_matters and node.outcome is not None and any(position % 2 for position in node.key)

    def _heap(self, node: Node) -> list[Entry]:
        """Where the pages of a node are that may be dropped."""
        if self._is_over(node):
            return self._answers
        return self._calls if node.outcome is not None and node.outcome.in_call else self._others

    def _holds(self, entry: Entry) -> bool:
        """Whether an entry still stands for a page that may be dropped."""
        use, node, kind = entry
        is_last = not node.children or self._pool.classes[kind].comes_alone
        return node.uses[kind] == use and node.pages[kind] is not None and is_last

    def _next(self, now: float) -> Entry | None:
        """Take the page out whose keeping costs most, for what it costs to have it again."""
        best: tuple[float, list[Entry]] | None = None
        for heap in (self._answers, self._calls, self._others):
            if (node := self._head(heap)) is not None:
                waste = self._back_s(node, heap, now) / self._price_s(node, heap[0][2])
                best = (waste, heap) if best is None or waste > best[0] else best
        return None if best is None else heappop(best[1])

    def _head(self, heap: list[Entry]) -> Node | None:
        """The node of a heap's first page. Those that were used since, or of which more is known, leave it."""
        while heap:
            entry = heap[0]
            if not self._holds(entry):
                heappop(heap)
            elif (other := self._heap(entry[1])) is not heap:
                heappush(other, heappop(heap))
            else:
                return entry[1]
        return None

    def _back_s(self, node: Node, heap: list[Entry], now: float) -> float:
        """Seconds after which a node's pages are expected to be needed again."""
        if heap is self._answers:
            return float("inf")
        age_s = now - node.used_s
        return min(age_s, self.call_s.value) if heap is self._calls else age_s

    def _is_own(self, page: int | None) -> TypeGuard[int]:
        """Whether this is a page that only the tree holds."""
        return page is not None and self._pool.references(page) == 1

    def _hides_a_page(self, leaf: Node) -> bool:
        """Whether dropping a leaf, and then the nodes above it, frees a page."""
        return any(self._is_own(page) for node in leaf.ancestry() for page in node.pages)

    def _drop(self, node: Node) -> None:
        """Drop the last node of a path."""
        for kind, page in enumerate(node.pages):
            if self._is_own(page):
                self._tell(node, kind, page)
        self._remove(node)

    def _tell(self, node: Node, kind: int, page: int) -> None:
        if not self._is_over(node):
            self._dropping(node, kind, page)

    def _remove(self, node: Node) -> None:
        for kind in range(len(node.pages)):
            self._release(node, kind)
        self._prune(node)

    def _release(self, node: Node, kind: int) -> None:
        """Give back a node's page of a class, if it has one."""
        page, node.pages[kind] = node.pages[kind], None
        self._snapshots.forget(node, kind)
        if page is not None:
            self.size -= 1
            self._pool.release(page)

    def _prune(self, node: Node) -> None:
        """Remove a node that has neither pages nor children, and those above it that are left without."""
        while not node.children and all(page is None for page in node.pages):
            if node.parent is None:
                del self._roots[node.salt]
                return
            del node.parent.children[node.key]
            node = node.parent
            if not node.children:
                for kind, page in enumerate(node.pages):
                    if page is not None:
                        self._offer(node, kind)


def _offered(classes: Sequence[LayerClass], path: Sequence[Node], length: int) -> int:
    """How many of the first `length` positions of a path can be gone on from: what windows see there is held, and
    states of just so many positions are."""
    has_states = any(of.is_state for of in classes)
    there = [0] * len(classes)
    found = 0
    for place, node in enumerate(path):
        there = [place + 1 if page is None else first for first, page in zip(there, node.pages, strict=True)]
        end = min(length, PAGE_POSITIONS * (place + 1))
        if has_states and end != PAGE_POSITIONS * place + len(node.key):
            continue
        if all(of.first_page(end) >= first for of, first in zip(classes, there, strict=True)):
            found = end
    return found


def _run(classes: Sequence[LayerClass], path: Sequence[Node], kind: int, length: int) -> PageRun:
    """The pages of a class that a sequence needs to go on from the first `length` positions of a path."""
    places = classes[kind].pages(length)
    pages = (path[place].pages[kind] for place in places)
    return PageRun(places.start, tuple(page for page in pages if page is not None))


def _walk(root: Node, keys: Sequence[Key]) -> tuple[list[Node], Key]:
    """The nodes of the first full pages, as far as they are held, and the positions of the page that follows."""
    path: list[Node] = []
    node = root
    for key in keys:
        found = node.children.get(key)
        if found is None or len(key) < PAGE_POSITIONS:
            return path, key
        path.append(node := found)
    return path, ()


def _closest(node: Node, key: Key) -> tuple[Node | None, int]:
    """The child that shares most of the first positions with `key`, and how many; None where none shares any."""
    best, most = None, 0
    for child in node.children.values():
        if child.key[:1] == key[:1] and (common := _common(child.key, key)) > most:
            best, most = child, common
    return best, most


def _common(one: Key, other: Key) -> int:
    """How many first positions are the same."""
    count = min(len(one), len(other))
    return next((n for n in range(count) if one[n] != other[n]), count)
