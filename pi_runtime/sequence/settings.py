"""The settings of an answer, as the Python API, the command line and the server give them."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypedDict, TypeVar, cast

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
    """Let a function that takes `**settings` refuse what is no setting, and its signature name each one.

    Help and notebooks look at the signature. The error is Python's own TypeError.
    """
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=kind)
        for name, kind in AnswerSettings.__annotations__.items()
    ]
    known = frozenset(parameter.name for parameter in (*own, *settings))

    @wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords.keys() - known:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        return function(*args, **keywords)

    checked.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
    return cast("_Function", checked)
