"""An assistant's turn as it comes: text, thoughts and calls, whatever form it is written in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pi_runtime.generation import Stats
from pi_runtime.sampling import TokenLogprobs
from pi_runtime.server.api.usage import FINISH_REASONS
from pi_runtime.server.jobs import End, Part
from pi_runtime.server.tools.deltas import CallArguments, CallBegan, Delta, ReasoningDelta, TextDelta


class Parser(Protocol):
    """Splits an answer's text as it comes."""

    def push(self, text: str) -> list[Delta]:
        """Take more of the text."""

    def finish(self) -> list[Delta]:
        """Return what was held, when the answer ends."""


class PlainParser:
    """Takes all text for the answer's own."""

    def push(self, text: str) -> list[Delta]:
        """Return it as it is."""
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing was held."""
        return []


@dataclass
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: str = ""


class Turn:
    """One answer, gathered."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._thinks = False
        self.calls: list[Call] = []
        self.logprobs: list[TokenLogprobs] = []
        self.reasoning_tokens = 0
        self.began = False
        self.end: End | None = None

    @property
    def text(self) -> str:
        """What it says."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """What it thinks."""
        return "".join(self._thoughts)

    @property
    def stats(self) -> Stats | None:
        """Its figures; None until it has ended."""
        return None if self.end is None else self.end.stats

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why it ended, in OpenAI's words."""
        assert self.end is not None
        found = FINISH_REASONS[self.end.finish_reason]
        return "tool_calls" if self.calls and found == "stop" else found

    def take(self, part: Part) -> Sequence[Delta]:
        """Take a part of it; returns what it is made of."""
        self.began = True
        self.logprobs += part.logprobs
        deltas = self._parser.push(part.text)
        self._gather(deltas)
        # Tokens without text of their own belong to what came before.
        self.reasoning_tokens += len(part.tokens) * self._thinks
        return deltas

    def finish(self, end: End) -> Sequence[Delta]:
        """Take its end; returns what was held until then."""
        self.began, self.end = True, end
        deltas = self._parser.finish()
        self._gather(deltas)
        return deltas

    def _gather(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._thinks = isinstance(delta, ReasoningDelta)
            match delta:
                case TextDelta(text):
                    self._texts.append(text)
                case ReasoningDelta(text):
                    self._thoughts.append(text)
                case CallBegan(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
