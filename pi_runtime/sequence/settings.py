"""The settings of an answer, as the Python API, the command line and the server give them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

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


_DEFAULTS: dict[str, Any] = {"min_tokens": 0, "stop": (), "shown_tokens": (), "expected": ()}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def names_settings(function: _Function) -> _Function:
    """Let the signature of a function name each setting that its `**settings` takes, where help and notebooks look."""
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=kind)
        for name, kind in AnswerSettings.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
    return function
