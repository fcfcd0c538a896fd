"""Finds calls of tools in an answer as it comes.

An answer is read as if character by character, so the way it is cut into parts cannot matter. A call begins once a
known name and the beginning of its arguments are there; until then nothing of it is shown, and where it turns out to be
none, all of it is text. From then on arguments are shown as they come. If they break off or are no JSON, a `CallBroken`
says so, and what follows is text. They are not closed: they would be a call that nobody made. Whole answers have such a
call as text; streams, which cannot take it back, leave it to the finish reason to say that it is not to be run.

A call that is JSON is read as it is meant, for models write it in several ways, whatever their templates say:

    {"name": NAME, "arguments": {…}}                   `parameters` for `arguments`, in any order, others among them
    {"name": NAME, "arguments": "{…}"}                 the arguments as text
    {"name": NAME}                                     none: no key, or null, or an empty text
    {"type": "function", "function": {"name": …, …}}   as the API has it; and `"function": NAME`

Between tags several may follow one another, or stand in a list. vLLM and SGLang (function_call/base_format_detector)
take these ways too, each a part of them.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Collection

from pi_runtime.engine.events import CallArguments, CallBegan, CallBroken, Delta, TextDelta
from pi_runtime.engine.tools.formats import ToolFormat
from pi_runtime.engine.tools.scanners import (
    AFTER,
    COLON,
    FIRST_KEY,
    FIRST_VALUE,
    KEY,
    SCALAR_TEXT,
    SPACE,
    STRING,
    VALUE,
    JsonScanner,
    MarkerWatch,
    QuotedScanner,
)

ID_LETTERS, ID_LENGTH = string.ascii_letters + string.digits, 9
"""Ids of calls are such that Mistral's templates take them."""
HEAD = re.compile(r"\s*([^\s\[\]]+)(\[CALL_ID\]\w{1,64})?\[ARGS\]")
HEAD_LENGTH = 256
NAME_MARKS = "_.:/-"
"""Characters of names beside letters and digits."""
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
"""Characters that stay within a text of JSON."""
ARGS = "[ARGS]"
ARGUMENTS, NAME, WRAPPER = ("arguments", "parameters"), ("name", "function"), "function"
"""The keys of arguments and of the name in a call that is JSON, and the one that may hold both."""


