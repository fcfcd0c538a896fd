"""What an answer is made of as it comes: one union of events, whatever form of API writes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pi_runtime.sequence.logprobs import TokenLogprobs
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
class PromptLogprobs(_Event):
    """The log-probabilities of the prompt's tokens but the first, before anything else of its answers."""

    found: Sequence[TokenLogprobs]


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


Delta = TextDelta | ReasoningDelta | CallBegan | CallArguments | CallBroken
"""What a parser finds in text."""
Event = Delta | NothingShown | PromptLogprobs | End


def joined(deltas: list[Delta]) -> list[Delta]:
    """The deltas with neighbours of one kind made one."""
    found: list[Delta] = []
    for delta in deltas:
        match found[-1:], delta:
            case [TextDelta(before)], TextDelta(text):
                found[-1] = TextDelta(before + text)
            case [ReasoningDelta(before)], ReasoningDelta(text):
                found[-1] = ReasoningDelta(before + text)
            case [CallArguments(index, before)], CallArguments(_, text) if delta.index == index:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(delta)
    return found
