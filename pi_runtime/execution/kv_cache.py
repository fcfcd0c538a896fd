"""The key-value cache of one sequence: keys and values of the positions so far, in pages that may be shared.

A table for each class of layers says which pages hold them:

    position ──▶ place: position // 32 ──▶ page, by the table of the layer's class ──▶ row: layer in its class, position

Pages whose positions no later token sees leave a table while the sequence goes on.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.footprint import KEPT
from pi_runtime.execution.pages import PAGE_POSITIONS, PagePool

Ints = npt.NDArray[np.int64]


class PageRun(NamedTuple):
    """Pages of one class of layers for consecutive places of a sequence."""

    first: int
    """The place of the first one."""
    pages: tuple[int, ...]

    def at(self, place: int) -> int | None:
        """The page of a place; None where it has none."""
        return self.pages[place - self.first] if 0 <= place - self.first < len(self.pages) else None


class PageTable:
    """The pages of one class of layers. Each counts as one reference.

    `addresses`: where compiled kernels find the address of the page of each place.
    """

    def __init__(self, pool: PagePool, kind: int, addresses: npt.NDArray[np.int64]) -> None:
        self._pool, self._addresses = pool, addresses
        self.of = pool.classes[kind]
        """The class."""
        self.first = 0
        """The place of its first page; those before it are not needed any more."""
        self.pages: list[int] = []

    @property
    def end(self) -> int:
        """The place behind its last page."""
        return self.first + len(self.pages)

    def run(self, end: int) -> PageRun:
        """Its pages before a place."""
        return PageRun(self.first, tuple(self.pages[: end - self.first]))

    def lacking(self, length: int, end: int) -> list[int]:
        """The places before `end` where a sequence that goes on after `length` positions has no page of its own."""
        begun = max(length // PAGE_POSITIONS, self.first)
        own = range(begun, min(end, self.end))
        shared = [place for place in own if self._pool.references(self.pages[place - self.first]) > 1]
        return [*shared, *range(self.end, end)]

    def holds(self, length: int) -> bool:
        """Whether a sequence can go on from its first `length` positions: what is seen there is still held."""
        return self.first <= self.of.first_page(length)

    def between(self, first: int, end: int) -> list[tuple[int, int]]:
        """Its places from one on that a sequence needs which goes on before place `end`, and their pages."""
        return [(place, self.pages[place - self.first]) for place in range(max(self.first, first), end)]

    def put(self, place: int, page: int) -> None:
        """Let this be the page of the next place; or of an earlier one, whose page is copied into it."""
        if place < self.end:
            shared = self.pages[place - self.first]
            self._pool.values(page)[:] = self._pool.values(shared)
            self._pool.release(shared)
        self.pages[place - self.first : place - self.first + 1] = [page]
        self._addresses[place] = self._pool.address(page)

    def share(self, run: PageRun) -> None:
        """Begin an empty table with pages of others."""
        assert not self.pages, self.pages
        self.first = run.first
        for place, page in enumerate(run.pages, run.first):
            self._pool.share(page)
            self.put(place, page)

    def leave(self, first: int) -> None:
        """Release the pages before a place; one without pages then begins there."""
        while self.pages and self.first < first:
            self._pool.release(self.pages.pop(0))
            self.first += 1
        if not self.pages:
            self.first = max(self.first, first)

    def cut(self, end: int) -> None:
        """Release the pages from a place on; a table that is emptied so begins anew."""
        while self.end > max(end, self.first):
            self._pool.release(self.pages.pop())
        if end == 0:
            self.first = 0


class StateTable(PageTable):
    """The page of a sequence's states, which moves on with it. It is found at the address of place 0.

    In each layer's part of it stands after which position its states are; and whether the tokens of the next step may
    be taken back, so that they are to stay there.
    """

    @property
    def _words(self) -> npt.NDArray[np.int64]:
        """For each layer the position, and whether tokens may be taken back."""
        return self._pool.values(self.pages[0])[:, :4].view(np.int64)

    def hold(self, *, is_held: bool) -> None:
        """Say whether the tokens of the next step may be taken back."""
        self._words[:, 1] = is_held

    def run(self, end: int) -> PageRun:
        """Its page, where there is one, at the place before `end`."""
        return PageRun(max(0, end - 1), tuple(self.pages[:end]))

    def lacking(self, length: int, end: int) -> list[int]:  # noqa: ARG002  its page is one, whatever the length
        """Place 0, where a sequence that goes on has no page of its own."""
        return [] if self.pages and self._pool.references(self.pages[0]) == 1 else [0]

    def holds(self, length: int) -> bool:
        """Whether there are states of the first `length` positions, or of so few less that they are found again."""
        if not self.pages or length == 0:
            return length == 0
        positions = self._words[:, 0]
        return bool(length - KEPT <= positions.min() and positions.max() <= length)

    def between(self, first: int, end: int) -> list[tuple[int, int]]:  # noqa: ARG002
        """The place before `end`, and its page."""
        return [(end - 1, self.pages[0])]

    def put(self, place: int, page: int) -> None:  # noqa: ARG002
        """Let this be its page, with the states that it has, or those before any token."""
        values = self._pool.values(page)
        values[:] = self._pool.values(self.pages[0]) if self.pages else 0
        self.cut(0)
        self.pages, self._addresses[0] = [page], self._pool.address(page)

    def share(self, run: PageRun) -> None:
        """Begin an empty table with the page of others."""
        for page in run.pages:
            self._pool.share(page)
            self.pages, self._addresses[0] = [page], self._pool.address(page)

    def leave(self, first: int) -> None:
        """Keep the page, which moves on."""

    def cut(self, end: int) -> None:
        """Release the page where no place is left; else states are those of the length that is left (see `holds`)."""
        if end == 0:
            while self.pages:
                self._pool.release(self.pages.pop())


def all_pages(runs: Iterable[PageRun]) -> tuple[int, ...]:
    """The pages of some runs, one after the other."""
    return tuple(page for run in runs for page in run.pages)


class KVCache:
    """Keys and values for one sequence of at most `context` positions, in pages of a pool.

    Pages may be shared with other caches, and are then only read: `reserve` copies a shared page before it is written.
    Of layers with a window it keeps the pages that the next token sees, and `ROLL_BACK` positions before.
    """

    tables: tuple[PageTable, ...] = ()
    """Its pages, by the classes of layers. A constructor that Ctrl-C ends leaves none."""

    def __init__(self, pool: PagePool, context: int) -> None:
        self.pool, self.context = pool, context
        self.salt = ""
        """Its pages are shared only with caches that have the same."""
        self._tokens: list[int] = []
        self._selected: list[bool] = []
        self.kept: KVCache | None = None
        """What its caller may come back to: a fork of it, of an earlier time."""
        self._addresses = np.zeros((pages_of(context), len(pool.classes)), np.int64)
        self.table_address = int(self._addresses.ctypes.data)
        """Where the addresses of the pages lie, for compiled kernels."""
        self.tables = tuple(
            (StateTable if of.is_state else PageTable)(pool, kind, self._addresses[:, kind])
            for kind, of in enumerate(pool.classes)
        )
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
    def runs(self) -> tuple[PageRun, ...]:
        """The pages of the positions held, by classes, whose last one may be used in part."""
        if self.write_back is not None:
            self.write_back()
        return tuple(table.run(pages_of(self.length)) for table in self.tables)

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages of `runs`, one class after the other."""
        return all_pages(self.runs)

    @property
    def held_pages(self) -> tuple[int, ...]:
        """Every page it refers to: those of the positions held, and those reserved behind them."""
        return tuple(page for table in self.tables for page in table.pages)

    def page_values(self) -> list[npt.NDArray[Any]]:
        """What the pages of the positions held hold in RAM, for a model with one class of layers."""
        (table,) = self.tables
        return [self.pool.values(page) for page in table.run(pages_of(self.length)).pages]

    def holds(self, length: int) -> bool:
        """Whether it can go on from its first `length` positions: layers with a window still have what is seen, and
        those with a recurrence the states."""
        return all(table.holds(length) for table in self.tables)

    def hold(self, *, is_held: bool) -> None:
        """Say whether the tokens of the next step may be taken back."""
        for table in self.tables:
            if isinstance(table, StateTable):
                table.hold(is_held=is_held)

    def reserve(self, count: int, step: int | None = None) -> None:
        """See to it that the next `count` positions have pages, and that these are this sequence's own.

        Layers with a window get pages for the next `step` positions, if that is less. Pages that are not needed any
        more are released. Raises PagesExhausted, and takes none, where the pool has too few.
        """
        assert count <= self.room, (count, self.room)
        for table in self.tables:
            table.leave(table.of.kept_from(self.length))
        lacking = self._lacking(count, step)
        taken = iter(self.pool.take(*map(len, lacking)))
        for table, places in zip(self.tables, lacking, strict=True):
            for place, page in zip(places, taken, strict=False):
                table.put(place, page)

    def lacking_nbytes(self, count: int, step: int) -> int:
        """Bytes of the pages that `reserve` takes."""
        return self.pool.nbytes_of([len(places) for places in self._lacking(count, step)])

    def _lacking(self, count: int, step: int | None) -> list[list[int]]:
        """For each class the places that get a page."""
        soon = count if step is None else min(count, step)
        ends = [pages_of(self.length + (soon if table.of.window else count)) for table in self.tables]
        return [table.lacking(self.length, end) for table, end in zip(self.tables, ends, strict=True)]

    def append(self, tokens: Ints, select: bool) -> None:
        """Count these tokens as held, whose keys and values have been written."""
        self._tokens += tokens.tolist()
        self._selected += [select] * len(tokens)

    def skip(self, tokens: Sequence[int], selected: Sequence[bool]) -> list[tuple[int, int, int]]:
        """Count further tokens as held, up to the end of a page, from one on; returns the pages that are to be filled.

        Each is (class, place, page), and is this sequence's own: those that the positions behind the tokens need.
        Raises PagesExhausted where the pool has too few; layers with a window may then have lost theirs.
        """
        first, end = self.length, self.length + len(tokens)
        assert first % PAGE_POSITIONS == end % PAGE_POSITIONS == 0, (first, end)
        for table in self.tables:
            table.leave(table.of.first_page(end))
        self.reserve(len(tokens))
        self._tokens += tokens
        self._selected += selected
        return [
            (kind, place, page)
            for kind, table in enumerate(self.tables)
            for place, page in table.between(first // PAGE_POSITIONS, end // PAGE_POSITIONS)
        ]

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` positions; there may be fewer already. Pages past the end are released.

        Where a window's pages are gone that a token there sees, or the states of so many, nothing is left.
        """
        length = min(length, self.length)
        length = length if self.holds(length) else 0
        del self._tokens[length:], self._selected[length:]
        for table in self.tables:
            table.cut(pages_of(length))

    def keep_common_prefix(self, tokens: Sequence[int]) -> int:
        """Drop what is not a common prefix with `tokens`; returns how many of these are still held, never all.

        The last token always runs again, because its logits are needed.
        """
        self.truncate(common_length(self._tokens, tokens[:-1]))
        return self.length

    def adopt(self, runs: Sequence[PageRun], tokens: Sequence[int], selected: Sequence[bool]) -> None:
        """Begin an empty cache with pages of others, which hold these tokens; the last may be used in part."""
        assert self.length == 0, self.length
        assert len(tokens) == len(selected) <= self.context
        self.close()
        for table, run in zip(self.tables, runs, strict=True):
            table.share(run)
        self._tokens, self._selected = list(tokens), list(selected)
        assert self.holds(self.length)

    def fork(self) -> "KVCache":
        """A cache of the same positions, which shares every page."""
        found = KVCache(self.pool, self.context)
        found.salt = self.salt
        found.adopt(self.runs, self._tokens, self._selected)
        return found

    def close(self) -> None:
        """Release every page; the cache is then empty."""
        self.write_back = self.kept = None
        self.truncate(0)

    def __del__(self) -> None:
        for table in self.tables:
            while table.pages:
                self.pool.drop(table.pages.pop())


def pages_of(positions: int) -> int:
    """Pages that so many positions take."""
    return -(-positions // PAGE_POSITIONS)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
