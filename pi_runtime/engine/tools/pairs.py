"""Reads calls of tools whose arguments are pairs of tags, the form of GLM 4.5 and later.

    <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> … </tool_call>

White space may stand between tags. A value is the text itself where the function's schema says that it is a string, and
JSON elsewhere. Source: the chat templates of GLM-4.5 and GLM-4.7, and what vLLM reads (tool_parsers/glm4_moe).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pi_runtime.engine.tools.calls import HEAD_LENGTH, CallParser, new_id
from pi_runtime.engine.tools.formats import KEY, VALUE, ToolFormat, ends_of
from pi_runtime.engine.tools.json_scanner import SPACE
from pi_runtime.text.stop_strings import StopStrings

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def types(schema: Any) -> set[str]:
    """The types that a schema names; none where it names none.

    >>> sorted(types({"anyOf": [{"type": "string"}, {"type": "null"}]}))
    ['null', 'string']
    """
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type", ())
    found = {own} if isinstance(own, str) else set(own)
    return found.union(*map(types, schema.get("anyOf") or schema.get("oneOf") or ()))


class PairParser(CallParser):
    """Reads one answer. `functions` has the parameters' schema of each tool; arguments are shown as JSON."""

    def __init__(
        self, tools: ToolFormat, functions: Mapping[str, Mapping[str, Any]], make_id: Callable[[], str] = new_id
    ) -> None:
        super().__init__(tools, functions, make_id)
        self._functions = functions

    def _begin_call(self, raw: str) -> None:
        super()._begin_call(raw)
        self._text = ""
        """What was read of the present part: the name, a tag, a key, or a value that is not shown yet."""
        self._expected: tuple[str, ...] = (KEY, self._format.end)
        """The tags that may come next."""
        self._schema: Any = {}
        """What the function says of the present value."""
        self._part = StopStrings([])

    def _read_call(self, char: str) -> None:
        """Read the name, up to white space or a tag."""
        name = self._text.strip()
        if name in self._names and char in f"{SPACE}<":
            self._name, self._text, self._read = name, "", self._read_tag
            self._read_tag(char)
        elif (char.isalnum() or char in "_.-" or (char in SPACE and not name)) and len(self._text) < HEAD_LENGTH:
            self._raw += char
            self._text += char
        else:
            self._break_off(char)

    def _read_tag(self, char: str) -> None:
        """Read white space, and the next tag."""
        tag = (self._text + char).lstrip()
        if not any(expected.startswith(tag) for expected in self._expected):
            self._break_off(char)
            return
        self._raw += char
        self._text = tag
        if tag not in self._expected:
            return
        self._text, begins = "", not self._in_arguments
        if tag == self._format.end:
            self._in_arguments = False
            self._add("{}" if begins else "}")
            self._begin_call("")
            self._read = self._read_text
            return
        self._part, self._in_arguments = StopStrings([ends_of(tag)]), True
        if tag == KEY:
            self._read = self._read_key
            self._add("{" if begins else ", ")
        else:
            self._read = self._read_value
            self._add('"' if self._is_text else "")

    def _read_key(self, char: str) -> None:
        self._raw += char
        shown, ended = self._part.push(char)
        self._text += shown
        if ended:
            key, self._text, self._read, self._expected = self._text.strip(), "", self._read_tag, (VALUE,)
            properties = self._functions[self._name].get("properties")
            self._schema = properties.get(key) if isinstance(properties, Mapping) else None
            self._add(f"{json.dumps(key, ensure_ascii=False)}: ")

    def _read_value(self, char: str) -> None:
        self._raw += char
        shown, ended = self._part.push(char)
        if self._is_text:
            self._add(json.dumps(shown, ensure_ascii=False)[1:-1])
        else:
            self._text += shown
        if ended:
            self._add('"' if self._is_text else _as_json(self._text, types(self._schema)))
            self._text, self._read, self._expected = "", self._read_tag, (KEY, self._format.end)

    @property
    def _is_text(self) -> bool:
        return types(self._schema) == {"string"}

    def _add(self, arguments: str) -> None:
        self._pending += arguments
        self._show_arguments()


def _as_json(text: str, kinds: set[str]) -> str:
    """A value as JSON: as it is written where that is JSON of a type that may be, else as a string."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _KINDS.get(type(value), "null")
    is_meant = "string" not in kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return text.strip() if is_meant else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
