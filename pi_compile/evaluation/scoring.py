"""Score a task as EleutherAI's lm-evaluation-harness does, with whatever computes logits.

An answer a₁…aₙ after a context c has the log-likelihood Σ log p(aᵢ | c, a₁…aᵢ₋₁). Multiple choice: the answer with the
highest one is chosen (acc), or with the highest one per character of its text (acc_norm, the space before it not
counted). Last word: right if each of its tokens is the likeliest one (acc); perplexity is exp(−mean log-likelihood) of
the words. T tokens, V vocabulary, N items.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.errors import TaskError
from pi_compile.evaluation.hf_reference import Logits
from pi_compile.evaluation.task_files import CHOICE, Item, Task


@dataclass(frozen=True, eq=False)
class Request:
    """One answer of one item in tokens."""

    ids_T: npt.NDArray[np.int64]
    """Context and answer."""
    answer: int
    """How many of the ids, at the end, are the answer."""
    truncated: bool
    """The beginning of the context is missing, because the model's context is shorter."""


@dataclass(frozen=True)
class Likelihood:
    """What a model says of one answer."""

    logp: float
    best: tuple[int, ...]
    """Likeliest token at each place of the answer, after the context and the answer so far."""


@dataclass(frozen=True, eq=False)
class TaskScore:
    """One model on one task."""

    right_N: npt.NDArray[np.bool_]
    right_norm_N: npt.NDArray[np.bool_]
    """Multiple choice only; else empty."""
    answers: tuple[Any, ...]
    """What the model would answer: index of a choice, or the tokens in the last word's place."""
    perplexity: float | None
    """Last word only."""


def requests(item: Item, encode: Callable[[str], list[int]], context: int) -> tuple[Request, ...]:
    """The answers of an item, for a model that takes up to `context` tokens.

    Context and answer are encoded together, and what goes beyond the length of the context alone is the answer: a
    tokenizer may join letters across the border. So spaces at the context's end count as the answer's beginning. Of the
    last token no logits are needed, so that context + 1 tokens fit; longer ones lose their beginning. Raises TaskError
    for an answer that has no token of its own, or more than the context.
    """
    known = item.context.rstrip()
    spaces = item.context[len(known) :]
    start, found = len(encode(known)), []
    for text in item.answers:
        ids = encode(known + spaces + text)
        answer = len(ids) - start
        if start == 0 or not 1 <= answer <= context:
            raise TaskError(
                f"{item.where}: the answer {text!r} cannot be scored",
                expected=f"context of a token or more, then 1 to {context} of answer (the model's context)",
                found=f"{start} tokens of context, {len(ids)} with the answer",
            )
        kept = np.array(ids[-(context + 1) :], np.int64)
        found.append(Request(kept, answer, len(kept) < len(ids)))
    return tuple(found)


def likelihood(logits: Logits, request: Request) -> Likelihood:
    """Ask a model about one answer; logarithms in float64."""
    answer = request.ids_T[-request.answer :]
    rows_AV = logits(request.ids_T[:-1], request.answer).astype(np.float64)
    rows_AV -= rows_AV.max(1, keepdims=True)
    logp_AV = rows_AV - np.log(np.exp(rows_AV).sum(1, keepdims=True))
    return Likelihood(float(logp_AV[np.arange(len(answer)), answer].sum()), tuple(logp_AV.argmax(1).tolist()))


def score(
    task: Task, asked: Sequence[tuple[Request, ...]], logits: Logits, step: Callable[[], None] = lambda: None
) -> TaskScore:
    """Ask a model about every item; `asked` are the requests of each. `step` is called after each item."""
    found = []
    for item_requests in asked:
        found.append([likelihood(logits, request) for request in item_requests])
        step()
    if task.kind == CHOICE:
        return _choices(task, [[one.logp for one in item] for item in found])
    words, right = [item[0] for item in found], []
    for word, (request,) in zip(words, asked, strict=True):
        right.append(word.best == tuple(request.ids_T[-request.answer :].tolist()))
    perplexity = math.exp(-sum(word.logp for word in words) / len(words))
    return TaskScore(np.array(right), np.zeros(0, bool), tuple(word.best for word in words), perplexity)


def _choices(task: Task, logp: list[list[float]]) -> TaskScore:
    chosen = [int(np.argmax(row)) for row in logp]
    lengths = [[len(text.removeprefix(" ")) for text in item.answers] for item in task.items]
    normed = [int(np.argmax(np.divide(row, length))) for row, length in zip(logp, lengths, strict=True)]
    right = np.array([item.right for item in task.items])
    return TaskScore(np.array(chosen) == right, np.array(normed) == right, tuple(chosen), None)


def mean_and_error(right_N: npt.NDArray[np.bool_]) -> tuple[float, float | None]:
    """Share p of right items, and its standard error √(p (1 − p) / (N − 1)); none for a single item."""
    share = float(right_N.mean())
    return share, math.sqrt(share * (1 - share) / (len(right_N) - 1)) if len(right_N) > 1 else None
