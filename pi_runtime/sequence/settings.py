"""The settings of an answer, as the Python API, the command line and the server give them."""

from collections.abc import Sequence
from typing import TypedDict

from pi_runtime.sequence.sampling import Sampling
from pi_runtime.text.grammar import Grammar


class AnswerSettings(TypedDict, total=False):
    """The settings of an answer. What is left out has no effect."""

    max_tokens: int | None
    """Most tokens; None goes on until the model ends or the context is full."""
    min_tokens: int
    """Up to so many tokens neither the model nor a stop string ends the text."""
    sampling: Sampling | None
    """How tokens are chosen; None takes the checkpoint's generation defaults."""
    stop: Sequence[str]
    """Texts that end the answer."""
    logprobs: int | None
    """Keep the log-probability of each token, and of so many likeliest ones; None keeps none."""
    grammar: Grammar | None
    """What the text must be, or begin as where something else ends it."""
    shown_tokens: Sequence[int]
    """Special tokens whose text is not left out: markers of tool calls, say."""
    expected: Sequence[int]
    """Tokens that are likely to come. They change no text, only how fast it comes where drafts run."""
