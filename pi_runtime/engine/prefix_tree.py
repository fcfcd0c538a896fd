"""What was computed and may be needed again: pages by the tokens before them and how these were computed.

A node is a place of 32 positions, with a page of each class of layers. The path to it spells the positions so far, each
a token with whether it was computed with selection: keys and values depend on all of these. Only a full page has
children. A page that is used in part is dropped once another holds the same positions and more. Each salt has a root of
its own: nothing tells what another's pages hold.

Layers with a window need their pages only where a sequence goes on. So a node may lack theirs, and a prefix is offered
where every class has what its window sees from there.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from pi_runtime.execution.kv_cache import KVCache, pages_of
from pi_runtime.execution.page_table import PageRun, all_pages
from pi_runtime.execution.pages import PAGE_POSITIONS, PagePool

Key = tuple[int, ...]
"""The positions of a page, each as one number: twice the token, plus one where it was computed with selection."""


class Prefix(NamedTuple):
    """A stored prefix. Nobody holds its pages but the tree: take references to them before anything is evicted."""

    runs: tuple[PageRun, ...]
    """By classes; the last page of each may be used in part."""
    length: int

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages of all classes."""
        return all_pages(self.runs)


@dataclass(eq=False)
class _Node:
    key: Key
    pages: list[int | None]
    """One of each class; None where the tree has none."""
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
        # Pages by their nodes and classes. Least recently used first, and a page always before the one that it follows.
        self._held: OrderedDict[tuple[_Node, int], None] = OrderedDict()

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages it holds, least recently used first."""
        return tuple(page for node, kind in self._held if (page := node.pages[kind]) is not None)

    @property
    def size(self) -> int:
        """How many pages it holds. Any thread may ask."""
        return len(self._held)

    def longest(self, tokens: Sequence[int], selected: Sequence[bool], salt: str = "") -> Prefix:
        """The longest prefix of these tokens that is stored, computed as `selected` says; marks it as used now."""
        root = self._roots.get(salt, _Node((), [], None))
        path, rest = _walk(root, self._keys(tokens, selected))
        length = PAGE_POSITIONS * len(path)
        closest, common = _closest(path[-1] if path else root, rest)
        if closest is not None:
            path.append(closest)
        length = self._offered(path, length + common)
        self._touch(path, length)
        return Prefix(tuple(self._run(path, kind, length) for kind in range(len(self._pool.classes))), length)

    def insert(self, cache: KVCache) -> None:
        """Share the pages of a cache, as far as their positions are not held yet; marks all of them as used now."""
        assert cache.pool is self._pool
        runs, keys = cache.runs, self._keys(cache.tokens, cache.selected)
        if not keys:
            return
        root = self._roots.setdefault(cache.salt, _Node((), [], None, salt=cache.salt))
        path, _ = _walk(root, keys)
        for n in range(len(path), len(keys)):
            path.append(self._add(path[-1] if path else root, keys[n]))
        for place, node in enumerate(path):
            if node.key == keys[place]:  # else it holds more than this cache
                self._fill(node, [run.at(place) for run in runs])
        self._touch(path, cache.length)
        self._prune(path[-1])

    def evict(self, nbytes: int) -> int:
        """Drop pages, least recently used first, until so many bytes are free in the pool; returns the pages freed.

        Afterwards fewer bytes are free than asked for only where live caches hold all other pages.
        """
        before = self._pool.in_use
        for node, kind in tuple(self._held):
            if self._pool.free_nbytes >= nbytes:
                break
            page = node.pages[kind]
            if page is None:  # it went with its node
                continue
            if not node.children and self._keeps_a_page(node):
                self._drop(node)
            elif self._pool.classes[kind].window and self._pool.references(page) == 1:
                self._release(node, kind)
        return before - self._pool.in_use

    def clear(self) -> None:
        """Drop everything."""
        for node, kind in tuple(self._held):
            self._release(node, kind)
            self._prune(node)

    def _keys(self, tokens: Sequence[int], selected: Sequence[bool]) -> list[Key]:
        """The positions of a sequence as the tree's keys, one for each page."""
        pairs = zip(tokens, selected, strict=True)
        both = [2 * token + (select and self._selection_matters) for token, select in pairs]
        return [tuple(both[first : first + PAGE_POSITIONS]) for first in range(0, len(both), PAGE_POSITIONS)]

    def _offered(self, path: Sequence[_Node], length: int) -> int:
        """How many of the first `length` positions of a path can be gone on from: what windows see there is held."""
        there = [0] * len(self._pool.classes)
        found = 0
        for place, node in enumerate(path):
            there = [place + 1 if page is None else first for first, page in zip(there, node.pages, strict=True)]
            end = min(length, PAGE_POSITIONS * (place + 1))
            if all(of.first_page(end) >= first for of, first in zip(self._pool.classes, there, strict=True)):
                found = end
        return found

    def _run(self, path: Sequence[_Node], kind: int, length: int) -> PageRun:
        """The pages of a class that a sequence needs to go on from the first `length` positions of a path."""
        places = self._pool.classes[kind].pages(length)
        pages = (path[place].pages[kind] for place in places)
        return PageRun(places.start, tuple(page for page in pages if page is not None))

    def _add(self, parent: _Node, key: Key) -> _Node:
        """Add a node below another, in place of children that hold less; returns the child that holds its positions."""
        closest, common = _closest(parent, key)
        if closest is not None and common == len(key):
            return closest
        found = parent.children[key] = _Node(key, [None] * len(self._pool.classes), parent)
        for size in range(1, len(key)):
            if (shorter := parent.children.get(key[:size])) is not None:
                self._drop(shorter)
        return found

    def _fill(self, node: _Node, pages: Sequence[int | None]) -> None:
        """Share these pages, of each class one, where a node lacks them."""
        for kind, page in enumerate(pages):
            if node.pages[kind] is None and page is not None:
                self._pool.share(page)
                node.pages[kind] = page
                self._held[node, kind] = None

    def _keeps_a_page(self, leaf: _Node) -> bool:
        """Whether dropping a leaf, and then the nodes above it, frees a page: one that only the tree holds."""
        node = leaf
        while node.parent is not None:
            if any(page is not None and self._pool.references(page) == 1 for page in node.pages):
                return True
            node = node.parent
        return False

    def _drop(self, node: _Node) -> None:
        for kind in range(len(node.pages)):
            self._release(node, kind)
        self._prune(node)

    def _release(self, node: _Node, kind: int) -> None:
        """Give back a node's page of a class, if it has one."""
        page, node.pages[kind] = node.pages[kind], None
        if page is not None:
            del self._held[node, kind]
            self._pool.release(page)

    def _prune(self, node: _Node) -> None:
        """Remove a node that has neither pages nor children, and those above it that are left without."""
        while not node.children and all(page is None for page in node.pages):
            if node.parent is None:
                del self._roots[node.salt]
                return
            del node.parent.children[node.key]
            node = node.parent

    def _touch(self, path: Sequence[_Node], length: int) -> None:
        """Mark as used now what a sequence needs to go on from the first `length` positions of a path."""
        needed = [of.pages(length) for of in self._pool.classes]
        for place in reversed(range(pages_of(length))):
            for kind, places in enumerate(needed):
                if place in places and path[place].pages[kind] is not None:
                    self._held.move_to_end((path[place], kind))


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
