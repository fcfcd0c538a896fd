"""The key-value cache of one sequence: keys and values of the positions so far, in pages that may be shared."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_runtime.execution.pages import PAGE_POSITIONS, PagePool

Ints = npt.NDArray[np.int64]


class KVCache:
    """Keys and values for one sequence of at most `context` positions, in pages of a pool.

    Pages may be shared with other caches, and are then only read: `reserve` copies a shared page before it is written.
    """

    def __init__(self, pool: PagePool, context: int) -> None:
        self.pool, self.context = pool, context
        self.salt = ""
        """Its pages are shared only with caches that have the same."""
        self._tokens: list[int] = []
        self._selected: list[bool] = []
        self._pages: list[int] = []
        self._table = np.zeros(pages_of(context), np.int64)
        self.table_address = int(self._table.ctypes.data)
        """Where the addresses of the pages lie, for compiled kernels."""
        self.write_back: Callable[[], None] | None = None
        """Set by an executor that keeps what is newest elsewhere: writes it into the pages, before others see them."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens whose keys and values are held, in order."""
        return tuple(self._tokens)

    @property
    def selected(self) -> tuple[bool, ...]:
        """For each token whether it was computed with selection; else every neuron was."""
        return tuple(self._selected)

    @property
    def length(self) -> int:
        """Number of positions held."""
        return len(self._tokens)

    @property
    def room(self) -> int:
        """Positions left."""
        return self.context - len(self._tokens)

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages of the positions held, whose last one may be used in part."""
        if self.write_back is not None:
            self.write_back()
        return tuple(self._pages[: pages_of(self.length)])

    @property
    def held_pages(self) -> tuple[int, ...]:
        """Every page it refers to: those of the positions held, and those reserved behind them."""
        return tuple(self._pages)

    def page_values(self) -> list[npt.NDArray[Any]]:
        """What the pages of the positions held hold in RAM."""
        return [self.pool.values(page) for page in self._pages[: pages_of(self.length)]]

    def reserve(self, count: int) -> None:
        """See to it that the next `count` positions have pages, and that these are this sequence's own.

        Raises PagesExhausted, and changes nothing, where the pool has too few.
        """
        assert count <= self.room, (count, self.room)
        held, begun, end = len(self._pages), self.length // PAGE_POSITIONS, pages_of(self.length + count)
        shared = [n for n in range(begun, min(end, held)) if self.pool.references(self._pages[n]) > 1]
        places = [*shared, *range(held, end)]
        taken = self.pool.take(len(places))
        for n, page in zip(shared, taken, strict=False):
            self.pool.values(page)[:] = self.pool.values(self._pages[n])
            self.pool.release(self._pages[n])
        for n, page in zip(places, taken, strict=True):
            self._set(n, page)

    def append(self, tokens: Ints, select: bool) -> None:
        """Count these tokens as held, whose keys and values have been written."""
        self._tokens += tokens.tolist()
        self._selected += [select] * len(tokens)

    def count_held(self, tokens: Sequence[int], selected: Sequence[bool]) -> None:
        """Count these tokens as held, whose keys and values have been put into the pages reserved for them."""
        assert len(tokens) == len(selected) <= self.room
        assert pages_of(self.length + len(tokens)) <= len(self._pages)
        self._tokens += tokens
        self._selected += selected

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` positions; there may be fewer already. Pages past the end are released."""
        del self._tokens[length:], self._selected[length:]
        while len(self._pages) > pages_of(self.length):
            self.pool.release(self._pages.pop())

    def keep_common_prefix(self, tokens: Sequence[int]) -> int:
        """Drop what is not a common prefix with `tokens`; returns how many of these are still held, never all.

        The last token always runs again, because its logits are needed.
        """
        same = common_length(self._tokens, tokens[:-1])
        self.truncate(same)
        return same

    def adopt(self, pages: Sequence[int], tokens: Sequence[int], selected: Sequence[bool]) -> None:
        """Begin an empty cache with pages of others, which hold these tokens; the last may be used in part."""
        assert self.length == 0, self.length
        assert len(tokens) == len(selected) <= self.context
        assert len(pages) == pages_of(len(tokens))
        self.close()
        for n, page in enumerate(pages):
            self.pool.share(page)
            self._set(n, page)
        self._tokens, self._selected = list(tokens), list(selected)

    def fork(self) -> "KVCache":
        """A cache of the same positions, which shares every page."""
        found = KVCache(self.pool, self.context)
        found.salt = self.salt
        found.adopt(self.pages, self._tokens, self._selected)
        return found

    def close(self) -> None:
        """Release every page; the cache is then empty."""
        self.write_back = None
        self.truncate(0)

    def __del__(self) -> None:
        while self._pages:
            self.pool.drop(self._pages.pop())

    def _set(self, n: int, page: int) -> None:
        """Let the n-th page, or a further one, be this one."""
        self._pages[n : n + 1] = [page]
        self._table[n] = self.pool.address(page)


def pages_of(positions: int) -> int:
    """Pages that so many positions take."""
    return -(-positions // PAGE_POSITIONS)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
