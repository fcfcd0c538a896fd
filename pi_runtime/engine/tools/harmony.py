"""Reads answers in harmony, the form of gpt-oss: messages in channels, each with a header.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>arguments<|call|>

Thoughts are in the channel `analysis`. What is in another channel is text, or the arguments of the tool that the header
names. As in other forms a call begins once its arguments do, and one that breaks off is left as it is.
Source: OpenAI's description of the form (openai/harmony, docs/format.md).
"""

import re
from collections.abc import Callable, Collection

from pi_runtime.engine.events import CallArguments, CallBegan, CallBroken, Delta, ReasoningDelta, TextDelta
from pi_runtime.engine.tools.calls import Call
from pi_runtime.engine.tools.formats import CHANNEL, ENDS, MARKERS, MESSAGE, START
from pi_runtime.engine.tools.scanners import DONE, SPACE

_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_ROLE = f"{START}assistant"
_HEADER_LENGTH = 256
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


class HarmonyParser:
    """Splits one answer to a prompt into thoughts, text and calls of the tools with these names."""

    def __init__(self, names: Collection[str], make_id: Callable[[], str], *, thinks: bool) -> None:
        self._names, self._make_id = frozenset(names), make_id
        self.thinks = thinks
        """Whether the text that comes next is part of the thoughts."""
        self._header: str | None = None if thinks else ""
        """The header up to here; None within a message."""
        self._held = ""
        """The beginning of what may be a marker."""
        self._call: Call | None = None
        """The call whose arguments the message is."""
        self._count = 0
        """Calls that have begun."""
        self._raw: list[str] = []
        """The call as it was written up to here."""

    def push(self, text: str) -> list[Delta]:
        """Take more of the answer's text; returns what it shows."""
        text, deltas, at = self._held + text, list[Delta](), 0
        for found in _MARKER.finditer(text):
            deltas += self._plain(text[at : found.start()])
            deltas += self._marker(found[0])
            at = found.end()
        rest = text[at:]
        last = rest.rfind("<")
        is_held = last >= 0 and any(marker.startswith(rest[last:]) for marker in MARKERS)
        self._held = rest[last:] if is_held else ""
        return deltas + self._plain(rest[:last] if is_held else rest)

    def finish(self) -> list[Delta]:
        """Return what was held, when the answer ends."""
        held, self._held = self._held, ""
        deltas = self._plain(held)
        if self._header and _MARKER.search(self._header) is None:
            deltas.append(TextDelta(self._header))
        return deltas + self._end_message()

    def _marker(self, marker: str) -> list[Delta]:
        if self._header is None:
            if marker in ENDS or marker == START:
                deltas = self._end_message()
                self._header = START if marker == START else ""
                return deltas
            return self._plain(marker)
        if marker == MESSAGE and CHANNEL in self._header:
            return self._begin_message(self._header)
        if marker in ENDS:
            # A message without a header: nothing is said by its end.
            shown, self._header = self._header, ""
            return [TextDelta(shown)] if shown else []
        return self._add_to_header(marker)

    def _plain(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._header is not None:
            return self._add_to_header(text)
        if self._call is None:
            return [ReasoningDelta(text) if self.thinks else TextDelta(text)]
        return self._arguments(self._call, text)

    def _add_to_header(self, text: str) -> list[Delta]:
        assert self._header is not None
        header = self._header + text
        if len(header) <= _HEADER_LENGTH and _may_be_header(header.lstrip()):
            self._header = header
            return []
        self._header = None
        return [TextDelta(header)]

    def _begin_message(self, header: str) -> list[Delta]:
        self._header, recipient = None, _RECIPIENT.search(header)
        if recipient is None:
            self.thinks = header.rpartition(CHANNEL)[2].split()[:1] == ["analysis"]
        elif recipient[1] in self._names:
            self._call, self._raw = Call(recipient[1]), [header + MESSAGE]
        else:
            return [TextDelta(header + MESSAGE)]
        return []

    def _arguments(self, call: Call, text: str) -> list[Delta]:
        """Take more of a call's arguments; what follows them is text."""
        rest, deltas = "", list[Delta]()
        for n, char in enumerate(text):
            is_around = not call.scanner.depth and char in SPACE
            if not is_around and not call.push_argument(char):
                rest = text[n:]
                break
        self._raw.append(text[: len(text) - len(rest)])
        if call.arguments:
            if not call.has_begun:
                call.has_begun = True
                deltas.append(CallBegan(self._count, self._make_id(), call.name))
                self._count += 1
            deltas.append(CallArguments(self._count - 1, "".join(call.arguments)))
            call.arguments = []
        return deltas + (self._end_message() + self._plain(rest) if rest else [])

    def _end_message(self) -> list[Delta]:
        """End a message; returns what is to be said of a call that is not whole."""
        call, self._call, self.thinks = self._call, None, False
        if call is None or call.scanner.state == DONE:
            return []
        raw = "".join(self._raw)
        return [CallBroken(self._count - 1, raw) if call.scanner.depth else TextDelta(raw)]


def _may_be_header(text: str) -> bool:
    """Whether it is a header up to here: the role, which may be missing, and then a channel or a recipient."""
    after = text.removeprefix(_ROLE).lstrip()
    return _ROLE.startswith(text) or any(after.startswith(part) or part.startswith(after) for part in (CHANNEL, "to="))
