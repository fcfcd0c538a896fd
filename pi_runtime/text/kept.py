"""Values that took long to make, kept for those who ask again: the latest ones, of so many bytes at most."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """Keeps values by keys. Threads may use it at once; two that miss the same value both make it.

    >>> kept = Kept[str, int](bytes_most=10)
    >>> [kept.get(key, 6, lambda: n) for n, key in enumerate("aaba")]
    [0, 0, 2, 3]
    """

    def __init__(self, bytes_most: int) -> None:
        self._most, self._nbytes = bytes_most, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, nbytes: int, make: Callable[[], V]) -> V:
        """The value of a key, made if it is not kept. `nbytes`: what it takes. The latest is kept in any case."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value, nbytes
                self._nbytes += nbytes
            while self._nbytes > self._most and len(self._values) > 1:
                self._nbytes -= self._values.popitem(last=False)[1][1]
        return value

    def drop(self, key: K) -> int:
        """Forget the value of a key; returns what it took, 0 if it is not kept."""
        with self._lock:
            _, nbytes = self._values.pop(key, (None, 0))
            self._nbytes -= nbytes
            return nbytes
