"""What an answer is made of as it comes: one union of events, whatever form of API writes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from pi_runtime.sequence.sampling import TokenLogprobs
from pi_runtime.sequence.stats import Stats


@dataclass(frozen=True, kw_only=True)
class _Event:
    tokens: Sequence[int] = ()
    """Tokens that came with this event; one without text of its own comes with the next."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Log-probabilities of tokens whose text is shown now, where they were asked for."""
    stats: Stats | None = None
    """The figures of the answer up to now."""


@dataclass(frozen=True)
class TextDelta(_Event):
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta(_Event):
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True)
class CallBegan(_Event):
    """A call of a tool; `index` counts those of one answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments(_Event):
    """More of a call's arguments: JSON as text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallBroken(_Event):
    """The end of a call whose arguments broke off: they are no JSON, and nobody should run it.

    `text` is the call as the model wrote it up to here, for those who have shown nothing of it yet.
    """

    index: int
    text: str


@dataclass(frozen=True)
class NothingShown(_Event):
    """Tokens have come, but no text that can be shown yet."""


@dataclass(frozen=True)
class PromptProgress(_Event):
    """So many tokens of the prompt have been read, or were stored."""

    read: int


@dataclass(frozen=True)
class PromptLogprobs(_Event):
    """The log-probabilities of the prompt's tokens but the first, before anything else of its answers."""

    found: Sequence[TokenLogprobs]


@dataclass(frozen=True)
class Embedded(_Event):
    """The vector of a text that was to be embedded."""

    vector: list[float]


@dataclass(frozen=True)
class End(_Event):
    """How an answer ended: its reason is the engine's `end`, `stop`, `length`, `context` or `cancelled`.

    It has no figures where nothing was generated, as none was asked for.
    """

    finish_reason: str
    ending: TokenLogprobs | None = None
    """The log-probability of the token that ended the text and is no part of it, if these were asked for."""
    reasoning_tokens: int = 0
    """Tokens of the answer's thoughts."""
    stop_string: str | None = None
    """The stop string that ended it, where one did."""


Delta = TextDelta | ReasoningDelta | CallBegan | CallArguments | CallBroken
"""What a parser finds in text."""
Event = Delta | NothingShown | PromptProgress | PromptLogprobs | Embedded | End


@dataclass
class GatheredCall:
    """A call of a tool, gathered from the events of an answer."""

    id: str
    name: str
    arguments: str


@dataclass
class Gathered:
    """The events of an answer up to now, and the text, thoughts and calls that they make."""

    events: list[Event] = field(default_factory=list, kw_only=True)

    @property
    def text(self) -> str:
        """The text of the answer. A call that broke off is text."""
        return "".join(event.text for event in self.events if isinstance(event, TextDelta | CallBroken))

    @property
    def reasoning(self) -> str:
        """The model's thoughts before the answer."""
        return "".join(event.text for event in self.events if isinstance(event, ReasoningDelta))

    @property
    def calls(self) -> list[GatheredCall]:
        """The calls that have not broken off."""
        found: dict[int, tuple[CallBegan, list[str]]] = {}
        for event in self.events:
            match event:
                case CallBegan(index):
                    found[index] = event, []
                case CallArguments(index, text):
                    found[index][1].append(text)
                case CallBroken(index):
                    del found[index]
        return [GatheredCall(call.id, call.name, "".join(arguments)) for call, arguments in found.values()]

    @property
    def is_cut(self) -> bool:
        """Whether the arguments of a call broke off: nobody should run it."""
        return any(isinstance(event, CallBroken) for event in self.events)


def joined(deltas: list[Delta]) -> list[Delta]:
    """The deltas with neighbours of one kind made one."""
    found: list[Delta] = []
    for _, group in groupby(deltas, lambda delta: (type(delta), getattr(delta, "index", None))):
        first, *more = group
        if isinstance(first, CallBegan | CallBroken):
            found += [first, *more]
        else:
            found.append(replace(first, text="".join(getattr(delta, "text", "") for delta in (first, *more))))
    return found
