"""Reads calls of tools whose arguments are pairs of keys and values: GLM 4.5 and later, Qwen3-Coder and its kin.

    <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> … </tool_call>
    <tool_call> <function=NAME> <parameter=KEY>⏎VALUE⏎</parameter> … </function> </tool_call>

White space may stand between tags. A value is the text itself where the function's schema says that it is a string, and
JSON elsewhere, or a constant as Python writes it. A tag ends a value only if what may follow it does, so that a value
may speak of the form. A line end at either side of a value of the second form is not part of it.

Sources: the chat templates of GLM-4.5, GLM-4.7, Qwen3-Coder, Qwen3.5, Nemotron 3 and Step 3.5; what vLLM reads
(tool_parsers/glm4_moe, and qwen3coder, which is Qwen's own); llama.cpp (common/parsers/qwen3-coder.cpp).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pi_runtime.engine.tools.calls import HEAD_LENGTH, NAME_MARKS, CallParser, new_id
from pi_runtime.engine.tools.formats import Pairs, ToolFormat
from pi_runtime.engine.tools.scanners import SPACE
from pi_runtime.text.schemas import referred, together
from pi_runtime.text.stop_strings import StopStrings

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
MOST_STEPS = 32
"""References that are followed to a value's schema."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Constants as templates write them that turn each value into text."""


def types(schema: Any, whole: Any = None) -> set[str]:
    """The types that a schema names; none where it names none. `whole` has the definitions to which it refers.

    >>> sorted(types({"anyOf": [{"type": "string"}, {"type": "null"}]}))
    ['null', 'string']
    """
    found: set[str] = set()
    for part in together(schema, whole, ("anyOf", "oneOf")):
        own, values = part.get("type"), [part["const"]] if "const" in part else part.get("enum")
        named = {one for one in (own if isinstance(own, list | tuple) else [own]) if isinstance(one, str)}
        if not named and isinstance(values, list):
            named = {_KINDS.get(type(value), "null") for value in values}
        found |= named
    return found


def text_schema(schema: Any, whole: Any) -> Mapping[str, Any] | None:
    """The schema, behind references, of a value that stands as it is: of a string and nothing else; None for others.

    >>> text_schema({"enum": ["a", "b"]}, {}), text_schema({"type": ["string", "null"]}, {})
    ({'enum': ['a', 'b']}, None)
    """
    steps = 0
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and steps < MOST_STEPS:
        schema, steps = referred(schema["$ref"], whole), steps + 1
    is_text = isinstance(schema, Mapping) and not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"}
    return schema if is_text and types(schema) == {"string"} else None


