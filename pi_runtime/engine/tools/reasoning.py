"""Models that think before they answer: their thoughts come apart from the answer.

A call within thoughts that were not closed is a part of them: the model may only speak of it. It is a call, and ends
the thoughts, where the template has Qwen3-Coder's form of calls (`ToolFormat.ends_thoughts`): these templates allow a
model to reason before a call and to write nothing behind it, and llama.cpp reads their models so.
"""

from dataclasses import dataclass
from typing import Self

from pi_runtime.engine.events import Delta, ReasoningDelta, TextDelta
from pi_runtime.engine.tools import harmony
from pi_runtime.engine.tools.marker import MarkerWatch
from pi_runtime.text.quotation import parts_of

MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around thoughts."""

    begin: str
    end: str
    after: str = ""
    """What follows thoughts, before the channel of the next message; white space where there are no channels."""
    answer: str = ""
    """What stands before the answer proper, where an answer is messages in channels."""
    further: tuple[str, ...] = ()
    """More markers, by which messages are told apart."""

    @classmethod
    def of(cls, template: str) -> Self | None:
        """The format of a chat template; None where its model does not think."""
        if harmony.CHANNEL in template:
            begin, answer = (f"{harmony.CHANNEL}{name}{harmony.MESSAGE}" for name in ("analysis", "final"))
            return cls(begin, "<|end|>", f"{harmony.START}assistant", answer, harmony.MARKERS)
        return next((cls(*pair) for pair in MARKERS if pair[1] in template), None)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the tokenizer."""
        return self.begin, self.end, *self.further

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends within thoughts, which the template or the assistant's text up to here has begun."""
        return self._last(prompt) == self.begin

    def is_closed(self, prompt: str) -> bool:
        """Whether there will be no thoughts: they have been ended, or the assistant's text has begun without them."""
        last = self._last(prompt)
        return last == self.end or (not last and not self.answer and bool(parts_of(prompt)[1].strip()))

    def _last(self, prompt: str) -> str:
        """The last marker of thoughts in the assistant's text up to here, or the one that stands before it."""
        before, said = parts_of(prompt)
        begin, end = said.rfind(self.begin), said.rfind(self.end)
        if begin != end:
            return self.begin if begin > end else self.end
        return next((marker for marker in (self.begin, self.end) if before.rstrip().endswith(marker)), "")


class ReasoningParser:
    """Splits thoughts from an answer that begins with them; white space around both is dropped.

    `call` begins a call of a tool, where such a call ends thoughts too.
    """

    def __init__(self, reasoning: ReasoningFormat, prompt: str, call: str | None = None) -> None:
        self._format, self._call = reasoning, call
        self._ends = (reasoning.end,) if call is None else (reasoning.end, call)
        self.thinks = reasoning.is_open(prompt)
        """Whether the text that comes next is part of the thoughts."""
        self._may_begin = not self.thinks and not reasoning.is_closed(prompt)
        self._watch = MarkerWatch(*(self._ends if self.thinks else (reasoning.begin,)))
        self._is_blank = self.thinks and prompt.rstrip().endswith(reasoning.begin)
        """Whether nothing but white space has come of the present part, which is then dropped."""

    def push(self, text: str) -> list[Delta]:
        """Take more of the answer's text; returns thoughts and text that it shows."""
        found: list[Delta | None] = []
        at = 0
        while at < len(text):
            if not self.thinks and not self._may_begin:
                found.append(self._shown(text[at:]))
                break
            shown, end = self._watch.push_plain(text, at) if self.thinks else ("", at)
            found.append(self._shown(shown) if end > at else self._push(text[at]))
            at = max(end, at + 1)
        return [delta for delta in found if delta is not None]

    def _push(self, char: str) -> Delta | None:
        shown, found = self._watch.push(char)
        if found:
            marker = self._watch.take()
            self.thinks, self._may_begin = self._may_begin, False
            self._watch, self._is_blank = MarkerWatch(*self._ends), True
            return self._shown(marker) if marker.lstrip() == self._call else None
        if self._may_begin and shown:
            # It begins with something else: all of it is text, and stays as it is.
            self._may_begin = False
            return TextDelta(shown + self._watch.take())
        return self._shown(shown)

    def finish(self) -> list[Delta]:
        """Return what was held, when the answer ends."""
        held = self._shown(self._watch.take().rstrip() if self.thinks else self._watch.take())
        return [] if held is None else [held]

    def _shown(self, text: str) -> Delta | None:
        if self._is_blank:
            text = text.lstrip()
        if not text:
            return None
        self._is_blank = False
        return ReasoningDelta(text) if self.thinks else TextDelta(text)
