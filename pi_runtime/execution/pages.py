"""Pages of the key-value cache: taken from a pool under a budget, shared by reference, released.

Each class of layers has pages of its own size.

Caches and pools are also freed when they are garbage collected: in any thread, amid anything that this thread does.
A lock that such a finalizer waited for might be held by a thread that waits for one of this thread. So finalizers take
no lock: they append to a queue (`drop`), and whoever asks next works it off.

Shape letters: L layers, G key-value heads, S positions of a page, E head width, X numbers of a head.
"""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from math import gcd
from threading import RLock
from typing import Any

import numpy.typing as npt

from pi_runtime.artifact.buffers import CACHE_FORMATS, cache_format
from pi_runtime.artifact.footprint import POSITIONS
from pi_runtime.artifact.layer_classes import layer_classes
from pi_runtime.artifact.schema import Manifest
from pi_runtime.errors import DoesNotFitError, Setting

PAGE_POSITIONS = POSITIONS
"""Positions of a page: those that attention takes at once."""


class PagesExhausted(Exception):  # noqa: N818  a state of the pool, which a scheduler answers by making room
    """No page is left in the pool."""


class Allowance:
    """Bytes that the keys and values of all sequences may take together, whatever pools they are in."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._dropped: deque[int] = deque()
        self._lock = RLock()

    @property
    def left(self) -> int:
        """Bytes that nobody has taken."""
        with self._lock:
            return self._collected()

    def take(self, nbytes: int) -> None:
        """Take so many bytes of what is left. Raises DoesNotFitError where there are fewer."""
        with self._lock:
            if nbytes > (left := self._collected()):
                raise DoesNotFitError(
                    f"keys and values need {nbytes} bytes more",
                    expected=(f"at most {left} bytes, of those that ", Setting("ram_budget"), " leaves to them"),
                    remedy=("close other caches, or load it with a larger ", Setting("kv_budget")),
                )
            self._left -= nbytes

    def drop(self, nbytes: int) -> None:
        """Let others take so many bytes. A finalizer may call it."""
        self._dropped.append(nbytes)

    def _collected(self) -> int:
        while self._dropped:
            self._left += self._dropped.popleft()
        return self._left


class PagePool:
    """Pages of keys and values under a budget: taken, shared by reference, released.

    A page is one array, `buffers.kv_page`, for a class of layers. Its memory is allocated when it is first taken. When
    nobody refers to it any more it is kept for the next page of its class, or freed where another class needs memory.
    `budget` is in bytes; None sets no limit. Of an `allowance` a pool with a budget takes as much at once, and one
    without takes a page at a time. `beside`: bytes of the budget that go elsewhere with a page of each class.
    """

    _allowance: Allowance | None = None
    """A constructor that Ctrl-C ends leaves none."""
    _allowed = 0

    def __init__(
        self,
        manifest: Manifest,
        budget: int | None = None,
        wanted: str = "auto",
        allowance: Allowance | None = None,
        beside: int = 0,
    ) -> None:
        self._allowance, self._beside = allowance, beside
        self.format = cache_format(manifest.formats["attention"], wanted)
        self.classes = layer_classes(manifest.decoder, self.format)
        self._nbytes = [one.page.nbytes for one in self.classes]
        unit, both = gcd(*self._nbytes), self.page_nbytes + beside
        self.capacity = None if budget is None else budget * self.page_nbytes // both // unit * unit
        """Bytes of all pages that it may hold; None without limit."""
        if self.capacity is not None and self.capacity < self.page_nbytes:
            raise DoesNotFitError(
                f"no page of {PAGE_POSITIONS} positions fits it",
                setting=Setting("kv_budget", budget),
                expected=f"at least {both} bytes",
                remedy=(Setting("kv_budget", both), " or more"),
            )
        if self.capacity is not None:
            self._allow(self.capacity)
        self._arrays: list[npt.NDArray[Any] | None] = []
        self._kinds: list[int] = []
        """The class of each page."""
        self._references: list[int] = []
        self._unused: list[list[int]] = [[] for _ in self.classes]
        self._used = [0] * len(self.classes)
        self._freed: list[int] = []
        """Numbers of pages whose memory was freed."""
        self._dropped: deque[int] = deque()
        self._lock = RLock()

    def _allow(self, nbytes: int) -> None:
        if self._allowance is not None:
            self._allowance.take(nbytes)
            self._allowed += nbytes

    def __del__(self) -> None:
        if self._allowance is not None:
            self._allowance.drop(self._allowed)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page of each class: of 32 positions in all layers."""
        return sum(self._nbytes)

    def budget_for(self, nbytes: int) -> int:
        """The least budget of a pool whose pages may take so many bytes."""
        return -(-nbytes * (self.page_nbytes + self._beside) // self.page_nbytes)

    @property
    def kernel_format(self) -> tuple[int, int]:
        """The codes of the number formats of keys and values."""
        held = CACHE_FORMATS[self.format]
        return held.keys.code, held.values.code

    @property
    def in_use(self) -> int:
        """Pages that anybody refers to."""
        with self._lock:
            self._collect()
            return sum(self._used)

    @property
    def free(self) -> int:
        """Pages of each class that can still be taken, if as many are taken of all."""
        return self.free_nbytes // self.page_nbytes

    @property
    def in_use_nbytes(self) -> int:
        """Bytes of pages that anybody refers to."""
        with self._lock:
            self._collect()
            return self.nbytes_of(self._used)

    @property
    def free_nbytes(self) -> int:
        """Bytes of pages that can still be taken."""
        return (sys.maxsize if self.capacity is None else self.capacity) - self.in_use_nbytes

    def nbytes_of(self, counts: Sequence[int]) -> int:
        """Bytes of so many pages of each class."""
        return sum(count * nbytes for count, nbytes in zip(counts, self._nbytes, strict=True))

    def nbytes(self, pages: Iterable[int]) -> int:
        """Bytes of these pages."""
        return sum(self._nbytes[self._kinds[page]] for page in pages)

    def take(self, *counts: int) -> list[int]:
        """So many pages of each class, one class after another, each with one reference and what it held before.

        Raises PagesExhausted, and takes none, where there are fewer; DoesNotFitError where the allowance is used up.
        """
        with self._lock:
            if self.free_nbytes < self.nbytes_of(counts):
                raise PagesExhausted
            self._allocate(counts)
            taken = [unused.pop() for unused, count in zip(self._unused, counts, strict=True) for _ in range(count)]
            for page in taken:
                self._references[page] = 1
                self._used[self._kinds[page]] += 1
            return taken

    def _allocate(self, counts: Sequence[int]) -> None:
        """Allocate what is missing of so many unused pages of each class, or nothing."""
        missing = [max(0, count - len(unused)) for count, unused in zip(counts, self._unused, strict=True)]
        nbytes = self.nbytes_of(missing)
        self._free_unused(counts, nbytes)
        allowed = nbytes if self.capacity is None else 0
        self._allow(allowed)
        kinds = [kind for kind, count in enumerate(missing) for _ in range(count)]
        try:
            arrays = [self.classes[kind].page.in_ram() for kind in kinds]
        except MemoryError:
            self._allow(-allowed)
            raise
        for kind, array in zip(kinds, arrays, strict=True):
            if not self._freed:
                self._freed.append(len(self._arrays))
                self._arrays.append(None)
                self._kinds.append(kind)
                self._references.append(0)
            page = self._freed.pop()
            self._arrays[page], self._kinds[page] = array, kind
            self._unused[kind].append(page)

    def _free_unused(self, counts: Sequence[int], nbytes: int) -> None:
        """Free so many bytes of unused pages, as far as there are more than so many of a class."""
        for kind, count in enumerate(counts):
            while nbytes > 0 and len(self._unused[kind]) > count:
                page = self._unused[kind].pop()
                self._arrays[page] = None
                self._freed.append(page)
                nbytes -= self._nbytes[kind]
                if self.capacity is None:
                    self._allow(-self._nbytes[kind])

    def share(self, page: int) -> None:
        """Count one reference more."""
        with self._lock:
            assert self._references[page] > 0, page
            self._references[page] += 1

    def release(self, page: int) -> None:
        """Count one reference less; a page without any can be taken again."""
        with self._lock:
            self._release(page)

    def drop(self, page: int) -> None:
        """Count one reference less, soon. A finalizer may call it."""
        self._dropped.append(page)

    def references(self, page: int) -> int:
        """How many refer to a page."""
        with self._lock:
            self._collect()
            return self._references[page]

    def _release(self, page: int) -> None:
        assert self._references[page] > 0, page
        self._references[page] -= 1
        if self._references[page] == 0:
            self._unused[self._kinds[page]].append(page)
            self._used[self._kinds[page]] -= 1

    def _collect(self) -> None:
        """Count what finalizers dropped."""
        while self._dropped:
            self._release(self._dropped.popleft())

    def values(self, page: int) -> npt.NDArray[Any]:
        """What a page holds (see `buffers.kv_page`)."""
        found = self._arrays[page]
        assert found is not None, page
        return found

    def address(self, page: int) -> int:
        """Where a page lies, for compiled kernels."""
        return int(self.values(page).ctypes.data)


def by_position(layer_2GSE: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Views (G, S, E) of the keys and values that a page in float32 or float16 holds of a layer."""
    keys, values = layer_2GSE
    groups, positions, width = values.shape
    return keys.reshape(groups, width, positions).swapaxes(1, 2), values
