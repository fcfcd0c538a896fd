"""Reads calls of tools whose texts stand between marks: Gemma 4.

    <|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>

A value is a text between marks `<|"|>`, which knows no escapes, a number, a constant, or `{KEY:VALUE,…}` or `[VALUE,…]`
in turn. Keys stand as they are, or between marks. Texts may be JSON's too: a grammar makes such ones. Anything else up
to the next comma or bracket is a text.

Sources: the chat template of Gemma 4; llama.cpp (common/parsers/gemma4.cpp); vLLM (tool_parsers/gemma4).
"""

import json

from pi_runtime.engine.tools.calls import HEAD_LENGTH, NAME_MARKS, CallParser
from pi_runtime.engine.tools.scanners import AFTER, CLOSERS, SCALAR, JsonScanner
from pi_runtime.text.stop_strings import StopStrings

_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Constants as templates write them that print a value."""


class MarkedParser(CallParser):
    """Reads one answer; arguments are shown as JSON, as they come."""

    def _begin_call(self, raw: str) -> None:
        super()._begin_call(raw)
        self._head = ""
        """The name as it comes, and what stands before it."""
        self._word = ""
        """What was read of a key, of a value without marks, or of a mark."""
        self._part: StopStrings | None = None
        """Reads the present text, up to its mark."""
        self._text: JsonScanner | None = None
        """Follows the present text where it is one of JSON."""
        self._open: list[str] = []
        """The brackets that end what is open."""
        self._is_key = self._has_value = self._has_comma = False
        """Whether a key comes next; whether a key, or a value behind it, was read; whether a comma is to be shown."""

    def _read_call(self, char: str) -> None:
        """Read the name, and what stands before it."""
        before, head = self._format.before_name, (self._head + char).lstrip()
        name, is_name = head.removeprefix(before), head.startswith(before)
        if char == "{" and is_name and name[:-1] in self._names:
            self._keep(char)
            self._call.name, self._call.in_arguments, self._read = name[:-1], True, self._read_marked
            self._enter(char)
        elif len(head) < HEAD_LENGTH and (
            before.startswith(head) or (is_name and (char.isalnum() or char in NAME_MARKS))
        ):
            self._keep(char)
            self._head = head
        else:
            self._break_off(char)

    def _read_marked(self, char: str) -> None:
        """Read a character of the arguments."""
        self._keep(char)
        if self._part is not None:
            shown, ended = self._part.push(char)
            self._add(json.dumps(shown, ensure_ascii=False)[1:-1] + '"' * ended)
            self._part = None if ended else self._part
        elif self._text is None:
            self._read_word(char)
        elif not self._text.push(char):
            self._break_off("")
        else:
            self._add(char)
            self._text = None if self._text.state == AFTER else self._text

    def _read_word(self, char: str) -> None:
        word = (self._word + char).lstrip()
        self._word = ""
        if word == self._format.quote and not self._has_value:
            self._begin_value('"')
            self._part = StopStrings([word])
        elif word == '"' and not self._has_value:
            self._begin_value(word)
            self._text = JsonScanner()
            self._text.push("[")
            self._text.push(word)
        elif self._is_key and char == ":" and (word == ":") == self._has_value:
            if not self._has_value:
                self._begin_value(json.dumps(word[:-1].rstrip(), ensure_ascii=False))
            self._add(": ")
            self._is_key = self._has_value = False
        elif not self._is_key and word in CLOSERS and not self._has_value:
            self._enter(word)
        elif char not in ",}]":
            self._word = word
        elif not self._end_value(word[:-1].strip(), char):
            self._break_off("")

    def _end_value(self, word: str, char: str) -> bool:
        """Take what stands before a comma or a bracket, and that; False if it cannot stand there."""
        if word and (self._is_key or self._has_value):
            return False
        if word:
            self._begin_value(_as_json(word))
        is_empty = not self._is_key and self._open[-1] == "]" and not self._has_comma
        if char == ",":
            self._has_comma, can_stand = True, self._has_value and not self._is_key
            self._is_key, self._has_value = self._open[-1] == "}", False
            return can_stand
        if char != self._open[-1] or not (self._has_value != self._is_key or is_empty) or self._has_comma:
            return False
        self._open.pop()
        self._is_key, self._has_value, self._call.in_arguments = False, True, bool(self._open)
        self._add(char)
        if not self._open:
            self._end_call()
        return True

    def _enter(self, bracket: str) -> None:
        """Begin an object or a list."""
        self._begin_value(bracket)
        self._open.append(CLOSERS[bracket])
        self._is_key, self._has_value = bracket == "{", False

    def _begin_value(self, text: str) -> None:
        """Show a value, a key, or the beginning of one, and the comma before it."""
        self._add(", " * self._has_comma + text)
        self._has_value, self._has_comma = True, False

    def _add(self, arguments: str) -> None:
        self._call.arguments.append(arguments)
        self._show_arguments()


def _as_json(word: str) -> str:
    """A value without marks: a number or a constant as it is, else a text."""
    word = _PYTHON.get(word, word)
    return word if SCALAR.fullmatch(word) else json.dumps(word, ensure_ascii=False)
