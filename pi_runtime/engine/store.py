"""The store of prefixes: keys and values of live sequences, and of what may be needed again, in memory and on disk.

    Core ──▶ PrefixStore ──▶ PagePool       pages under the budget of memory, shared by reference
                        ├──▶ PrefixTree     which of them may be needed again, and which to drop
                        └──▶ DiskStorey     what a page is called on disk, and whether it is worth while there
                               └──▶ PageFiles    pages on disk, under a budget of their own (`--kv-disk`)

A sequence that joins begins with the longest prefix that the tree has. Where the files have more of it, their pages are
read into pages of its own, and count as computed from then on. Pages that the tree drops are offered to the files, if
reading them would be quicker than computing them again. All is measured. What the store has changes no text: a page is
found by all that its bits depend on, and only whole pages go to disk.

It belongs to the thread that runs steps; only a thread of `PageFiles` writes beside it.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from pi_runtime.artifact.layer_classes import sequence_nbytes
from pi_runtime.engine.page_files import Name, Offered, PageFiles, name_below
from pi_runtime.engine.prefix_tree import Key, Measured, Node, PrefixTree
from pi_runtime.errors import Setting, UsageError
from pi_runtime.execution.executor import Executor
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PAGE_POSITIONS, PagePool, PagesExhausted
from pi_runtime.sequence.answer import AnswerSequence
from pi_runtime.sequence.sequence import Rank, ScoreSequence, TokenSequence

MEASURED_TOKENS = 8
"""Least tokens of a step that says what a token of a prompt takes."""
FORGIVEN = 0.9
"""What remains, at each prompt, of a time to read that does not pay: it is tried again after a while."""
TRIES = 4
"""How often a prompt is looked for on disk, where files are gone or damaged."""
LEAST_S, MOST_S = 1e-9, 1e9
"""Bounds of what a page costs, as long as nothing is measured."""


class DiskStorey:
    """What goes to the files of pages, and what is read from them: as far as reading is quicker than computing."""

    def __init__(self, files: PageFiles, pool: PagePool) -> None:
        self.files, self._pool = files, pool
        self.token_s = Measured(math.inf)
        """Seconds that a token of a prompt takes."""
        self.read_s = Measured(0.0)
        """Seconds that reading a byte takes."""

    @property
    def pays(self) -> bool:
        """Whether reading a page is quicker than computing it."""
        return self.read_s.value * self._pool.page_nbytes < PAGE_POSITIONS * self.token_s.value

    def take(self, node: Node, kind: int, page: int) -> None:
        """Take a page that memory drops, if that is worth while."""
        if node.is_whole and self.pays:
            self.files.offer(self._offered(node, kind, page))

    def price_s(self, node: Node, kind: int) -> float:
        """Seconds that it takes to have a page again: to read it where it is stored, else to compute it."""
        if node.is_whole and self.pays and self.files.has(self._name(node), kind):
            return max(self.read_s.value * self._pool.page_nbytes, LEAST_S)
        return min(PAGE_POSITIONS * self.token_s.value, MOST_S)

    def fill(self, wanted: Sequence[Offered]) -> bool:
        """Fill pages with what is stored by their names; False where any cannot be read."""
        began = time.perf_counter()
        if not self.files.read(wanted):
            return False
        self.read_s.count((time.perf_counter() - began) / sum(page.values.nbytes for page in wanted))
        return True

    def names(self, keys: Iterable[Key], salt: str) -> list[Name]:
        """The names of the full pages of a sequence."""
        found, name = list[Name](), self.files.root(salt)
        for key in keys:
            if len(key) == PAGE_POSITIONS:
                found.append(name := name_below(name, key))
        return found

    def close(self, seconds: float, nodes: Iterable[Node]) -> None:
        """Write the pages of these nodes that are not on disk yet, in this order, as far as that takes no longer."""
        ends, batch, nbytes = time.monotonic() + seconds, list[Offered](), 0
        self.files.close(seconds)
        for page in self._missing(nodes):
            if time.monotonic() >= ends:
                return
            batch.append(page)
            nbytes += page.values.nbytes
            if nbytes >= self.files.most_nbytes:
                if not self.files.write(batch):
                    return
                batch, nbytes = [], 0
        if batch:
            self.files.write(batch)

    def _missing(self, nodes: Iterable[Node]) -> Iterator[Offered]:
        for node in nodes:
            for kind, page in enumerate(node.pages):
                if page is not None and node.is_whole and self.pays and not self.files.has(self._name(node), kind):
                    yield self._offered(node, kind, page)

    def _offered(self, node: Node, kind: int, page: int) -> Offered:
        return Offered(self._name(node), kind, self._pool.values(page))

    def _name(self, node: Node) -> Name:
        """The name of a node's pages."""
        above = list[Node]()
        for one in node.ancestry():
            if one.name:
                break
            above.append(one)
        for one in reversed(above):
            assert one.parent is not None
            one.name = name_below(one.parent.name or self.files.root(one.parent.salt), one.key)
        return node.name


