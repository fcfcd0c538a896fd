"""Random changes of JSON trees, of texts and of bytes: values at the edges of their types, rarely sensible ones."""

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

INTEGERS = (0, 1, -1, 2, 7, 63, 64, 255, 257, 4096, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**300)
NUMBERS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-45, 5e-324, 1e38, 3.5e38, 1e308)
TEXTS = (
    "",
    "x",
    "0" * 64,
    "a" * 1000,
    "../../x",
    "/etc/passwd",
    "f16",
    "q4",
    "cpu",
    "{{",
    "\0",
    "\n\x1b[2J",
    "é€😀",
    "\ud800",
)
MANY = 50_000
"""Elements of a list that a mutation blows up."""
LITTLE = 3
"""A mutation that blows something up is chosen once in so many dozens."""


def value(rng: Random) -> Any:
    """A value of any type."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(INTEGERS) * rng.choice((1, 1, 1, -1)),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice((None, True, False)),
        lambda: [value(rng) for _ in range(rng.randrange(4))],
        lambda: {rng.choice(TEXTS): value(rng) for _ in range(rng.randrange(3))},
        lambda: rng.randrange(1 << rng.randrange(1, 40)),
    ]
    return rng.choice(kinds)()


def near(rng: Random, old: Any) -> Any:
    """A value of the same type as an old one, often close to it."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, old * 2, old // 2, -old, old ^ (1 << rng.randrange(24)), old + 64))
    if isinstance(old, float):
        return rng.choice((old * 2, old / 3, -old, rng.choice(NUMBERS), old * 1e30, old * 1e-30))
    if isinstance(old, str):
        return text(rng, old)
    return value(rng)


def text(rng: Random, old: str) -> str:
    """A text with a piece changed, removed, doubled or put in."""
    at, size = rng.randrange(len(old) + 1), rng.choice((1, 1, 2, 5, 20, 200))
    head, piece, tail = old[:at], old[at : at + size], old[at + size :]
    new = rng.choice(
        ("", piece * 2, piece[::-1], rng.choice(TEXTS), chr(rng.randrange(0xD800)), str(rng.choice(INTEGERS)))
    )
    return head + new + tail


def data(rng: Random, old: bytes) -> bytes:
    """Bytes with a piece changed, removed, doubled or put in, or cut off."""
    at, size = rng.randrange(len(old) + 1), rng.choice((1, 1, 2, 4, 8, 64, 4096))
    head, piece, tail = old[:at], old[at : at + size], old[at + size :]
    kind = rng.randrange(7)
    if kind == 0:
        return head
    if kind == 1 and piece:
        return head + bytes([piece[0] ^ 1 << rng.randrange(8)]) + old[at + 1 :]
    if kind == 2:
        width = rng.choice((1, 2, 4, 8))
        number = rng.choice(INTEGERS[:-1]) % (1 << 8 * width)
        return head + number.to_bytes(width, "little") + old[at + width :]
    new = (b"", piece * 2, rng.randbytes(size), bytes(size))[rng.randrange(4)]
    return head + new + tail


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree: the container and the key or index in it."""
    if isinstance(node, dict | list):
        for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
            yield node, key
            yield from places(child)


def _copied(node: Any) -> Any:
    """A copy; the node itself where another mutation has made it too deep."""
    try:
        return copy.deepcopy(node)
    except RecursionError:
        return node


def tree(rng: Random, root: Any) -> str:
    """Change one place of a tree, in place; returns what was done."""
    # One key is as likely as any other of its level, however many elements its neighbours have.
    node, key, path = root, None, ""
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        if not keys:
            break
        key, parent = rng.choice(keys), node
        path, node = f"{path}/{key}", node[key]
        if not isinstance(node, dict | list) or not node or rng.random() < 0.25:
            break
    if key is None:
        return "nothing"
    kind = rng.choice(KINDS)
    kind(rng, parent, key)
    return f"{kind.__name__} {path[:200]}"


def _replace(rng: Random, parent: Any, key: Any) -> None:
    parent[key] = value(rng)


def _nudge(rng: Random, parent: Any, key: Any) -> None:
    parent[key] = near(rng, parent[key])


def _delete(rng: Random, parent: Any, key: Any) -> None:
    del parent[key]


def _swap(rng: Random, parent: Any, key: Any) -> None:
    other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]


def _copy(rng: Random, parent: Any, key: Any) -> None:
    """Repeat an element, or give a key's value a second name."""
    if isinstance(parent, list):
        parent[key:key] = [_copied(parent[key])] * rng.choice((1, 2, 100))
    else:
        parent[rng.choice((*TEXTS[:-1], f"{key}2", f"{key}_scales"))] = _copied(parent[key])


def _blow_up(rng: Random, parent: Any, key: Any) -> None:
    """Put in so much that whoever lists each problem of it needs much memory."""
    element = rng.choice((0, "", [], {}, None, parent[key]))
    if rng.random() < 0.5:
        parent[key] = [element] * (MANY // max(1, len(json.dumps(element)) // 10))
    else:
        parent[key] = {f"{n:x}": 0 for n in range(MANY)}


def _deepen(rng: Random, parent: Any, key: Any) -> None:
    for _ in range(rng.choice((2, 40, 3000))):
        parent[key] = [parent[key]]


KINDS: list[Callable[[Random, Any, Any], None]] = [
    *(12 * [_replace, _nudge]),
    *(LITTLE * [_delete, _swap, _copy]),
    _blow_up,
    _deepen,
]


def spelled(value: Any) -> bytes:
    """Canonical JSON as far as it goes; deep trees and lone surrogates have to be spelled too."""
    text = _spell(value)
    return text.encode("utf-8", "surrogatepass")


def _spell(value: Any) -> str:
    depth = 0
    while isinstance(value, list) and len(value) == 1:
        value, depth = value[0], depth + 1
    if isinstance(value, dict):
        inner = "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{_spell(value[k])}" for k in sorted(value)) + "}"
    elif isinstance(value, list):
        inner = "[" + ",".join(map(_spell, value)) + "]"
    else:
        inner = json.dumps(value, ensure_ascii=False)
    return "[" * depth + inner + "]" * depth
