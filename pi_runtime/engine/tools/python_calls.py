"""Reads calls of tools that stand as Python writes them: LFM2.5 and its kin.

    <|tool_call_start|>[NAME(KEY=VALUE, …), …]<|tool_call_end|>

A value is a literal of Python or JSON. A call is shown when it is whole, for its values are known only then. A call
that is JSON may stand in the list too: a grammar makes such ones. Sources: the chat templates of LFM2.5; llama.cpp
(common/chat.cpp).
"""

import ast
import json
import re

from pi_runtime.engine.tools.calls import HEAD_LENGTH, NAME_MARKS, CallParser
from pi_runtime.engine.tools.scanners import SPACE

_ESCAPES = "\\'\"abfnrtvxuU01234567"
_LINES = {"\n": "\\n", "\r": "\\r"}
_PYTHON = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}
"""What Python writes otherwise than JSON, texts apart."""


class PythonParser(CallParser):
    """Reads one answer."""

    def _begin_call(self, raw: str) -> None:
        super()._begin_call(raw)
        self._head = self._key = self._quote = ""
        """The name as it comes; the key of the present value, if it is known; the mark around the present text."""
        self._text: list[str] = []
        """The present key, or what was read of a value since its last text; or the present text."""
        self._value: list[str] = []
        """What was read of the present value, as JSON."""
        self._pairs: dict[str, str] = {}
        self._depth, self._is_escaped = 0, False

    def _read_call(self, char: str) -> None:
        """Read white space before a call, and its name; or the first character of one that is JSON."""
        if not self._head and char in SPACE + "{":
            super()._read_call(char)
        elif char == "(" and self._head in self._names:
            self._keep(char)
            self._call.name, self._read = self._head, self._read_pairs
        elif len(self._head) < HEAD_LENGTH and (char.isalnum() or char in NAME_MARKS):
            self._keep(char)
            self._head += char
        else:
            self._break_off(char)

    def _read_pairs(self, char: str) -> None:
        self._keep(char)
        try:
            self._take(char)
        except (RecursionError, SyntaxError, ValueError):
            self._break_off("")

    def _take(self, char: str) -> None:
        """Take a character of the arguments. Raises an error of parsers where it cannot stand there."""
        if self._quote:
            self._take_of_text(char)
        elif self._key and char in "'\"":
            self._add_plain()
            self._text, self._quote = [char], char
        elif not self._key and char == "=":
            self._key, self._text = "".join(self._text).strip(), []
            if not self._key or self._key in self._pairs:
                raise ValueError(self._key)
        elif self._depth == 0 and char in ",)":
            self._end_pair(is_last=char == ")")
        else:
            self._depth += (char in "([{") - (char in ")]}")
            self._text.append(char)

    def _take_of_text(self, char: str) -> None:
        if self._is_escaped and char not in _ESCAPES:
            self._text.append("\\")
        self._text.append(_LINES.get(char, char))
        if not self._is_escaped and char == self._quote:
            text: str = ast.literal_eval("".join(self._text))
            text = text.encode("utf-16", "surrogatepass").decode("utf-16")  # JSON has two escapes for some characters
            self._value.append(json.dumps(text, ensure_ascii=False))
            self._text, self._quote = [], ""
        self._is_escaped = char == "\\" and not self._is_escaped

    def _add_plain(self) -> None:
        """Add what is no text to the present value."""
        found = "".join(self._text)
        self._value.append(re.sub(r"\b(?:True|False|None)\b|[()]", lambda constant: _PYTHON[constant[0]], found))

    def _end_pair(self, *, is_last: bool) -> None:
        if self._key:
            self._add_plain()
            self._pairs[self._key] = json.dumps(json.loads("".join(self._value)), ensure_ascii=False, allow_nan=False)
        elif not is_last or "".join(self._text).strip():
            raise ValueError("".join(self._text))
        self._key, self._text, self._value = "", [], []
        if is_last:
            pairs = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in self._pairs.items())
            self._call.arguments = [f"{{{pairs}}}"]
            self._show_arguments()
            self._end_call()