class PrefixStore:
    """Gives caches to sequences. What nobody else needs is dropped for them, where that wastes least.

    `selection_matters`: whether a token has other keys and values where it was computed with selection. `files`: where
    pages go that memory has no room for.
    """

    def __init__(
        self, executor: Executor, pool: PagePool, *, selection_matters: bool, files: PageFiles | None = None
    ) -> None:
        self._executor, self.pool = executor, pool
        self._disk = None if files is None else DiskStorey(files, pool)
        told: dict[str, Any] = (
            {} if self._disk is None else {"dropping": self._disk.take, "price_s": self._disk.price_s}
        )
        self.tree = PrefixTree(pool, selection_matters=selection_matters, **told)
        # Where weights come from a disk, one pass over them reads a whole prompt: an answer in it costs nothing more.
        self._reads_again = selection_matters and executor.disk is None
        self._is_full = False
        """Whether the first of those that wait found too little memory, and none has come back since."""
        self.read_tokens = 0
        """Tokens whose keys and values were read from disk."""

    @property
    def may_open(self) -> bool:
        """Whether `open` may succeed: memory has come back since it failed."""
        return not self._is_full

    def check(self, positions: int) -> None:
        """Raise UsageError if a sequence of so many positions does not fit the budget alone."""
        assert self.pool.capacity is not None
        nbytes = sequence_nbytes(self.pool.classes, positions, self._executor.block_tokens)
        if nbytes > self.pool.capacity:
            raise UsageError(
                f"keys and values of {positions} positions take {nbytes} bytes",
                expected=("at most ", Setting("kv_budget"), f", {self.pool.capacity} bytes in whole pages"),
                remedy=("raise ", Setting("kv_budget"), ", or lower ", Setting("max_tokens")),
            )

    def open(self, sequence: TokenSequence, live: Iterable[KVCache]) -> KVCache | None:
        """A cache with pages for a sequence's tokens, which begins with the longest stored prefix of them.

        None where the live caches leave too few pages.
        """
        taken = {page for cache in live for page in cache.held_pages}
        reusable, tokens, step = sequence.num_reusable, sequence.tokens, self._executor.block_tokens
        assert self.pool.capacity is not None
        for _ in range(2):
            cache = self._begun(sequence, reusable)
            lacking = cache.lacking_nbytes(len(tokens) - cache.length, step)
            if self.pool.nbytes(taken.union(cache.held_pages)) + lacking <= self.pool.capacity:
                try:
                    return self._grown(cache, sequence)
                except BaseException:
                    cache.close()  # the error's traceback refers to it as long as anybody has the error
                    raise
            # The last page is copied if it is used in part: where there is no page for the copy, whole pages alone do.
            reusable = cache.length // PAGE_POSITIONS * PAGE_POSITIONS
            cache.close()
        assert taken, "a sequence that fits alone finds no room though nothing runs"
        self._is_full = True
        return None

    def grow(self, cache: KVCache, count: int) -> bool:
        """Give a cache pages for so many further positions; False where the live caches leave too few."""
        step = self._executor.block_tokens
        try:
            cache.reserve(count, step)
        except PagesExhausted:
            self.tree.evict(cache.lacking_nbytes(count, step))
            with suppress(PagesExhausted):
                cache.reserve(count, step)
                return True
            return False
        return True

    def grow_freely(self, cache: KVCache, count: int) -> bool:
        """Give a cache pages for so many further positions if they are free, and drop nothing for them."""
        try:
            cache.reserve(count)
        except (PagesExhausted, MemoryError):
            return False
        return True

    def catch_up(self, cache: KVCache, sequence: TokenSequence) -> None:
        """Let a sequence's cache go on from full pages that others have computed meanwhile."""
        tokens, selected = sequence.tokens, sequence.selected
        stored = self.tree.longest(tokens[: sequence.num_reusable], selected[: sequence.num_reusable], cache.salt)
        if (whole := stored.length // PAGE_POSITIONS * PAGE_POSITIONS) > cache.length:
            stored = self.tree.longest(tokens[:whole], selected[:whole], cache.salt)
        if min(whole, stored.length) > cache.length:
            cache.close()
            cache.adopt(stored.runs, tokens[: stored.length], selected[: stored.length])
            # Of layers with a window it may need more pages now: where there are too few, the next step makes room.
            self.grow(cache, len(tokens) - cache.length)

    def share(self, cache: KVCache) -> None:
        """Let later sequences begin with the full pages of a cache, which goes on with the last one.

        Of a cache with states that is all or nothing: they are those of its present length.
        """
        if not cache.holds(cache.length // PAGE_POSITIONS * PAGE_POSITIONS):
            return
        full = cache.fork()
        full.truncate(cache.length // PAGE_POSITIONS * PAGE_POSITIONS)
        self.keep(full)

    def keep(self, cache: KVCache) -> None:
        """Close a cache; what it held can be used again until its memory is needed."""
        self.tree.insert(cache)
        cache.close()

    def release(self, sequence: TokenSequence, cache: KVCache | None) -> TokenSequence | None:
        """Take back the cache of a sequence that ends, and keep what it held for later ones.

        Returns what reads an answer again, whose tokens were computed in another way than a prompt's are.
        """
        self._is_full = False
        if cache is None:
            return None
        is_asked = sequence.rank is Rank.ASKED
        # Of scores nothing is over: later ones find their tokens, which are computed with selection too.
        outcome = None if isinstance(sequence, ScoreSequence) else sequence.outcome
        self.tree.insert(cache, outcome, sequence.prompt_tokens if is_asked else 0)
        cache.close()
        return sequence.as_prompt if self._reads_again and isinstance(sequence, AnswerSequence) else None

    def count_step(self, tokens: int, seconds: float) -> None:
        """Count what tokens of prompts took: it says what it costs to compute pages again."""
        if self._disk is not None and tokens >= MEASURED_TOKENS:
            self._disk.token_s.count(seconds / tokens)

    def disk_figures(self) -> dict[str, int]:
        """The figures of what is on disk, by their names in `EngineStats`."""
        files = None if self._disk is None else self._disk.files
        return {
            "kv_disk_pages": 0 if files is None else files.size,
            "kv_disk_pages_written": 0 if files is None else files.written,
            "kv_disk_tokens": self.read_tokens,
        }

    def close(self, seconds: float) -> None:
        """Write what is kept to disk, what was used last first, as far as that takes no longer, and release it."""
        if self._disk is not None:
            self._disk.close(seconds, self.tree.newest_first())
        self.tree.clear()

    def _begun(self, sequence: TokenSequence, reusable: int) -> KVCache:
        """A cache that begins with the longest prefix in memory of a sequence's first `reusable` tokens."""
        tokens, selected, salt = sequence.tokens[:reusable], sequence.selected[:reusable], sequence.origin.salt
        stored = self.tree.longest(tokens, selected, salt, is_turn=sequence.rank is Rank.ASKED)
        cache = self._executor.new_cache(self.pool)
        cache.salt = salt
        cache.adopt(stored.runs, tokens[: stored.length], selected[: stored.length])
        return cache

    def _grown(self, cache: KVCache, sequence: TokenSequence) -> KVCache:
        """The cache with pages for all of a sequence's tokens; or one in its place, with what the files have more."""
        tokens = len(sequence.tokens)
        longer = self._from_files(cache, sequence)
        if longer is not None:
            # Of layers with a window it holds more pages.
            if self.grow(longer, tokens - longer.length):
                cache.close()
                return longer
            longer.close()
        fits = self.grow(cache, tokens - cache.length)
        assert fits
        return cache

    # On disk.

    def _from_files(self, cache: KVCache, sequence: TokenSequence) -> KVCache | None:
        """A cache with more of a sequence's tokens than this one, read from disk; None where there is nothing more."""
        if self._disk is None:
            return None
        if not self._disk.pays:
            self._disk.read_s.value *= FORGIVEN
            return None
        reusable = sequence.num_reusable
        keys = self.tree.keys(sequence.tokens[:reusable], sequence.selected[:reusable])
        names = self._disk.names(keys, cache.salt)
        whole = cache.length // PAGE_POSITIONS * PAGE_POSITIONS
        for _ in range(TRIES):
            found = self._begun(sequence, whole) if whole < cache.length else cache.fork()
            end = self._extent(found, names) if found.length % PAGE_POSITIONS == 0 else 0
            if end > cache.length and self._fill(found, sequence, names, end):
                return found
            found.close()
            if end <= cache.length:
                break
        return None

    def _extent(self, cache: KVCache, names: Sequence[Name]) -> int:
        """How many first positions there are, in the cache or on disk, all that each class of layers needs of them."""
        assert self._disk is not None
        first, files, classes = cache.length // PAGE_POSITIONS, self._disk.files, self.pool.classes
        whole = [kind for kind, of in enumerate(classes) if not of.comes_alone]
        behind = range(first, len(names))
        last = next((n for n in behind if not all(files.has(names[n], kind) for kind in whole)), len(names))

        def has(kind: int, place: int) -> bool:
            return cache.tables[kind].first <= place < first or (place >= first and files.has(names[place], kind))

        for end in range(last, first, -1):
            alone = ((k, of.pages(end * PAGE_POSITIONS)) for k, of in enumerate(classes) if of.comes_alone)
            if all(has(kind, place) for kind, places in alone for place in places):
                return end * PAGE_POSITIONS
        return 0

    def _fill(self, cache: KVCache, sequence: TokenSequence, names: Sequence[Name], end: int) -> bool:
        """Read what a cache lacks of a sequence's first positions; False where that cannot be had."""
        assert self._disk is not None
        first, last = cache.length // PAGE_POSITIONS, end // PAGE_POSITIONS
        counts = [last - max(first, of.first_page(end)) for of in self.pool.classes]
        self.tree.evict(self.pool.nbytes_of(counts))
        new = slice(cache.length, end)
        try:
            pages = cache.skip(sequence.tokens[new], sequence.selected[new])
        except PagesExhausted:
            return False
        wanted = [Offered(names[place], kind, self.pool.values(page)) for kind, place, page in pages]
        if not self._disk.fill(wanted):
            return False
        self.read_tokens += new.stop - new.start
        return True
