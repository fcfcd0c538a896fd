"""Pages of the key-value cache: taken from a pool under a budget, shared by reference, released.

Shape letters: G key-value heads, S positions of a page, E head width.
"""

import sys
from math import prod
from threading import RLock
from typing import Any

import numpy.typing as npt

from pi_runtime.artifact.buffers import cache_format, kv_page
from pi_runtime.artifact.footprint import POSITIONS
from pi_runtime.artifact.schema import Manifest
from pi_runtime.errors import DoesNotFitError

PAGE_POSITIONS = POSITIONS
"""Positions of a page: those that attention takes at once."""


class PagesExhausted(Exception):  # noqa: N818  a state of the pool, which a scheduler answers by making room
    """No page is left in the pool."""


class Allowance:
    """Bytes that the keys and values of all sequences may take together, whatever pools they are in."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        # Pools are also freed when they are garbage collected, which may happen in any thread.
        self._lock = RLock()

    def take(self, nbytes: int) -> None:
        """Take so many bytes of what is left. Raises DoesNotFitError where there are fewer."""
        with self._lock:
            if nbytes > self.left:
                raise DoesNotFitError(
                    f"keys and values need {nbytes} bytes more",
                    expected=f"at most {self.left} bytes, of those that --ram-budget leaves to them",
                    remedy="close other caches, or load it with a larger --kv-budget",
                )
            self.left -= nbytes

    def give_back(self, nbytes: int) -> None:
        """Let others take so many bytes."""
        with self._lock:
            self.left += nbytes


class PagePool:
    """Pages of keys and values under a budget: taken, shared by reference, released.

    A page is one array, `buffers.kv_page`. Its memory is allocated when it is first taken, and kept for the next one
    when nobody refers to it any more. `budget` is in bytes; None sets no limit. Of an `allowance` a pool with a budget
    takes as much at once, and one without takes a page at a time.
    """

    def __init__(
        self,
        manifest: Manifest,
        budget: int | None = None,
        wanted: str = "auto",
        allowance: Allowance | None = None,
    ) -> None:
        self._allowance, self._allowed = allowance, 0
        self.format = cache_format(manifest.formats["attention"], wanted)
        self.page = kv_page(manifest.decoder, self.format)
        self.capacity = None if budget is None else budget // self.page_nbytes
        if self.capacity == 0:
            raise DoesNotFitError(
                f"--kv-budget {budget}: no page of {PAGE_POSITIONS} positions fits it",
                expected=f"at least {self.page_nbytes} bytes",
                remedy=f"--kv-budget {self.page_nbytes}B or more",
            )
        if self.capacity is not None:
            self._allow(self.capacity * self.page_nbytes)
        self._arrays: list[npt.NDArray[Any]] = []
        self._references: list[int] = []
        self._unused: list[int] = []
        # Caches are also closed when they are garbage collected, which may happen in any thread.
        self._lock = RLock()

    def _allow(self, nbytes: int) -> None:
        if self._allowance is not None:
            self._allowance.take(nbytes)
            self._allowed += nbytes

    def __del__(self) -> None:
        if self._allowance is not None:
            self._allowance.give_back(self._allowed)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""
        return self.page.nbytes

    @property
    def row_nbytes(self) -> int:
        """Bytes of a head's keys, or values, at one position."""
        return self.page.nbytes // prod(self.page.shape[:-1])

    @property
    def in_use(self) -> int:
        """Pages that anybody refers to."""
        return len(self._arrays) - len(self._unused)

    @property
    def free(self) -> int:
        """Pages that can still be taken."""
        return (sys.maxsize if self.capacity is None else self.capacity) - self.in_use

    def take(self, count: int = 1) -> list[int]:
        """So many pages, each with one reference and what it held before.

        Raises PagesExhausted, and takes none, where there are fewer; DoesNotFitError where the allowance is used up.
        """
        with self._lock:
            if self.free < count:
                raise PagesExhausted
            if self.capacity is None:
                self._allow(max(0, count - len(self._unused)) * self.page_nbytes)
            while len(self._unused) < count:
                self._unused.append(len(self._arrays))
                self._arrays.append(self.page.in_ram())
                self._references.append(0)
            taken = [self._unused.pop() for _ in range(count)]
            for page in taken:
                self._references[page] = 1
            return taken

    def share(self, page: int) -> None:
        """Count one reference more."""
        with self._lock:
            assert self._references[page] > 0, page
            self._references[page] += 1

    def release(self, page: int) -> None:
        """Count one reference less; a page without any can be taken again."""
        with self._lock:
            assert self._references[page] > 0, page
            self._references[page] -= 1
            if self._references[page] == 0:
                self._unused.append(page)

    def references(self, page: int) -> int:
        """How many refer to a page."""
        return self._references[page]

    def values(self, page: int) -> npt.NDArray[Any]:
        """What a page holds (see `buffers.kv_page`)."""
        return self._arrays[page]

    def address(self, page: int) -> int:
        """Where a page lies, for compiled kernels."""
        return int(self._arrays[page].ctypes.data)


def by_position(layer_2GSE: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Views (G, S, E) of the keys and values that a page in float32 or float16 holds of a layer."""
    keys, values = layer_2GSE
    groups, positions, width = values.shape
    return keys.reshape(groups, width, positions).swapaxes(1, 2), values
