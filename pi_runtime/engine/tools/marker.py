"""The watch for markers in an answer as it comes."""


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

    def take(self) -> str:
        """Return what is held, and hold nothing."""
        held = "".join((*self._blanks, self._body))
        self._blanks, self._body = [], ""
        return held
