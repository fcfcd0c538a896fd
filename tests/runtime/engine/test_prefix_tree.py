"""The prefix tree against a plain search, and pages against plain accounting."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.synthetic import small_decoder

from pi_runtime.engine.prefix_tree import PrefixTree
from pi_runtime.execution.kv_cache import KVCache, PageRun
from pi_runtime.execution.pages import PAGE_POSITIONS, PagePool, PagesExhausted
from pi_runtime.sequence.sequence import Outcome

CONTEXT = 150
Positions = list[tuple[int, bool]]


def new_pool(pages: int | None = None, window: int = 0) -> PagePool:
    """Pages of one layer, or of one layer and three with a window."""
    windows: dict[str, Any] = {"n_layers": 4, "window": window, "windowed_layers": (0, 1, 3)} if window else {}
    decoder = small_decoder(**{"n_layers": 1, "head_dim": 2, **windows})
    manifest: Any = SimpleNamespace(decoder=decoder, formats={"attention": "f32"})
    nbytes = PagePool(manifest).page_nbytes
    return PagePool(manifest, None if pages is None else pages * nbytes)


class Markers:
    """Stands in for keys and values: a number for each position that depends on all before it and on nothing else."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, bool], int] = {}

    def of(self, positions: Positions) -> list[int]:
        found = [0]
        for token, select in positions:
            found.append(self._known.setdefault((found[-1], token, select), len(self._known) + 1))
        return found[1:]

    def run(self, cache: KVCache, positions: Positions) -> None:
        """What a step does: pages are reserved, written, and the positions counted. A kind at a time."""
        cache.reserve(len(positions))
        start, every = cache.length, self.of([*held(cache), *positions])
        for n, (token, select) in enumerate(positions, start):
            for kind, table in enumerate(cache.tables):
                page = table.pages[n // PAGE_POSITIONS - table.first]
                assert cache.pool.references(page) == 1, "wrote into a page that others share"
                assert cache._addresses[n // PAGE_POSITIONS, kind] == cache.pool.address(page)
                cache.pool.values(page)[..., n % PAGE_POSITIONS, :] = every[n]
            cache.append(np.array([token]), select)

    def check(self, pool: PagePool, runs: Sequence[PageRun], positions: Positions) -> None:
        """The pages hold what these positions have to, and all of them that are needed are there."""
        wanted = self.of(positions)
        for run, of in zip(runs, pool.classes, strict=True):
            assert run.first <= of.first_page(len(positions))
            assert run.first + len(run.pages) == -(-len(positions) // PAGE_POSITIONS)
            for place, page in enumerate(run.pages, run.first):
                part = wanted[place * PAGE_POSITIONS :][:PAGE_POSITIONS]
                assert (pool.values(page)[:, :, :, : len(part)] == np.array(part).reshape(1, 1, 1, -1, 1)).all()


def held(cache: KVCache) -> Positions:
    return list(zip(cache.tokens, cache.selected, strict=True))


def split(positions: Positions) -> tuple[list[int], list[bool]]:
    return [token for token, _ in positions], [select for _, select in positions]


def common(one: Positions, other: Positions) -> int:
    same = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(same, min(len(one), len(other)))


def paths(tree: PrefixTree) -> Iterator[Positions]:
    """What the tree holds, by its leaves."""
    nodes = [(root, []) for root in tree._roots.values()]
    for node, before in nodes:  # type: ignore[var-annotated]
        here = [*before, *((key // 2, bool(key % 2)) for key in node.key)]
        nodes += [(child, here) for child in node.children.values()]
        assert node.children == {} or len(here) % PAGE_POSITIONS == 0
        if not node.children:
            yield here


PIECE = st.one_of(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=5),
    st.integers(0, 50).map(lambda count: [(1, False)] * count),
)
SEQUENCES = st.lists(st.tuples(PIECE, PIECE, PIECE).map(lambda three: [*three[0], *three[1], *three[2]]), max_size=8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEQUENCES, SEQUENCES)
def test_the_longest_prefix_is_found_to_the_token(stored: list[Positions], asked: list[Positions]) -> None:
    pool, markers = new_pool(), Markers()
    tree = PrefixTree(pool)
    for positions in stored:
        cache = KVCache(pool, CONTEXT)
        markers.run(cache, positions)
        tree.insert(cache)
        cache.close()
    for positions in asked:
        prefix = tree.longest(*split(positions))
        assert prefix.length == max((common(positions, one) for one in stored), default=0)
        markers.check(pool, prefix.runs, positions[: prefix.length])
    assert pool.in_use == len(tree.pages) == len(set(tree.pages))
    tree.clear()
    assert (pool.in_use, tree.pages, list(paths(tree))) == (0, (), [])


def stored(tree: PrefixTree, pool: PagePool, positions: Positions, salt: str = "") -> None:
    cache = KVCache(pool, CONTEXT)
    cache.salt = salt
    Markers().run(cache, positions)
    tree.insert(cache)


def test_the_least_recently_used_is_dropped_first_and_what_others_hold_is_kept() -> None:
    pool = new_pool(6)
    tree = PrefixTree(pool)
    one, two, three = ([(token, False)] * 40 for token in (1, 2, 3))
    for positions in (one, two, three):
        stored(tree, pool, positions)
    assert (pool.free, pool.in_use) == (0, 6)
    assert tree.longest(*split(one)).length == 40
    assert tree.evict(1 * pool.page_nbytes) == 1
    assert tree.longest(*split(two)).length == 32, "a leaf goes first"
    assert [tree.longest(*split(p)).length for p in (three, one)] == [40, 40]
    assert tree.evict(2 * pool.page_nbytes) == 1
    assert [tree.longest(*split(p)).length for p in (one, two, three)] == [40, 0, 40]
    cache = KVCache(pool, CONTEXT)
    prefix = tree.longest(*split(one))
    cache.adopt(prefix.runs, *split(one))
    assert tree.evict(6 * pool.page_nbytes) == 2, "pages of a live cache stay"
    assert tree.longest(*split(one)).length == 40
    cache.close()
    assert tree.evict(6 * pool.page_nbytes) == 2
    assert pool.in_use == 0


class Clocked:
    """A tree with a clock that stands still, and texts of two pages whose sequences have ended."""

    def __init__(self, pages: int = 40, **settings: Any) -> None:
        self.now = 0.0
        self.pool = new_pool(pages)
        self.tree = PrefixTree(self.pool, clock=lambda: self.now, **settings)

    def ended(self, token: int, seconds: float, *, in_call: bool = False, select: bool = False) -> Outcome:
        """Let a sequence of 64 tokens end, and time go on; the second half may be an answer that was selected."""
        cache, outcome = KVCache(self.pool, CONTEXT), Outcome(in_call=in_call)
        Markers().run(cache, [(token, select and n >= PAGE_POSITIONS) for n in range(2 * PAGE_POSITIONS)])
        self.tree.insert(cache, outcome, PAGE_POSITIONS)
        cache.close()
        self.now += seconds
        return outcome

    def back(self, token: int) -> int:
        """Begin the next turn of such a text."""
        return self.tree.longest([token] * 64, [False] * 64).length

    def kept(self, *tokens: int) -> list[int]:
        """How many pages of these texts are kept."""
        firsts = [node.key[0] // 2 for node in self.tree.nodes()]
        return [firsts.count(token) for token in tokens]


def test_calls_of_tools_are_expected_back_after_as_long_as_they_took() -> None:
    clocked = Clocked()
    page = clocked.pool.page_nbytes
    clocked.ended(9, 2.0, in_call=True)
    assert clocked.back(9) == 64
    assert clocked.tree.call_s.value == 2.0
    clocked.tree.clear()
    clocked.ended(1, 5.0, in_call=True)
    clocked.ended(2, 10.0)
    # The tool has worked for 15 s, but such calls took 2 s; the other talk has rested for 10 s.
    clocked.tree.evict(38 * page)
    assert clocked.kept(1, 2) == [2, 0]
    clocked = Clocked()
    clocked.ended(1, 5.0)
    clocked.ended(2, 10.0)
    clocked.tree.evict(38 * page)
    assert clocked.kept(1, 2) == [0, 2], "the one that has rested for longer goes first"


def test_a_call_that_is_known_late_counts_too() -> None:
    """A server finds a call in the text once the engine has ended the answer."""
    clocked = Clocked()
    clocked.ended(9, 1.0, in_call=True)
    clocked.back(9)
    outcome = clocked.ended(1, 5.0)
    clocked.ended(2, 10.0)
    outcome.in_call = True
    clocked.tree.evict(38 * clocked.pool.page_nbytes)
    assert clocked.kept(1, 2) == [2, 0]


def test_pages_that_are_quicker_to_have_again_go_first() -> None:
    """What waits for a tool lies on disk, and is read in a hundredth of the time."""
    clocked = Clocked(price_s=lambda node, _: 0.01 if node.key[0] == 2 else 1.0)
    clocked.ended(9, 1.0, in_call=True)
    clocked.back(9)
    clocked.tree.clear()
    clocked.ended(1, 5.0, in_call=True)
    clocked.ended(2, 10.0)
    clocked.tree.evict(38 * clocked.pool.page_nbytes)
    assert clocked.kept(1, 2) == [0, 2]


def test_another_text_with_the_same_beginning_is_no_turn_after_a_call() -> None:
    clocked = Clocked()
    clocked.ended(1, 3.0, in_call=True)
    assert clocked.tree.longest([1] * 20, [False] * 20).length == 20
    assert clocked.tree.call_s.value == float("inf")


def test_answers_pages_that_no_prompt_finds_go_first() -> None:
    clocked = Clocked()
    clocked.ended(1, 50.0)
    clocked.ended(2, 1.0, select=True)
    clocked.tree.evict(37 * clocked.pool.page_nbytes)
    assert clocked.kept(1, 2) == [2, 1]
    clocked.tree.evict(38 * clocked.pool.page_nbytes)
    assert clocked.kept(1, 2) == [1, 1]
    clocked = Clocked(selection_matters=False)
    clocked.ended(1, 50.0)
    clocked.ended(2, 1.0, select=True)
    clocked.tree.evict(37 * clocked.pool.page_nbytes)
    assert clocked.kept(1, 2) == [1, 2]


@pytest.mark.parametrize("window", [0, 9, 40])
def test_an_end_that_a_live_cache_holds_too_makes_way_for_what_lies_above_it(window: int) -> None:
    """The live cache has a first page of its own, and its second one is the tree's, in each class of layers."""
    pool, markers, text = new_pool(20, window), Markers(), [(7, False)] * 64
    tree = PrefixTree(pool)
    stored(tree, pool, text[:32])
    live = KVCache(pool, CONTEXT)
    markers.run(live, text)
    tree.insert(live)
    free = pool.free_nbytes
    assert tree.evict(1 << 60) > 0
    assert pool.free_nbytes > free
    markers.check(pool, live.runs, text)
    live.close()
    tree.clear()
    assert pool.in_use == 0


def test_a_page_that_holds_less_than_another_is_not_kept() -> None:
    pool = new_pool()
    tree = PrefixTree(pool)
    for length in (5, 20, 12, 32, 31):
        stored(tree, pool, [(7, True)] * length)
        assert len(tree.pages) == 1
    assert tree.longest([7] * 40, [True] * 40).length == 32
    assert tree.longest([7] * 40, [False] * 40).length == 0


def test_a_salt_finds_only_its_own_and_memory_is_one() -> None:
    """Not a page, nor a part of one, is found with another salt; the least recently used goes first whosever it is."""
    pool = new_pool(4)
    tree = PrefixTree(pool)
    text = [(7, False)] * 40
    for salt in ("a", "b"):
        stored(tree, pool, text, salt)
        assert tree.longest(*split(text), salt).length == 40
    assert len(set(tree.pages)) == 4
    assert tree.longest(*split(text)).length == tree.longest(*split(text), "c").length == 0
    assert tree.longest(*split(text), "a").length == 40
    assert tree.evict(2 * pool.page_nbytes) == 2
    assert [tree.longest(*split(text), salt).length for salt in ("a", "b")] == [40, 0]
    stored(tree, pool, [(7, False)] * 5, "b")
    stored(tree, pool, [(7, False)] * 9, "b")
    stored(tree, pool, [], "c")
    assert tree.longest(*split(text), "b").length == 9
    assert set(tree._roots) == {"a", "b"}
    tree.clear()
    assert (pool.in_use, tree._roots) == (0, {})


def test_an_exhausted_pool_leaves_a_cache_as_it_was() -> None:
    pool, markers = new_pool(2), Markers()
    cache = KVCache(pool, CONTEXT)
    markers.run(cache, [(1, False)] * 40)
    fork = cache.fork()
    for one in (cache, fork):
        before = one.pages, one._addresses.tolist()
        with pytest.raises(PagesExhausted):
            one.reserve(1)
        assert (one.pages, one._addresses.tolist(), pool.in_use) == (*before, 2)
    fork.close()
    cache.reserve(24)
    with pytest.raises(PagesExhausted):
        cache.reserve(25)
    del cache
    assert pool.in_use == 0, "a cache that is gone keeps its pages"


class Traffic:
    """Random operations on live caches and a tree over one small pool."""

    def __init__(self, seed: int, window: int = 0) -> None:
        self.rng, self.markers, self.window = np.random.default_rng(seed), Markers(), window
        self.pool = new_pool(12 if window else 24, window)
        self.tree = PrefixTree(self.pool)
        self.live: list[KVCache] = []
        self.done: Counter[str] = Counter()
        self.texts = [self.some(int(self.rng.integers(1, 130))) for _ in range(6)]

    def some(self, count: int) -> Positions:
        select = bool(self.rng.integers(2))
        return [(int(token), select) for token in self.rng.integers(0, 3, count)]

    def one(self) -> KVCache | None:
        return self.live[self.rng.integers(len(self.live))] if self.live else None

    def join(self) -> None:
        """A prompt, which begins as another one does, takes the longest stored prefix."""
        text = self.texts[self.rng.integers(len(self.texts))]
        text = text[: self.rng.integers(1, len(text) + 1)] + self.some(int(self.rng.integers(0, 9)))
        prefix = self.tree.longest(*split(text))
        assert prefix.length == self.longest(text)
        self.markers.check(self.pool, prefix.runs, text[: prefix.length])
        cache = KVCache(self.pool, CONTEXT)
        cache.adopt(prefix.runs, *split(text[: prefix.length]))
        self.live.append(cache)
        self.run(cache, text[prefix.length :])

    def longest(self, text: Positions) -> int:
        """The longest prefix that is stored, and from which every window sees all that it has to."""
        most = max((common(text, path) for path in paths(self.tree)), default=0)
        root = self.tree._roots.get("")
        if not self.window or root is None:
            return most
        node, lacking, found, keys = root, [-1] * len(self.pool.classes), 0, self.tree.keys(*split(text[:most]))
        for place, key in enumerate(keys):
            # Of those that share as much the first is taken.
            node = max(node.children.values(), key=lambda child: common(list(child.key), list(key)))  # type: ignore[arg-type]
            lacking = [place if page is None else last for last, page in zip(lacking, node.pages, strict=True)]
            for length in range(place * PAGE_POSITIONS + 1, place * PAGE_POSITIONS + len(key) + 1):
                needed = [of.pages(length) for of in self.pool.classes]
                if not any(last in places for places, last in zip(needed, lacking, strict=True)):
                    found = length
        return found

    def append(self) -> None:
        if cache := self.one():
            self.run(cache, self.some(int(self.rng.integers(1, 40)))[: cache.room])

    def run(self, cache: KVCache, positions: Positions) -> None:
        """Where the pool is exhausted the tree makes room; where this does not help, the cache is cancelled."""
        if not self.fits(cache, positions):
            self.evict(-(-len(positions) // PAGE_POSITIONS) + 1)
            if not self.fits(cache, positions):
                self.live.remove(cache)
                cache.close()
                self.done["exhausted"] += 1

    def fits(self, cache: KVCache, positions: Positions) -> bool:
        before = held(cache), cache.pages
        try:
            self.markers.run(cache, positions)
        except PagesExhausted:
            assert held(cache) == before[0]
            assert self.window or cache.pages == before[1]
            return False
        return True

    def evict(self, pages: int | None = None) -> None:
        pages = int(self.rng.integers(1, 5)) if pages is None else pages
        before = self.pool.free
        freed = self.tree.evict(pages * self.pool.page_nbytes)
        assert self.window or freed == self.pool.free - before
        live = {page for cache in self.live for page in cache.held_pages}
        least = min(pages * self.pool.page_nbytes, self.room(live))
        assert self.pool.free_nbytes >= least, "a page could have been freed"

    def room(self, pages: Iterable[int]) -> int:
        assert self.pool.capacity is not None
        return self.pool.capacity - self.pool.nbytes(pages)

    def cancel(self) -> None:
        if cache := self.one():
            self.live.remove(cache)
            if self.rng.random() < 0.5:
                cache.close()
                assert (cache.pages, cache.length) == ((), 0)

    def fork(self) -> None:
        if (cache := self.one()) and len(self.live) < 9:
            self.live.append(cache.fork())

    def truncate(self) -> None:
        if cache := self.one():
            cache.truncate(int(self.rng.integers(0, cache.length + 5)))

    def insert(self) -> None:
        if cache := self.one():
            self.tree.insert(cache)
            found = self.tree.longest(cache.tokens, cache.selected).length
            assert found == cache.length or (self.window and found < cache.length)

    def check(self, everything: bool) -> None:
        wanted = Counter(page for cache in self.live for page in cache.held_pages) + Counter(self.tree.pages)
        assert {page: self.pool.references(page) for page in wanted} == wanted
        assert self.pool.in_use == len(wanted)
        assert self.pool.free_nbytes == self.room(wanted) >= 0
        assert self.room(n for n, array in enumerate(self.pool._arrays) if array is not None) >= 0
        for cache in self.live if everything else self.live[-1:]:
            self.markers.check(self.pool, cache.runs, held(cache))
        if everything:
            for path in paths(self.tree):
                prefix = self.tree.longest(*split(path))
                assert self.window or prefix.length == len(path)
                self.markers.check(self.pool, prefix.runs, path[: prefix.length])


@pytest.mark.parametrize("window", [0, 1, 9, 40])
def test_thousands_of_random_operations_leak_no_page_and_overwrite_none(window: int) -> None:
    traffic = Traffic(0, window)
    operations = ("join", "append", "append", "cancel", "fork", "truncate", "insert", "insert", "evict")
    for n in range(3_000 if window else 10_000):
        name = operations[traffic.rng.integers(len(operations))]
        getattr(traffic, name)()
        traffic.done[name] += 1
        traffic.check(everything=n % 50 == 0)
    assert min(traffic.done[name] for name in (*operations, "exhausted")) > (20 if window else 50), traffic.done
    for cache in traffic.live:
        cache.close()
    traffic.tree.clear()
    assert traffic.pool.in_use == 0
