"""TOML files, read strictly."""

import tomllib
from collections.abc import Iterable
from typing import Any


def parse_toml(text: str, **options: Any) -> dict[str, Any]:
    """The tables of a TOML file, whose integers have 64 bits. Raises ValueError for anything else."""
    try:
        data = tomllib.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level: list[Any] = [data]
    while level:
        if any(isinstance(node, int) and not -(2**63) <= node < 2**63 for node in level):
            raise ValueError("an integer of more than 64 bits")
        level = [child for node in level for child in _children(node)]
    return data


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()
