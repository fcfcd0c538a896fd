"""What an answer is made of as it comes, and the watch for a marker in it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True)
class CallBegan:
    """A call of a tool; `index` counts those of one answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: JSON as text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallBroken:
    """The end of a call whose arguments broke off: they are no JSON, and nobody should run it.

    `text` is the call as the model wrote it up to here, for those who have told nobody of it yet.
    """

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | CallBegan | CallArguments | CallBroken


def joined(deltas: list[Delta]) -> list[Delta]:
    """The deltas with neighbours of one kind made one."""
    found: list[Delta] = []
    for delta in deltas:
        match found[-1:], delta:
            case [TextDelta(before)], TextDelta(text):
                found[-1] = TextDelta(before + text)
            case [ReasoningDelta(before)], ReasoningDelta(text):
                found[-1] = ReasoningDelta(before + text)
            case [CallArguments(index, before)], CallArguments(_, text) if delta.index == index:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(delta)
    return found


class MarkerWatch:
    """Lets text through until a marker comes. White space is held too, for what precedes a marker belongs to it."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self.held = ""
        """White space and the beginning of what may be the marker; once it is found, the whole of it."""

    def push(self, char: str) -> tuple[str, bool]:
        """Take the next character; returns the text that can be shown now, and whether the marker is complete."""
        self.held += char
        body = self.held.lstrip()
        # White space stands nowhere in a marker, so no more than its length is searched.
        start = next(n for n in range(len(body) + 1) if self._marker.startswith(body[n:].lstrip()))
        cut = len(self.held) - len(body) + start if start else 0
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown, self.held.lstrip() == self._marker

    def push_plain(self, text: str, start: int) -> tuple[str, int]:
        """Take what cannot begin the marker at once; returns what can be shown now, and where it ended."""
        end = text.find(self._marker[0], start)
        end = len(text) if end < 0 else end
        if end == start or self.held.strip():
            return "", start
        shown = (self.held + text[start:end]).rstrip()
        self.held = (self.held + text[start:end])[len(shown) :]
        return shown, end

    def take(self) -> str:
        """Return what is held, and hold nothing."""
        held, self.held = self.held, ""
        return held
