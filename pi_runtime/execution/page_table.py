"""Which pages hold the positions of one sequence: a table for each class of layers.

    position ──▶ place: position // 32 ──▶ page, by the table of the layer's class ──▶ row: layer in its class, position

Pages whose positions no later token sees leave a table while the sequence goes on.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.execution.pages import PAGE_POSITIONS, PagePool


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
        self.begin(run.first)
        for place, page in enumerate(run.pages, run.first):
            self._pool.share(page)
            self.put(place, page)

    def begin(self, first: int) -> None:
        """Let an empty table begin with this place."""
        assert not self.pages, self.pages
        self.first = first

    def leave(self, first: int) -> None:
        """Release the pages before a place."""
        while self.pages and self.first < first:
            self._pool.release(self.pages.pop(0))
            self.first += 1

    def cut(self, end: int) -> None:
        """Release the pages from a place on; a table that is emptied so begins anew."""
        while self.end > max(end, self.first):
            self._pool.release(self.pages.pop())
        if end == 0:
            self.first = 0


def all_pages(runs: Iterable[PageRun]) -> tuple[int, ...]:
    """The pages of some runs, one after the other."""
    return tuple(page for run in runs for page in run.pages)