class PairParser(CallParser):
    """Reads one answer. `functions` has the parameters' schema of each tool; arguments are shown as JSON."""

    def __init__(
        self, tools: ToolFormat, functions: Mapping[str, Mapping[str, Any]], make_id: Callable[[], str] = new_id
    ) -> None:
        assert tools.pairs is not None
        self._pairs: Pairs = tools.pairs
        pairs = self._pairs
        self._opening, self._closing = pairs.before_name.strip(), pairs.after_name.strip()
        self._key_tag, self._value_tag, self._value_end = (
            text.strip() for text in (pairs.before_key, pairs.before_value, pairs.after_value)
        )
        self._ends = tuple(tag for tag in (pairs.after_all.strip(), tools.end) if tag)
        super().__init__(tools, functions, make_id)
        self._functions = functions

    def _begin_call(self, raw: str) -> None:
        super()._begin_call(raw)
        self._text = raw.strip().removeprefix(self._format.trigger)
        """What was read of the present part: the name, a tag, or the end of a value that is shown as it comes."""
        self._expected: tuple[str, ...] = (self._key_tag, *self._ends)
        """The tags that may come next."""
        self._schema: Any = {}
        """What the function says of the present value."""
        self._is_text = self._has_value = False
        """Whether the present value is text as it is written; whether some of it has come."""
        self._part = StopStrings([])
        self._value: list[str] = []
        """The present key, or the present value where it is not shown as it comes."""
        self._after: list[str] = []
        """What was read behind what may be the end of a value; `_tag` is the beginning of a tag in it."""
        self._tag = ""

    def _read_call(self, char: str) -> None:
        """Read the name, and what stands around it."""
        head = (self._text + char).lstrip()
        name = head.removeprefix(self._opening)
        is_name = head.startswith(self._opening)
        if is_name and name[:-1] in self._names and char in (self._closing or f"{SPACE}<"):
            self._call.name, self._text, self._read = name[:-1], "", self._read_tag
            if self._closing:
                self._keep(char)
            else:
                self._read_tag(char)
        elif len(head) < HEAD_LENGTH and (
            self._opening.startswith(head) or (is_name and (char.isalnum() or char in NAME_MARKS))
        ):
            self._keep(char)
            self._text = head
        else:
            self._break_off(char)

    def _read_tag(self, char: str) -> None:
        """Read white space, and the next tag."""
        tag = (self._text + char).lstrip()
        if not any(expected.startswith(tag) for expected in self._expected):
            self._break_off(char)
            return
        self._keep(char)
        self._text = tag
        if tag in self._expected:
            self._take_tag(tag)

    def _take_tag(self, tag: str) -> None:
        self._text, begins = "", not self._call.in_arguments
        if tag in self._ends:
            self._call.in_arguments = False
            self._add("{}" if begins else "}")
            self._begin_call("")
            self._read = self._read_text if tag == self._format.end else self._read_end
        elif tag == self._key_tag:
            self._part, self._call.in_arguments = StopStrings([self._pairs.after_key]), True
            self._read = self._read_key
            self._add("{" if begins else ", ")
        else:
            self._begin_value()

    def _read_key(self, char: str) -> None:
        self._keep(char)
        shown, ended = self._part.push(char)
        self._value.append(shown)
        if not ended:
            return
        key, self._value = "".join(self._value).strip(), []
        whole = self._functions[self._call.name]
        properties = whole.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        self._schema = known.get(key, whole.get("additionalProperties"))
        self._is_text = text_schema(self._schema, whole) is not None
        self._add(f"{json.dumps(key, ensure_ascii=False)}: ")
        if self._value_tag:
            self._read, self._expected = self._read_tag, (self._value_tag,)
        else:
            self._begin_value()

    def _begin_value(self) -> None:
        self._part, self._read, self._has_value = StopStrings([self._value_end]), self._read_value, False
        self._add('"' if self._is_text else "")

    def _read_value(self, char: str) -> None:
        self._keep(char)
        self._push_value(char)

    def _push_value(self, char: str) -> None:
        shown, ended = self._part.push(char)
        self._take_value(shown)
        if ended:
            self._read, self._after, self._tag = self._read_after_value, [], ""

    def _take_value(self, text: str) -> None:
        """Take more of a value; a line end at either side of it is dropped where values stand on lines."""
        if not self._value_tag and text and not self._has_value:
            text = text.removeprefix("\n")
            self._has_value = True
        if not self._is_text:
            self._value.append(text)
        else:
            self._text += text
            cut = len(self._text) - (not self._value_tag and self._text.endswith("\n"))
            self._add(json.dumps(self._text[:cut], ensure_ascii=False)[1:-1])
            self._text = self._text[cut:]

    def _read_after_value(self, char: str) -> None:
        """Read what follows the end of a value: the next tag, or the value was not at its end."""
        self._keep(char)
        self._after.append(char)
        self._tag += char if self._tag or char not in SPACE else ""
        expected = (self._key_tag, *self._ends)
        if self._tag in expected:
            self._add('"' if self._is_text else self._as_json())
            self._expected, self._read, self._value = expected, self._read_tag, []
            self._take_tag(self._tag)
        elif not any(one.startswith(self._tag) for one in expected):
            after, self._part, self._read = self._after, StopStrings([self._value_end]), self._read_value
            self._take_value(self._value_end)
            for late in after:
                self._push_value(late)

    def _as_json(self) -> str:
        text = "".join(self._value)
        text = text if self._value_tag else text.removesuffix("\n")
        return _as_json(text, types(self._schema, self._functions[self._call.name]))

    def _add(self, arguments: str) -> None:
        self._call.arguments.append(arguments)
        self._show_arguments()


def _as_json(text: str, kinds: set[str]) -> str:
    """A value as JSON: as it is written where that is JSON of a type that may be, else as a string."""
    constant = _PYTHON.get(text.strip())
    written = constant if constant is not None and "string" not in kinds else text.strip()
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _KINDS.get(type(value), "null")
    is_meant = "string" not in kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return written if is_meant else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
