"""Follows JSON that arrives character by character: whether it is valid so far, and where it is."""

import json
import re


class MarkerWatch:
    """Lets text through until a marker comes. White space is held too, for what precedes a marker belongs to it."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._blanks: list[str] = []
        """White space that is held. A character more must cost the same, however much of it there is."""
        self._body = ""
        """The beginning of what may be a marker behind it; once it is found, the whole of it."""

    def push(self, char: str) -> tuple[str, bool]:
        """Take the next character; returns the text that can be shown now, and whether a marker is complete."""
        if not self._body and char.isspace():
            self._blanks.append(char)
            return "", False
        body = self._body + char
        # White space stands nowhere in a marker, so no more than its length is searched.
        start = next(n for n in range(len(body) + 1) if self._may_begin(body[n:].lstrip()))
        shown = "".join((*self._blanks, body[:start])) if start else ""
        self._body = body[start:].lstrip()
        if start:
            self._blanks = [body[start : len(body) - len(self._body)]]
        return shown, self._body in self._markers

    def _may_begin(self, text: str) -> bool:
        return any(marker.startswith(text) for marker in self._markers)

    def push_plain(self, text: str, start: int) -> tuple[str, int]:
        """Take what cannot begin a marker at once; returns what can be shown now, and where it ended."""
        found = [at for first in {marker[0] for marker in self._markers} if (at := text.find(first, start)) >= 0]
        end = min(found, default=len(text))
        if end == start or self._body:
            return "", start
        plain = text[start:end]
        shown = plain.rstrip()
        if shown:
            shown, self._blanks, plain = "".join((*self._blanks, shown)), [], plain[len(shown) :]
        self._blanks.append(plain)
        return shown, end

    def drain(self) -> str:
        """Return what is held, and hold nothing."""
        held = "".join((*self._blanks, self._body))
        self._blanks, self._body = [], ""
        return held


SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
SPACE, HEX = " \t\r\n", "0123456789abcdefABCDEF"
CLOSERS = {"{": "}", "[": "]"}
# States. The first four expect what their names say; `AFTER` a comma or a closing bracket.
KEY, FIRST_KEY, VALUE, FIRST_VALUE = "key", "first key", "value", "first value"
COLON, STRING, ESCAPE, UNICODE, SCALAR_TEXT, AFTER, DONE = (
    "colon",
    "string",
    "escape",
    "unicode",
    "scalar",
    "after",
    "done",
)


class JsonScanner:
    """Follows one JSON object or array, character by character.

    >>> scanner = JsonScanner()
    >>> all(map(scanner.push, '{"a": ["b')), scanner.depth, scanner.is_in_text
    (True, 2, True)
    """

    def __init__(self) -> None:
        self.state = VALUE
        self._open: list[str] = []
        self._is_key = False
        self._scalar: list[str] = []
        self._digits = 0

    @property
    def depth(self) -> int:
        """How many brackets are open."""
        return len(self._open)

    @property
    def is_in_text(self) -> bool:
        """Whether it is within a text that is a value."""
        return self.state == STRING and not self._is_key

    def push(self, char: str) -> bool:
        """Take the next character; False if it cannot stand here."""
        if self.state in {STRING, ESCAPE, UNICODE}:
            return self._push_string(char)
        if self.state == SCALAR_TEXT:
            if char not in SPACE + ",]}":
                self._scalar.append(char)
                return True
            if not SCALAR.fullmatch("".join(self._scalar)):
                return False
            self.state = AFTER
        return char in SPACE or self._push_structure(char)

    def _push_string(self, char: str) -> bool:
        if self.state == UNICODE:
            self._digits -= 1
            self.state = UNICODE if self._digits else STRING
            return char in HEX
        if self.state == ESCAPE:
            self._digits = 4
            self.state = UNICODE if char == "u" else STRING
            return char in 'u"\\/bfnrt'
        if char == '"':
            self.state = COLON if self._is_key else AFTER
            self._is_key = False
        elif char == "\\":
            self.state = ESCAPE
        return char >= " "

    def _push_structure(self, char: str) -> bool:
        state = self.state
        if self._open and char == self._open[-1] and state in {FIRST_KEY, FIRST_VALUE, AFTER}:
            self._open.pop()
            self.state = AFTER if self._open else DONE
        elif state == AFTER and char == ",":
            self.state = KEY if self._open[-1] == "}" else VALUE
        elif state == COLON and char == ":":
            self.state = VALUE
        elif state in {KEY, FIRST_KEY} and char == '"':
            self.state, self._is_key = STRING, True
        elif state in {VALUE, FIRST_VALUE} and char in CLOSERS:
            self._open.append(CLOSERS[char])
            self.state = FIRST_KEY if char == "{" else FIRST_VALUE
        elif state in {VALUE, FIRST_VALUE} and self._open and char == '"':
            self.state = STRING
        elif state in {VALUE, FIRST_VALUE} and self._open and char in "-0123456789tfn":
            self.state, self._scalar = SCALAR_TEXT, [char]
        else:
            return False
        return True


class QuotedScanner:
    r"""Follows a JSON object that is written within a text of JSON, after the quotation mark that begins it.

    >>> quoted = QuotedScanner()
    >>> "".join(quoted.push(char, is_between=True) for char in '{"a": 1}'), quoted.has_ended
    ('{"a": 1}', True)
    """

    def __init__(self) -> None:
        self.object = JsonScanner()
        """Follows the object itself."""
        self.other: list[str] = []
        """The text, where it is no object."""
        self._escape = ""

    @property
    def has_ended(self) -> bool:
        """Whether the object is whole."""
        return self.object.state == DONE

    def push(self, char: str, *, is_between: bool) -> str | None:
        """Take the text's next character; returns what it says of the object, or None if it cannot stand there.

        `is_between`: no escape is open behind it.
        """
        self._escape += char
        if not is_between:
            return ""
        written, self._escape = self._escape, ""
        meant = json.loads(f'"{written}"') if written[0] == "\\" else written
        if "\ud800" <= meant <= "\udfff":
            meant = written  # half a surrogate pair stays an escape, which the object may hold too
        shown = [self._push(one) for one in meant]
        return None if None in shown else "".join(map(str, shown))

    def _push(self, char: str) -> str | None:
        if not self.object.depth:
            if char in SPACE and not self.other:
                return ""
            if self.has_ended:
                return None
            if self.other or char != "{":
                self.other.append(char)
                return ""
        return char if self.object.push(char) else None
