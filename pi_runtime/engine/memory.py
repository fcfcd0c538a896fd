"""Pages of the live sequences, and of what may be needed again, under one budget."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from pi_runtime.artifact.layer_classes import sequence_nbytes
from pi_runtime.engine.prefix_tree import PrefixTree
from pi_runtime.errors import Setting, UsageError
from pi_runtime.execution.executor import Executor
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PAGE_POSITIONS, PagesExhausted


class EngineMemory:
    """Gives caches to sequences. What nobody else needs is dropped for them, least recently used first.

    `selection_matters`: whether a token has other keys and values where it was computed with selection.
    """

    def __init__(self, executor: Executor, budget: int, *, selection_matters: bool) -> None:
        self._executor = executor
        self.pool = executor.new_pool(budget)
        self._tree = PrefixTree(self.pool, selection_matters=selection_matters)

    @property
    def kept(self) -> int:
        """How many pages are kept because they may be needed again."""
        return self._tree.size

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

    def open(
        self, tokens: Sequence[int], selected: Sequence[bool], reusable: int, live: Iterable[KVCache], salt: str
    ) -> KVCache | None:
        """A cache with pages for these tokens, which begins with the longest stored prefix of the first `reusable`.

        None where the live caches leave too few pages.
        """
        taken = {page for cache in live for page in cache.held_pages}
        for _ in range(2):
            stored, cache = self._tree.longest(tokens[:reusable], selected[:reusable], salt), self.new_cache(salt)
            cache.adopt(stored.runs, tokens[: stored.length], selected[: stored.length])
            count, left = len(tokens) - stored.length, self.pool.nbytes(taken.union(cache.held_pages))
            assert self.pool.capacity is not None
            if left + cache.lacking_nbytes(count, self._executor.block_tokens) <= self.pool.capacity:
                try:
                    fits = self.grow(cache, count)
                except BaseException:
                    cache.close()  # the error's traceback refers to it as long as anybody has the error
                    raise
                assert fits
                return cache
            cache.close()
            # The last page is copied if it is used in part: where there is no page for the copy, whole pages alone do.
            reusable = stored.length // PAGE_POSITIONS * PAGE_POSITIONS
        return None

    def new_cache(self, salt: str) -> KVCache:
        """An empty cache in the pages of this engine."""
        cache = self._executor.new_cache(self.pool)
        cache.salt = salt
        return cache

    def grow(self, cache: KVCache, count: int) -> bool:
        """Give a cache pages for so many further positions; False where the live caches leave too few."""
        step = self._executor.block_tokens
        try:
            cache.reserve(count, step)
        except PagesExhausted:
            self._tree.evict(cache.lacking_nbytes(count, step))
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

    def catch_up(self, cache: KVCache, tokens: Sequence[int], selected: Sequence[bool], reusable: int) -> None:
        """Let a cache with pages for these tokens go on from full pages that others have computed meanwhile."""
        stored = self._tree.longest(tokens[:reusable], selected[:reusable], cache.salt)
        if (whole := stored.length // PAGE_POSITIONS * PAGE_POSITIONS) > cache.length:
            stored = self._tree.longest(tokens[:whole], selected[:whole], cache.salt)
        if min(whole, stored.length) > cache.length:
            cache.close()
            cache.adopt(stored.runs, tokens[: stored.length], selected[: stored.length])
            # Of layers with a window it may need more pages now: where there are too few, the next step makes room.
            self.grow(cache, len(tokens) - cache.length)

    def share(self, cache: KVCache) -> None:
        """Let later sequences begin with the full pages of a cache, which goes on with the last one."""
        full = cache.fork()
        full.truncate(cache.length // PAGE_POSITIONS * PAGE_POSITIONS)
        self.keep(full)

    def keep(self, cache: KVCache) -> None:
        """Close a cache; what it held can be used again until its memory is needed."""
        self._tree.insert(cache)
        cache.close()

    def close(self) -> None:
        """Release what is kept."""
        self._tree.clear()