def new_id() -> str:
    """A new id of a call."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


class Call:
    """One call as it is read. One that is JSON is followed here: its members in any order, others among them."""

    def __init__(self, name: str = "") -> None:
        self.scanner = JsonScanner()
        self.name = name
        self.arguments: list[str] = []
        """Arguments that were not shown yet."""
        self.in_arguments = self.has_begun = self.is_broken = False
        """Whether what comes is arguments; whether the call is shown; whether what came cannot be a call."""
        self._key = ""
        self._member: list[str] = []
        self._level = 1
        """How many brackets stand around the members that are read: the name and the arguments."""
        self._base = 0
        """How many brackets stand around the arguments."""
        self._quoted: QuotedScanner | None = None
        """Follows arguments that are text."""

    @property
    def is_in_text(self) -> bool:
        """Whether the next characters are of a text among the arguments, with no escape open."""
        scanner = self.scanner if self._quoted is None else self._quoted.object
        return self.in_arguments and scanner.is_in_text and self.scanner.state == STRING

    def push(self, char: str) -> bool:
        """Take a character of a call that is JSON; False if it cannot stand there."""
        scanner = self.scanner
        if not scanner.push(char):
            return False
        if self._quoted is not None:
            self._add_quoted(char, self._quoted)
        elif self.in_arguments:
            self.add_argument(char)
        elif scanner.depth < self._level:
            self._level = scanner.depth
        elif (
            # The value of the call's arguments, the first that it has.
            self._key in ARGUMENTS and not (self.has_begun or self.arguments) and self._begins_arguments(char)
        ):
            pass
        elif scanner.depth == 2 > self._level and scanner.state == FIRST_KEY and self._key == WRAPPER:
            self._level = 2
        elif scanner.depth == self._level:
            self._add_member(char)
        return True

    def push_argument(self, char: str) -> bool:
        """Take a character of arguments that stand alone; False if it cannot stand there."""
        if (not self.scanner.depth and char != "{") or not self.scanner.push(char):
            return False
        self.add_argument(char)
        return True

    def add_argument(self, char: str) -> None:
        """Add a character that was followed to the arguments."""
        self.arguments.append(char)
        self.in_arguments = self.scanner.depth > self._base

    def _begins_arguments(self, char: str) -> bool:
        """Begin the arguments where this character does; a value that they cannot be is no call."""
        state, within = self.scanner.state, self.scanner.depth - self._level
        if within == 1 and state == FIRST_KEY:
            self._base = self._level
            self.add_argument(char)
        elif not within and char == '"' and self.scanner.is_in_text:
            self._quoted = QuotedScanner()
        elif (within == 1 and state == FIRST_VALUE) or (not within and state == SCALAR_TEXT and char not in "nul"):
            self.is_broken = True
        else:
            return False
        return True

    def _add_quoted(self, char: str, quoted: QuotedScanner) -> None:
        """Take a character of arguments that are text."""
        state = self.scanner.state
        if state == AFTER:
            self._quoted, self._key = None, ""
            self.is_broken = not quoted.has_ended and "".join(quoted.other).strip() not in {"", "null"}
            return
        shown = quoted.push(char, is_between=state == STRING)
        self.is_broken = shown is None
        if shown:
            self.arguments.append(shown)
            self.in_arguments = not quoted.has_ended

    def _add_member(self, char: str) -> None:
        """Take a character of a call outside its arguments."""
        state = self.scanner.state
        if state in {KEY, FIRST_KEY} or (state == VALUE and char == ":"):
            self._member = []
            return
        self._member.append(char)
        if char == '"' and state == COLON:
            self._key = json.loads("".join(self._member))
        elif char == '"' and state == AFTER and self._key in NAME and not self.name:
            self.name = json.loads("".join(self._member))


class CallParser:
    """Reads one answer in one format. `names` are those of the tools; a call of any other is text."""

    def __init__(self, tools: ToolFormat, names: Collection[str], make_id: Callable[[], str] = new_id) -> None:
        self._format, self._names, self._make_id = tools, frozenset(names), make_id
        self._count = 0
        """Calls that have begun."""
        self._deltas: list[Delta] = []
        self._read = self._read_text
        """Takes the next character: a method for each part of an answer."""
        self._watch = MarkerWatch(*tools.triggers)
        self._may_be_bare = tools.is_bare
        """Whether a call without trigger may begin, since nothing but white space has come."""
        self._is_list = False
        """Whether the calls of a trigger stand in brackets that the format does not ask for."""
        self._written: list[str] = []
        """The call as it was written up to here, in parts."""
        self._follows_call = False
        """Whether nothing but white space has come since the last call, which is then dropped."""
        self._begin_call("")

    def _begin_call(self, raw: str) -> None:
        self._raw = raw
        self._call = Call()
        self._tail = ""
        """What was read behind the call, or behind those before it, after white space."""

    @property
    def _raw(self) -> str:
        """The call as it was written up to here."""
        self._written = ["".join(self._written)]
        return self._written[0]

    @_raw.setter
    def _raw(self, raw: str) -> None:
        self._written = [raw]

    def _keep(self, text: str) -> None:
        self._written.append(text)

    def push(self, text: str) -> list[Delta]:
        """Take more of the answer's text; returns what it shows."""
        at = 0
        while at < len(text):
            end = self._read_plain(text, at)
            if end == at:
                self._read(text[at])
                end += 1
            at = end
        return self._drained()

    def finish(self) -> list[Delta]:
        """Return what was held, when the answer ends."""
        if self._read == self._read_text:
            self._show_text(self._watch.drain())
        elif self._read != self._read_end:
            self._break_off("")
        return self._drained()

    def _drained(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _show_text(self, text: str) -> None:
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = self._may_be_bare = False
            self._deltas.append(TextDelta(text))

    def _read_plain(self, text: str, at: int) -> int:
        """Read at once what changes no state, in text or in an argument that is a text; returns where it ends."""
        if self._call.is_in_text:
            match = PLAIN.match(text, at)
            if match is not None:
                self._keep(match[0])
                self._call.arguments.append(match[0])
                self._show_arguments()
                return match.end()
        elif self._read == self._read_text and not self._may_be_bare:
            shown, end = self._watch.push_plain(text, at)
            self._show_text(shown)
            return end
        return at

    def _read_text(self, char: str) -> None:
        shown, found = self._watch.push(char)
        if self._may_be_bare and shown.strip() == "{":
            self._may_be_bare = False
            self._begin_call(shown[:-1])
            self._read_call(char)
            return
        self._show_text(shown)
        if found:
            self._is_list = False
            self._begin_call(self._watch.drain())
            after = self._read_begin if self._format.begin else self._read_call
            self._read = self._read_head if self._format.has_head else after

    def _read_begin(self, char: str) -> None:
        """Read what stands before the first call of a trigger."""
        if char not in SPACE + self._format.begin:
            self._break_off(char)
            return
        self._keep(char)
        if char == self._format.begin:
            self._read = self._read_call

    def _read_call(self, char: str) -> None:
        """Read white space before a call, and its first character."""
        if char in SPACE:
            self._keep(char)
        elif char == "{":
            self._read = self._read_object
            self._read_object(char)
        elif char == "[" and self._format.is_tagged and not self._is_list:
            self._is_list = True
            self._keep(char)
        else:
            self._break_off(char)

    def _read_head(self, char: str) -> None:
        """Read the name, an id that is not used, and `[ARGS]`."""
        head = self._raw.lstrip().removeprefix(self._format.trigger) + char
        if not head.endswith(ARGS):
            if len(head) > HEAD_LENGTH or not (char.isalnum() or char in SPACE + NAME_MARKS + "[]"):
                self._break_off(char)
            else:
                self._keep(char)
            return
        match = HEAD.fullmatch(head)
        if match is None or match[1] not in self._names:
            self._break_off(char)
        else:
            self._keep(char)
            self._call.name, self._read = match[1], self._read_arguments

    def _read_arguments(self, char: str) -> None:
        """Read the arguments after a head."""
        call = self._call
        if not call.scanner.depth and char in SPACE:
            self._keep(char)
        elif not call.push_argument(char):
            self._break_off(char)
        else:
            self._keep(char)
            self._show_arguments()
            if not call.scanner.depth:
                self._end_call()

    def _read_object(self, char: str) -> None:
        """Read a call that is JSON; one without arguments begins at its end."""
        call = self._call
        if not call.push(char):
            self._break_off(char)
            return
        self._keep(char)
        has_ended = not call.scanner.depth
        if has_ended and call.name and not call.has_begun:
            call.arguments = ["{}"]
        if call.is_broken or (call.name and call.name not in self._names) or (has_ended and not call.name):
            self._break_off("")
            return
        self._show_arguments()
        if has_ended:
            self._end_call()

    def _show_arguments(self) -> None:
        """Show the arguments up to here, if the name is known."""
        call = self._call
        if not call.name or not any(call.arguments):
            return
        if not call.has_begun:
            call.has_begun = self._follows_call = True
            self._may_be_bare = False
            self._deltas.append(CallBegan(self._count, self._make_id(), call.name))
            self._count += 1
        self._deltas.append(CallArguments(self._count - 1, "".join(call.arguments)))
        call.arguments = []
        if not call.in_arguments:
            self._raw = ""  # the call is whole, whatever comes

    def _end_call(self) -> None:
        self._begin_call("")
        has_end = self._format.end or self._format.separator
        self._read = self._read_end if has_end else self._read_text

    def _read_end(self, char: str) -> None:
        """Read what ends a call, or what separates it from the next."""
        self._keep(char)
        self._tail = tail = (self._tail + char).lstrip()
        if tail and tail == self._format.end:
            self._read = self._read_text
        elif tail and tail == self._format.separator:
            self._begin_call(self._raw)
            self._read = self._read_call
        elif self._is_list and tail == "]":
            self._raw, self._tail, self._is_list = "", "", False
        elif self._format.is_tagged and tail in {",", "{"}:
            self._begin_call(self._raw[:-1] if tail == "{" else self._raw)
            self._read = self._read_call
            if tail == "{":
                self._read_call(char)
        elif not self._format.end.startswith(tail):
            text, self._raw, self._read = self._raw, "", self._read_text
            for late in text:
                self._read(late)

    def _break_off(self, char: str) -> None:
        """Give up a call that cannot go on with this character: what was read of it is text."""
        raw, self._raw, self._read = self._raw, "", self._read_text
        if self._call.in_arguments and self._call.has_begun:
            self._deltas.append(CallBroken(self._count - 1, raw))
            self._follows_call = False
        else:
            self._show_text(raw)
        self._call = Call()
        if char:
            self._read_text(char)
