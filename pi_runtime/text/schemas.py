"""JSON schemas of somebody else."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def referred(ref: str, whole: Any) -> Any:
    """What a reference within a document points to; None where it points to nothing.

    >>> referred("#/$defs/a~1b", {"$defs": {"a/b": True}})
    True
    """
    found = whole if ref.startswith("#") else None
    for step in ref[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found
