"""The watch for markers in an answer as it comes."""


class MarkerWatch:
    """Lets text through until a marker comes. White space is held too, for what precedes a marker belongs to it."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self.held = ""
        """White space and the beginning of what may be a marker; once it is found, the whole of it."""

    def push(self, char: str) -> tuple[str, bool]:
        """Take the next character; returns the text that can be shown now, and whether a marker is complete."""
        self.held += char
        body = self.held.lstrip()
        # White space stands nowhere in a marker, so no more than its length is searched.
        start = next(n for n in range(len(body) + 1) if self._may_begin(body[n:].lstrip()))
        cut = len(self.held) - len(body) + start if start else 0
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown, self.held.lstrip() in self._markers

    def _may_begin(self, text: str) -> bool:
        return any(marker.startswith(text) for marker in self._markers)

    def push_plain(self, text: str, start: int) -> tuple[str, int]:
        """Take what cannot begin a marker at once; returns what can be shown now, and where it ended."""
        found = [at for first in {marker[0] for marker in self._markers} if (at := text.find(first, start)) >= 0]
        end = min(found, default=len(text))
        if end == start or self.held.strip():
            return "", start
        shown = (self.held + text[start:end]).rstrip()
        self.held = (self.held + text[start:end])[len(shown) :]
        return shown, end

    def take(self) -> str:
        """Return what is held, and hold nothing."""
        held, self.held = self.held, ""
        return held
