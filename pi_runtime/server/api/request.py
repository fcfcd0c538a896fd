"""What every form of a request becomes: prompts for the engine, and how their answers are made and read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pi_runtime.engine.sessions.session import Session
from pi_runtime.sequence.settings import AnswerSettings
from pi_runtime.server.tools.output import PLAIN, OutputFormat
from pi_runtime.text.grammar import Grammar


@dataclass(frozen=True)
class Prompt:
    """What the engine continues, and how the answer is read."""

    tokens: Sequence[int] | str
    """Token ids, taken as they are; or text that continues a session."""
    text: str = ""
    """What a template made, by which thoughts may have begun already."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools whose calls are found in the answer."""
    output: OutputFormat = PLAIN
    grammar: Grammar | None = None
    """What the answer must be; None where it is free."""

    @property
    def shown_tokens(self) -> Sequence[int]:
        """Special tokens that the text of the answer shows, for those who read it."""
        return self.output.shown_tokens(self.tools)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A request for answers that has been read and checked, whatever form of API it came in."""

    prompts: Sequence[Prompt]
    count: int = 1
    """Answers to each prompt."""
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    streams: bool = False
    """Whether events are written as they come."""
    generates: bool = True
    """False where only the prompts are wanted, and their log-probabilities."""
    prompt_logprobs: int | None = None
    """How many likeliest tokens come with the log-probabilities of the prompts; None where these are not wanted."""
    prediction: str = ""
    """Text that is likely to come."""
    cache_salt: str | None = None
    """Given by the request, where only those with the same are to share what is kept of its prompts."""
    session: Session | None = None
    """The session whose text the prompt continues; it has one answer."""
    stop_tokens: Sequence[int] = ()
    """Tokens that end a session's turn, and become part of its text."""

    @property
    def answers(self) -> int:
        """Answers that the engine writes."""
        return len(self.prompts) * self.count * self.generates
