"""Stop strings: they end a text where one of them appears, and no part of them is ever shown."""

from collections.abc import Sequence

from pi_runtime.errors import Setting, UsageError


class StopStrings:
    """Holds back what may begin a stop string, and ends a text at the first one.

    The text ends at the first position where some stop string is complete; of several that are complete there, the
    longest counts. The stop string itself is not let through. The division into parts does not change the joined
    output, and no more is held back than could still become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises UsageError for an empty stop string."""
        # A str is a Sequence[str] too: its letters would each stop the text.
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise UsageError("not a list of strings", setting=Setting("stop"), found=repr(stops))
        if "" in stops:
            raise UsageError("an empty stop string", setting=Setting("stop"), expected="at least one character")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, part: str) -> tuple[str, bool]:
        """Take the next part; returns the text that can be shown now, and whether the text has ended."""
        if self._stopped:
            return "", True
        text = self._held + part
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held, self._stopped = "", True
            return text[: min(matches)[1]], True
        cut = len(text) - self._pending(text)
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """Return what was held back, when the text came to its own end."""
        held, self._held = self._held, ""
        return held

    def _pending(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        for n in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
