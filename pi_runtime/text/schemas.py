"""JSON schemas of somebody else, made such that a grammar can follow them.

`followed` leaves out what llguidance cannot follow, and says what. `closed` shuts objects: one whose schema has
properties has no others, unless the schema says so, as OpenAI, llama.cpp and people who write such schemas mean it. A
weak model goes on inventing properties where it may.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from pi_runtime.errors import Setting, UsageError

Schema = Mapping[str, Any] | bool

MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values have a schema for each key; see also `LISTS` and `SINGLE`."""
BRANCHES = ("allOf", "anyOf", "oneOf")
LISTS = (*BRANCHES, "prefixItems")
SINGLE = ("items", "additionalProperties", "unevaluatedProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BEYOND = (
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
)
"""Keywords that llguidance does not know how to follow."""
TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""What llguidance knows of the formats of texts."""
UNREADABLE = re.compile(r"\(\?<?[=!]|\(\?>|\\[bBzZAG1-9]|\\k<|\(\?P=")
"""Parts of regular expressions that say more than which characters follow one another."""
DRAFTS = "json-schema.org/"
LARGEST, MOST = 10**17, 10_000
"""The largest bound of numbers that llguidance takes, and of lengths that advice has."""
MOST_GROWN, REFERENCE_BYTES = 4 << 20, 512
"""Bytes by which schemas may grow where their objects are shut: names, and what stands behind references, each of which
counts as so many more, for it takes time too."""
SHOWN_CHARS = 200
"""Characters that are shown of a place."""


def _is_number(value: Any) -> bool:
    # Integers have no bound, and a very large one is no float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_count(value: Any) -> bool:
    return _is_number(value) and value == int(value) and value >= 0


def _are_types(value: Any) -> bool:
    named = value if isinstance(value, list) else [value]
    return bool(named) and all(isinstance(one, str) and one in TYPES for one in named)


_SMALL = (lambda value: abs(value) <= LARGEST, "too large a number to be followed")
# Drafts before the sixth have exclusive bounds that are true or false.
_BOUND = ((lambda value: isinstance(value, bool) or _is_number(value), "not a number"), _SMALL)
RULES: Mapping[str, tuple[tuple[Callable[[Any], bool], str], ...]] = {
    **dict.fromkeys(COUNTS, ((_is_count, "not a number of things"),)),
    **dict.fromkeys(("minimum", "maximum"), ((_is_number, "not a number"), _SMALL)),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    "multipleOf": ((lambda value: _is_number(value) and value > 0, "not a number"), _SMALL),
    "type": ((_are_types, "no type of JSON"),),
    "enum": ((lambda value: isinstance(value, list) and value != [], "not a list of values"),),
    "required": ((lambda value: _texts(value) == value, "not a list of names"),),
    "format": ((lambda value: isinstance(value, str) and value in FORMATS, "{!r} is no format that is known here"),),
}
"""What has to hold of the value of each keyword that has no schema within, and why it is left out where it does not."""


@dataclass
class Followed:
    """What a grammar can follow of a schema, and what it cannot: where that stands, and why."""

    schema: Schema = True
    left_out: list[str] = field(default_factory=list)


def followed(schema: Any, *, is_advice: bool = False) -> Followed:
    """Leave out of a schema what cannot be followed, keyword by keyword; PHP's `[]` is an empty object.

    `is_advice`: bounds that a text would not come to an end for are left out too, and one of `oneOf` may be any of it.

    >>> followed({"type": "string", "pattern": "^(?!x)", "minLength": 1})
    Followed(schema={'type': 'string', 'minLength': 1}, left_out=['pattern: look-around cannot be followed'])
    """
    reader = _Reader(schema, is_advice=is_advice)
    try:
        found = reader.schema(schema, "")
    except RecursionError:
        return Followed(True, ["it is too deep"])
    return Followed(found, reader.left_out)


class _Reader:
    """Reads a schema. A method for each kind of keyword returns its value, or None where it is left out."""

    def __init__(self, whole: Any, *, is_advice: bool) -> None:
        self._whole, self._is_advice = whole, is_advice
        self.left_out: list[str] = []
        self._kinds: dict[str, Callable[[str, Any, str], Any]] = {
            **dict.fromkeys(MAPS, self._map),
            **dict.fromkeys(LISTS, self._list),
            **dict.fromkeys(SINGLE, self._single),
            **dict.fromkeys(RULES, self._by_rule),
            **dict.fromkeys(BEYOND, self._beyond),
            "pattern": self._pattern,
            "$ref": self._ref,
            "$id": lambda *_: None,  # references are to places within the schema
            "$schema": lambda _, value, __: value if DRAFTS in str(value) else None,
        }

    @cached_property
    def _anchors(self) -> frozenset[str]:
        return frozenset(_anchors(self._whole))

    def schema(self, value: Any, place: str) -> Schema:
        """The schema that stands there."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, Mapping):
            return True if value == [] else self._out(place, "not a schema") or True
        found = {}
        for key, part in value.items():
            read = self._kinds.get(key)
            # Some clients write null for what is not there.
            kept = part if read is None or part is None else read(key, part, _below(place, key))
            if kept is not None or key == "const":
                found[key] = kept
        return self._as_advice(found) if self._is_advice else found

    def _as_advice(self, found: dict[str, Any]) -> dict[str, Any]:
        """A schema without what llguidance follows in some cases only."""
        if "oneOf" in found:
            found["allOf"] = [*found.get("allOf", ()), {"anyOf": found.pop("oneOf")}]
        if found.get("properties"):
            found = {key: value for key, value in found.items() if key not in {"minProperties", "maxProperties"}}
        return found

    def _out(self, place: str, why: str) -> Any:
        """Leave out what stands there."""
        self.left_out.append(f"{place}: {why}" if place else why)
        return None

    def _beyond(self, key: str, value: Any, place: str) -> Any:
        asks_for_nothing = key != "not" and not value
        return None if asks_for_nothing else self._out(place, "cannot be followed")

    def _map(self, key: str, value: Any, place: str) -> Any:
        if value == []:
            return {}
        if not isinstance(value, Mapping):
            return self._out(place, "not an object")
        is_pattern = key == "patternProperties"
        known = [name for name in value if not is_pattern or self._pattern(key, name, _below(place, name)) is not None]
        return {name: self.schema(value[name], _below(place, name)) for name in known}

    def _list(self, _: str, value: Any, place: str) -> Any:
        if not isinstance(value, list) or not value:
            return self._out(place, "not a list of schemas") if value != [] else None
        return [self.schema(part, f"{place}[{n}]") for n, part in enumerate(value)]

    def _single(self, key: str, value: Any, place: str) -> Any:
        if key == "items" and isinstance(value, list):
            return self._list(key, value, place)
        return self.schema(value, place)

    def _by_rule(self, key: str, value: Any, place: str) -> Any:
        if key == "required" and value in (False, {}):
            return None
        for holds, why in RULES[key]:
            if not holds(value):
                return self._out(place, why.format(str(value)[:40]))
        if key in COUNTS:
            return None if self._is_advice and value > MOST else int(value)
        return value

    def _pattern(self, _: str, value: Any, place: str) -> Any:
        if not isinstance(value, str):
            return self._out(place, "not a regular expression")
        found = UNREADABLE.search(value)
        if found is None:
            return value
        is_around = found[0][-1] in "=!bB" and not found[0].startswith("(?P")
        return self._out(place, f"{'look-around' if is_around else found[0]} cannot be followed")

    def _ref(self, _: str, value: Any, place: str) -> Any:
        if isinstance(value, str):
            found = referred(value, self._whole)
            if isinstance(found, Mapping | bool) or value[1:] in self._anchors:
                return value
        return self._out(place, f"{str(value)[:80]!r} refers to nothing that is there")


