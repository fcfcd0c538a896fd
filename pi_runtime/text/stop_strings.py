"""Stop strings: they end a text where one of them appears, and no part of them is ever shown."""

from collections.abc import Collection, Sequence

from pi_runtime.errors import Setting, UsageError

MARKS = range(0xD800, 0xE000)
"""Characters that no text has, surrogates: each stands for a special token among the text."""


class StopStrings:
    """Holds back what may begin a stop string, and ends a text at the first one.

    The text ends at the first position where some stop string is complete; of several that are complete there, the
    longest counts. The stop string itself is not let through. The division into parts does not change the joined
    output, and no more is held back than could still become a stop string.

    The name of a special token in a stop string is met by that token too, which has no text, and not only by text that
    spells it: `</s>` and `\\n<|user|>` stop at the tokens.
    """

    def __init__(self, stops: Sequence[str], special: Collection[str] = ()) -> None:
        """Raises UsageError for an empty stop string."""
        # A str is a Sequence[str] too: its letters would each stop the text.
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise UsageError("not a list of strings", setting=Setting("stop"), found=repr(stops))
        if "" in stops:
            raise UsageError("an empty stop string", setting=Setting("stop"), expected="at least one character")
        found = [name for name in special if any(name in stop for stop in stops)]
        self._marks = dict(zip(sorted(found, key=len, reverse=True), map(chr, MARKS), strict=False))
        self._stops = {form: stop for stop in reversed(stops) for form in (self._marked(stop), stop)}
        """What ends a text, each with the stop string that it stands for."""
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.met: str | None = None
        """The stop string that ended the text."""

    def push(self, part: str, special: str | None = None) -> tuple[str, bool]:
        """Take the next part, and the name of a special token after it, whose text is not shown.

        Returns the text that can be shown now, and whether the text has ended.
        """
        if self.met is not None:
            return "", True
        text = self._held + part + self._marks.get(special or "", "")
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, stop = min(matches)
            self._held, self.met = "", self._stops[stop]
            return self._shown(text[:start]), True
        cut = len(text) - self._pending(text)
        self._held = text[cut:]
        return self._shown(text[:cut]), False

    def finish(self) -> str:
        """Return what was held back, when the text came to its own end."""
        held, self._held = self._held, ""
        return self._shown(held)

    def _marked(self, stop: str) -> str:
        """A stop string with the marks of the special tokens that it names."""
        for name, mark in self._marks.items():
            stop = stop.replace(name, mark)
        return stop

    def _shown(self, text: str) -> str:
        """Text without marks."""
        for mark in self._marks.values():
            text = text.replace(mark, "")
        return text

    def _pending(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        for n in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
