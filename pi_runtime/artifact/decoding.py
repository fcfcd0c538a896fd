"""JSON to frozen dataclasses and back, strictly: one spelling for each value, every problem reported with its path.

Canonical JSON: UTF-8, keys sorted by code point, no spaces, non-ASCII characters as themselves, floats as Python's
`repr`, no NaN and no infinity, each key once.
"""

import json
import math
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, NoReturn

MAX_DEPTH = 32
MOST_PROBLEMS = 1000
"""Problems that are kept: a hostile file may have one in every other byte."""
ALWAYS = {"always": True}
"""Metadata of a dataclass's field that its JSON has even where it has its default. All others are left out then, so
that a fact that is added later leaves the bytes of files without it as they were."""


def canonical_json(value: Any) -> bytes:
    """Canonical JSON of a value made of dataclasses, mappings, sequences, strings, numbers, booleans and None.

    Raises ValueError for NaN, infinity and lone surrogates.
    """
    return json.dumps(
        value, default=attributes, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def attributes(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that its JSON has: those that differ from their defaults."""
    found = {f.name: getattr(value, f.name) for f in fields(value)}
    return {f.name: found[f.name] for f in fields(value) if f.metadata == ALWAYS or found[f.name] != default_of(f)}


def default_of(f: "Field[Any]") -> Any:
    """The default of a dataclass's field; `MISSING` where it must be given."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def parse_json(data: bytes) -> Any:
    """Parse JSON. Raises ValueError for NaN, infinity, and nesting deeper than `MAX_DEPTH`."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level, depth = [value], 0
    while level := [child for node in level for child in _children(node) if type(child) in (dict, list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
    return value


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large a number")
    return value


def decode(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    """Convert a JSON value to the type `kind`; whatever does not match is added to `problems`, up to a limit."""
    # bool is a subclass of int, and 1 stands for 1.0 in no canonical file: types must be the very same.
    if kind is Any or type(value) is kind or len(problems) >= MOST_PROBLEMS:
        return value
    if is_dataclass(kind):
        return _decode_dataclass(kind, value, path, problems)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(decode(arguments[0], v, f"{path}[{n}]", problems) for n, v in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {k: decode(arguments[1], v, f"{path}.{k}", problems) for k, v in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else decode(arguments[0], value, path, problems)
    _add(problems, f"{path}: expected {getattr(kind, '__name__', kind)}, found {reprlib.repr(value)}")
    return None


def _add(problems: list[str], problem: str) -> None:
    if len(problems) < MOST_PROBLEMS:
        problems.append(problem)


def _decode_dataclass(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        _add(problems, f"{path}: expected an object, found {reprlib.repr(value)}")
        return None
    known = _fields(kind)
    for key in sorted(value.keys() - known.keys()):
        _add(problems, f"{path}.{key}: unknown key")
    decoded = {}
    for name, (hint, required) in known.items():
        if name in value:
            decoded[name] = decode(hint, value[name], f"{path}.{name}", problems)
        elif required:
            _add(problems, f"{path}.{name}: missing")
    return None if problems else kind(**decoded)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Fields of a dataclass: name → (type, whether it must be given)."""
    hints = typing.get_type_hints(kind)
    return {f.name: (hints[f.name], f.metadata == ALWAYS or default_of(f) is MISSING) for f in fields(kind)}