def _below(place: str, key: str) -> str:
    """The place of a key. It stays short, whatever the key: each part of a schema has one."""
    return f"{place}.{key[:SHOWN_CHARS]}".lstrip(".")[:SHOWN_CHARS]


def _anchors(schema: Any) -> Iterator[str]:
    """The names of places within a schema."""
    rest = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$anchor"), str):
                yield part["$anchor"]
            rest += part.values()
        elif isinstance(part, list):
            rest += part


def referred(ref: str, whole: Any) -> Any:
    """What a reference within a document points to; None where it points to nothing.

    >>> referred("#/$defs/a~1b", {"$defs": {"a/b": True}})
    True
    """
    found = whole if ref == "#" or ref.startswith("#/") else None
    for step in ref.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


class Growth:
    """What schemas have grown by where their objects were shut, those of one request together."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count what a schema grows by, before it does. Raises UsageError where it is too much."""
        self._nbytes += nbytes
        if self._nbytes > MOST_GROWN:
            expected = f"at most {MOST_GROWN} bytes behind references and of names"
            raise UsageError("too complex", setting=Setting("json_schema"), expected=expected)


def together(schema: Any, whole: Any, branches: Iterable[str] = BRANCHES) -> Iterator[Mapping[str, Any]]:
    """A schema, and those in its branches and behind its references, each once. `whole` has what is referred to."""
    rest, seen = deque([schema]), set[int]()
    while rest:
        part = rest.popleft()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            rest += [one for key in branches for one in _listed(part.get(key))]
            if isinstance(part.get("$ref"), str):
                rest.append(referred(part["$ref"], whole))


def closed(schema: Schema, growth: Growth | None = None) -> Schema:
    """The schema with its objects shut. Raises UsageError for one that is too complex, or is beside others' `growth`.

    Parts that hold together, of `allOf` or beside `anyOf` and `$ref`, are shut together: each of them alone would
    leave no room for the others.

    >>> closed({"properties": {"a": {"properties": {}}}})
    {'properties': {'a': {'properties': {}, 'additionalProperties': False}}, 'additionalProperties': False}
    """
    try:
        shut: Schema = _Closer(schema, growth or Growth()).alone(schema)
    except RecursionError:
        raise UsageError("too deep", setting=Setting("json_schema")) from None
    return shut


