"""What the pages promise, read from them."""

import re
from typing import Any

from support.paths import ROOT

DOCS = ROOT / "docs"
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "null": (type(None),),
}


def page(name: str) -> str:
    """A page of docs/, like `reference/json.md`."""
    return (DOCS / name).read_text(encoding="utf-8")


def documented(command: str) -> dict[str, tuple[str, bool]]:
    """Key of `command --json` → its type, and whether it is there in some cases only."""
    (section,) = re.findall(rf"^## `{re.escape(command)}`\n(.*?)(?=^## |\Z)", page("reference/json.md"), re.M | re.S)
    rows = re.findall(r"^\| (\*?`.*?) \| ([a-z ]+) \| ", section, re.M)
    return {key: (kind, bool(star)) for keys, kind in rows for star, key in re.findall(r"(\*?)`([\w ]+)`", keys)}


def sometimes(command: str) -> set[str]:
    """The keys of `command --json` that are there in some cases only."""
    return {key for key, (_, only) in documented(command).items() if only}


def assert_as_documented(command: str, found: dict[str, Any], also: set[str] | frozenset[str] = frozenset()) -> None:
    """The keys that are always there and those of `also`, no others, each of its type."""
    promised = documented(command)
    assert promised
    assert found.keys() == (promised.keys() - sometimes(command)) | also
    wrong = {key: value for key, value in found.items() if not is_a(value, promised[key][0])}
    assert wrong == {}


def is_a(value: Any, kind: str) -> bool:
    """Whether a value of JSON has a documented type, such as `list of string` or `integer or null`."""
    if " or " in kind:
        return any(is_a(value, one) for one in kind.split(" or "))
    if kind.startswith("list of "):
        return isinstance(value, list) and all(is_a(one, kind.removeprefix("list of ")) for one in value)
    return isinstance(value, KINDS[kind]) and (kind == "boolean") == isinstance(value, bool)
