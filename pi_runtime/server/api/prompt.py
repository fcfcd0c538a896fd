"""What every form of a request becomes: texts that the engine continues, and how their answers are made and read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pi_runtime.engine.tools.output import PLAIN, OutputFormat
from pi_runtime.sequence.settings import AnswerSettings

Goal = Literal["answers", "reading", "texts"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the engine is asked for, read and checked, whatever form of API it came in."""

    texts: Sequence[Sequence[int]]
    """What is continued: token ids, taken as they are."""
    count: int = 1
    """Answers to each text."""
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    streams: bool = False
    """Whether events are written as they come."""
    goal: Goal = "answers"
    """`reading`: the texts are computed, so that later answers to them come sooner. `texts`: they are only given back,
    with their log-probabilities where these are wanted."""
    logprobs: int | None = None
    """How many likeliest tokens come with the log-probabilities of the texts; None where these are not wanted."""
    rendered: str = ""
    """What a template made, by which thoughts may have begun already."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools whose calls are found in the answers."""
    output: OutputFormat = PLAIN
    """How the model writes calls and thoughts."""
    prediction: str = ""
    """Text that is likely to come."""
    cache_salt: str | None = None
    """Given by the request, where only those with the same are to share what is kept of its texts."""

    @property
    def answers(self) -> int:
        """Answers that the engine writes."""
        return len(self.texts) * self.count * (self.goal == "answers")