class _Closer:
    def __init__(self, whole: Schema, growth: Growth) -> None:
        self._whole, self._growth = whole, growth

    def alone(self, schema: Any) -> Any:
        """A schema that stands by itself, shut."""
        if not isinstance(schema, Mapping):
            return schema
        parts = [key for key in ("$ref", *BRANCHES) if isinstance(schema.get(key), str if key == "$ref" else list)]
        if not parts:
            return self._shut(self._inner(schema), ())
        has_own = not schema.keys().isdisjoint(("properties", "patternProperties", "required", "additionalProperties"))
        branches = schema[parts[0]]
        is_one = len(parts) == 1 and (parts[0] != "allOf" or len(branches) == 1)
        if is_one and not has_own and "unevaluatedProperties" not in schema:
            found = self._inner(schema)
            return found if parts[0] == "$ref" else {**found, parts[0]: [self.alone(one) for one in branches]}
        return self._together(schema)

    def _together(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A schema of several parts that hold together, shut together."""
        names = self._names(schema)
        found: dict[str, Any] = self._open(schema)
        if names is None or "additionalProperties" in schema:
            return found
        for key in ("anyOf", "oneOf"):
            if not isinstance(found.get(key), list):
                continue
            # One branch has no room for another's properties, but for those of all that stands around it.
            around = self._names({name: value for name, value in schema.items() if name != key}) or {}
            self._growth.add(len(found[key]) * len(json.dumps([*around])))
            found[key] = [
                self._shut(part, {**around, **(self._names(part) or {})}) if isinstance(part, dict) else part
                for part in found[key]
            ]
        return self._shut({**found, **_only(schema, "unevaluatedProperties")}, names)

    def _shut(self, found: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Shut an object whose values were read, with further names that it may have, unless it says what it is."""
        rest = found.pop("unevaluatedProperties", None)
        has_shape = bool(names) or rest is not None or not found.keys().isdisjoint(("properties", "patternProperties"))
        if "additionalProperties" in found or not has_shape:
            return found
        required = [] if "patternProperties" in found else _texts(found.get("required"))
        given = found.get("properties")
        properties = given if isinstance(given, Mapping) else {}
        missing = [name for name in [*names, *required] if name not in properties]
        if missing:
            found = {**found, "properties": {**properties, **dict.fromkeys(missing, True)}}
        return {**found, "additionalProperties": False if rest is None else rest}

    def _inner(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A schema whose values and items are shut, and itself is not."""
        found = dict(schema)
        for key, value in schema.items():
            if key in MAPS and isinstance(value, Mapping):
                found[key] = {name: self.alone(part) for name, part in value.items()}
            elif key in {"prefixItems", "items"} and isinstance(value, list):
                found[key] = [self.alone(part) for part in value]
            elif key in SINGLE:
                found[key] = self.alone(value)
        return found

    def _open(self, schema: Any, inside: tuple[int, ...] = ()) -> Any:
        """A schema that holds together with others: neither it nor what it refers to is shut, but for their values."""
        if not isinstance(schema, Mapping):
            return schema
        found = self._inner(schema)
        found.pop("unevaluatedProperties", None)
        for key in BRANCHES:
            if isinstance(found.get(key), list):
                found[key] = [self._open(part, inside) for part in schema[key]]
        target = self._target(schema)
        if not isinstance(target, Mapping) or id(target) in inside:
            return found
        self._growth.add(REFERENCE_BYTES + len(json.dumps(target)))
        opened, inlined = self._open(target, (*inside, id(target))), dict[str, Any]()
        for key, value in found.items():  # the order of keywords is that of properties
            if key in {"$ref", "allOf"}:
                inlined["allOf"] = [*inlined.get("allOf", ()), *([opened] if key == "$ref" else _listed(value))]
            else:
                inlined[key] = value
        return inlined

    def _names(self, schema: Any) -> dict[str, None] | None:
        """The names of all properties that a schema's parts have or require; None where one of them is open."""
        names: dict[str, None] = {}
        for part in together(schema, self._whole):
            if any(part.get(key, False) is not False for key in ("additionalProperties", "unevaluatedProperties")):
                return None
            properties = part.get("properties")
            names |= dict.fromkeys(properties if isinstance(properties, Mapping) else ())
            names |= dict.fromkeys(_texts(part.get("required")))
        return names

    def _target(self, schema: Mapping[str, Any]) -> Any:
        return referred(schema["$ref"], self._whole) if isinstance(schema.get("$ref"), str) else None


def _only(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: schema[key]} if key in schema else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    return [one for one in _listed(value) if isinstance(one, str)]
