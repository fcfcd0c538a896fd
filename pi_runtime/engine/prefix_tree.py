"""What was computed and may be needed again: pages by the tokens before them and how these were computed.

A node is a page. The path to it spells the positions so far, each a token with whether it was computed with selection:
keys and values depend on all of these. Only a full page has children. A page that is used in part is dropped once
another holds the same positions and more. Each salt has a root of its own: nothing tells what another's pages hold.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PAGE_POSITIONS, PagePool

Key = tuple[int, ...]
"""The positions of a page, each as one number: twice the token, plus one where it was computed with selection."""


class Prefix(NamedTuple):
    """A stored prefix. Nobody holds its pages but the tree: take references to them before anything is evicted."""

    pages: tuple[int, ...]
    """The last one may be used in part."""
    length: int


@dataclass(eq=False)
class _Node:
    key: Key
    page: int
    parent: Optional["_Node"]
    children: dict[Key, "_Node"] = field(default_factory=dict)
    salt: str = ""
    """Separates the trees of those who share nothing; a root has it."""


class PrefixTree:
    """Pages of positions that were computed, found by the longest prefix, and dropped least recently used first.

    `selection_matters`: whether a token has other keys and values where it was computed with selection.
    """

    def __init__(self, pool: PagePool, *, selection_matters: bool = True) -> None:
        self._pool, self._selection_matters = pool, selection_matters
        self._roots: dict[str, _Node] = {}
        """By their salts; each has children."""
        # Least recently used first, and a page always before the one that it follows.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages it holds, least recently used first."""
        return tuple(node.page for node in self._nodes)

    @property
    def size(self) -> int:
        """How many pages it holds. Any thread may ask."""
        return len(self._nodes)

    def longest(self, tokens: Sequence[int], selected: Sequence[bool], salt: str = "") -> Prefix:
        """The longest prefix of these tokens that is stored, computed as `selected` says; marks it as used now."""
        root = self._roots.get(salt)
        if root is None:
            return Prefix((), 0)
        path, rest = _walk(root, self._keys(tokens, selected))
        length = PAGE_POSITIONS * len(path)
        closest, common = _closest(path[-1] if path else root, rest)
        if closest is not None:
            path.append(closest)
        self._touch(path)
        return Prefix(tuple(node.page for node in path), length + common)

    def insert(self, cache: KVCache) -> None:
        """Share the pages of a cache, as far as their positions are not held yet; marks all of them as used now."""
        assert cache.pool is self._pool
        pages, keys = cache.pages, self._keys(cache.tokens, cache.selected)
        if not pages:
            return
        root = self._roots.setdefault(cache.salt, _Node((), -1, None, salt=cache.salt))
        path, _ = _walk(root, keys)
        for n in range(len(path), len(pages)):
            path.append(self._add(path[-1] if path else root, keys[n], pages[n]))
        self._touch(path)

    def evict(self, pages: int) -> int:
        """Drop pages, least recently used first, until so many are free in the pool; returns how many were freed.

        Afterwards there are fewer free pages than asked for only where live caches hold all others.
        """
        before = self._pool.free
        for node in tuple(self._nodes):
            if self._pool.free >= pages:
                break
            if not node.children and self._keeps_a_page(node):
                self._drop(node)
        return self._pool.free - before

    def clear(self) -> None:
        """Drop everything."""
        for node in tuple(self._nodes):
            self._drop(node)

    def _keys(self, tokens: Sequence[int], selected: Sequence[bool]) -> list[Key]:
        """The positions of a sequence as the tree's keys, one for each page."""
        pairs = zip(tokens, selected, strict=True)
        both = [2 * token + (select and self._selection_matters) for token, select in pairs]
        return [tuple(both[first : first + PAGE_POSITIONS]) for first in range(0, len(both), PAGE_POSITIONS)]

    def _add(self, parent: _Node, key: Key, page: int) -> _Node:
        """Add a page below a node, in place of children that hold less of it; returns the child that holds it."""
        closest, common = _closest(parent, key)
        if closest is not None and common == len(key):
            return closest
        self._pool.share(page)
        found = parent.children[key] = _Node(key, page, parent)
        self._nodes[found] = None
        for size in range(1, len(key)):
            if (shorter := parent.children.get(key[:size])) is not None:
                self._drop(shorter)
        return found

    def _keeps_a_page(self, leaf: _Node) -> bool:
        """Whether dropping a leaf, and then the nodes above it, frees a page: one that only the tree holds."""
        node = leaf
        while node.parent is not None:
            if self._pool.references(node.page) == 1:
                return True
            node = node.parent
        return False

    def _drop(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key], self._nodes[node]
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._pool.release(node.page)

    def _touch(self, path: Iterable[_Node]) -> None:
        """Mark a path as used now."""
        for node in reversed(list(path)):
            self._nodes.move_to_end(node)


def _walk(root: _Node, keys: Sequence[Key]) -> tuple[list[_Node], Key]:
    """The nodes of the first full pages, as far as they are held, and the positions of the page that follows."""
    path: list[_Node] = []
    node = root
    for key in keys:
        found = node.children.get(key)
        if found is None or len(key) < PAGE_POSITIONS:
            return path, key
        path.append(node := found)
    return path, ()


def _closest(node: _Node, key: Key) -> tuple[_Node | None, int]:
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
