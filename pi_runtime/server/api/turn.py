"""An assistant's turn as it comes: text, thoughts and calls, whatever form it is written in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pi_runtime.generation import Stats
from pi_runtime.sampling import TokenLogprobs
from pi_runtime.server.api.logprobs import ShownLogprobs
from pi_runtime.server.api.usage import FINISH_REASONS
from pi_runtime.server.jobs import End, Part
from pi_runtime.server.tools.deltas import CallArguments, CallBegan, CallBroken, Delta, ReasoningDelta, TextDelta
from pi_runtime.server.tools.output import OutputParser


@dataclass
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: str = ""


class News(NamedTuple):
    """What is new of a turn, and the log-probabilities of tokens whose text is shown now."""

    deltas: Sequence[Delta]
    logprobs: Sequence[TokenLogprobs]


class Turn:
    """One answer, gathered."""

    def __init__(self, parser: OutputParser, shown: ShownLogprobs) -> None:
        self._parser, self._shown = parser, shown
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, Call] = {}
        self.logprobs: list[TokenLogprobs] = []
        self.began = False
        self.end: End | None = None

    @property
    def text(self) -> str:
        """What it says."""
        return "".join(self._texts)

    @property
    def calls(self) -> list[Call]:
        """The calls that are whole; one that broke off is text."""
        return list(self._calls.values())

    @property
    def reasoning(self) -> str:
        """What it thinks."""
        return "".join(self._thoughts)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of its thoughts."""
        return self._parser.reasoning_tokens

    @property
    def is_cut(self) -> bool:
        """Whether the arguments of a call broke off: nobody should run it."""
        return self._parser.is_cut

    @property
    def stats(self) -> Stats | None:
        """Its figures; None until it has ended."""
        return None if self.end is None else self.end.stats

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why it ended, in OpenAI's words. `tool_calls` asks for all calls to be run."""
        assert self.end is not None
        found = FINISH_REASONS[self.end.finish_reason]
        return "tool_calls" if self.calls and found == "stop" and not self.is_cut else found

    def take(self, part: Part) -> News:
        """Take a part of it; returns what it is made of."""
        self.began = True
        deltas = self._parser.push(part.text, len(part.tokens))
        return self._gather(deltas, self._shown.take(part.text, part.logprobs))

    def finish(self, end: End) -> News:
        """Take its end; returns what was held until then."""
        self.began, self.end = True, end
        return self._gather(self._parser.finish(), self._shown.finish(end))

    def _gather(self, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprobs]) -> News:
        self.logprobs += logprobs
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    self._texts.append(text)
                case ReasoningDelta(text):
                    self._thoughts.append(text)
                case CallBegan(index, call_id, name):
                    self._calls[index] = Call(call_id, name)
                case CallArguments(index, text):
                    self._calls[index].arguments += text
                case CallBroken(index, text):
                    del self._calls[index]
                    self._texts.append(text)
        return News(deltas, logprobs)
