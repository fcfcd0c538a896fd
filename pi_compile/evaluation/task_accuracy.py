"""Evaluate on tasks: how many questions each mode of an artifact answers right, and how often it agrees with dense.

A task is scored as EleutherAI's lm-evaluation-harness does. An answer a₁…aₙ after a context c has the log-likelihood Σ
log p(aᵢ | c, a₁…aᵢ₋₁). Multiple choice: the answer with the highest one is chosen (acc), or with the highest one per
character of its text (acc_norm, the space before it not counted). Last word: right if each of its tokens is the
likeliest one (acc); perplexity is exp(−mean log-likelihood) of the words. Shape letters: T tokens, A tokens of the
answer, V vocabulary, N items.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

from pi_compile.errors import TaskError
from pi_compile.evaluation.fidelity import ON_CPU, LoadOptions, Progress, counted, modes_of, same_as
from pi_compile.evaluation.reference import Logits, check_origin, reference_logits
from pi_compile.evaluation.task_files import MULTIPLE_CHOICE, Item, Task
from pi_compile.evaluation.window_scores import accuracy_interval


@dataclass(frozen=True, eq=False)
class Continuation:
    """The tokens of one answer of an item."""

    ids_T: npt.NDArray[np.int64]
    """Context and answer."""
    answer: int
    """Number of ids at the end that are the answer."""
    truncated: bool
    """Whether the beginning of the context is missing, because the model's own context is shorter."""


@dataclass(frozen=True)
class Likelihood:
    """A model's likelihood of one answer."""

    logp: float
    best: tuple[int, ...]
    """Most likely token at each position of the answer, given what is before it."""


@dataclass(frozen=True, eq=False)
class TaskScore:
    """Results of one model on one task."""

    right_N: npt.NDArray[np.bool_]
    right_norm_N: npt.NDArray[np.bool_]
    """Items right by likelihood per character; empty but for multiple choice."""
    answers: tuple[Any, ...]
    """The model's answers: the index of a choice, or the tokens that it puts in place of the last word."""
    perplexity: float | None
    """None for multiple choice."""


def requests(item: Item, encode: Callable[[str], list[int]], context: int) -> tuple[Continuation, ...]:
    """The answers of an item as tokens, for a model that takes up to `context` tokens.

    Context and answer are encoded together, because a tokenizer may join letters across the border. The tokens beyond
    the length of the context alone are the answer, so spaces at the context's end belong to the answer. The last token
    needs no logits, so that context + 1 tokens fit; longer texts lose their beginning. Raises TaskError for an answer
    that has no token of its own, or more tokens than `context`.
    """
    known = item.context.rstrip()
    spaces = item.context[len(known) :]
    start, found = len(encode(known)), []
    for text in item.answers:
        ids = encode(known + spaces + text)
        answer = len(ids) - start
        if start == 0 or not 1 <= answer <= context:
            raise TaskError(
                f"{item.location}: the answer {text!r} cannot be scored",
                expected=f"context of a token or more, then 1 to {context} of answer (the model's context)",
                found=f"{start} tokens of context, {len(ids)} with the answer",
            )
        kept = np.array(ids[-(context + 1) :], np.int64)
        found.append(Continuation(kept, answer, len(kept) < len(ids)))
    return tuple(found)


def likelihood(logits: Logits, request: Continuation) -> Likelihood:
    """The likelihood of one answer; logarithms are in float64."""
    answer = request.ids_T[-request.answer :]
    logp_AV = log_softmax(logits(request.ids_T[:-1], request.answer).astype(np.float64), axis=1)
    return Likelihood(float(logp_AV[np.arange(len(answer)), answer].sum()), tuple(logp_AV.argmax(1).tolist()))


def score(
    task: Task,
    task_requests: Sequence[tuple[Continuation, ...]],
    logits: Logits,
    on_item: Callable[[], None] = lambda: None,
) -> TaskScore:
    """Score a model on every item; `task_requests` has the requests of each. `on_item` is called after each item."""
    found = []
    for item_requests in task_requests:
        found.append([likelihood(logits, request) for request in item_requests])
        on_item()
    if task.kind == MULTIPLE_CHOICE:
        return _choices(task, [[one.logp for one in item] for item in found])
    words, right = [item[0] for item in found], []
    for word, (request,) in zip(words, task_requests, strict=True):
        right.append(word.best == tuple(request.ids_T[-request.answer :].tolist()))
    perplexity = math.exp(-sum(word.logp for word in words) / len(words))
    return TaskScore(np.array(right), np.zeros(0, bool), tuple(word.best for word in words), perplexity)


def _choices(task: Task, logp: list[list[float]]) -> TaskScore:
    chosen = [int(np.argmax(row)) for row in logp]
    lengths = [[len(text.removeprefix(" ")) for text in item.answers] for item in task.items]
    normed = [int(np.argmax(np.divide(row, length))) for row, length in zip(logp, lengths, strict=True)]
    right = np.array([item.right for item in task.items])
    return TaskScore(np.array(chosen) == right, np.array(normed) == right, tuple(chosen), None)


TaskRequests = list[tuple[Continuation, ...]]
"""The requests of each item of a task."""


def evaluate_tasks(
    artifact: Path, tasks: Sequence[Task], model: Path | None, *, progress: Progress, options: LoadOptions = ON_CPU
) -> list[dict[str, Any]]:
    """One row for each task: accuracy with its 95 % interval, and agreement of the answers, by mode.

    `model`: the checkpoint the artifact was packed from, scored on the same tokens in float32.
    Agreement of `dense` is with the checkpoint, of the others with `dense`. Raises CheckpointError for a checkpoint
    that the artifact was not packed from, TaskError for an answer that this model's tokens or context cannot hold.
    """
    with options.open_on_cpu(artifact) as opened:
        manifest = opened.manifest
        context = manifest.decoder.context_length if options.context is None else options.context
        task_requests = [[requests(item, opened.tokenizer.encode, context) for item in task.items] for task in tasks]
    origin = None if model is None else check_origin(manifest, model)
    same = same_as(manifest)
    modes = [mode for mode in modes_of(manifest) if mode not in same]
    total = sum(map(len, task_requests)) * (len(modes) + (model is not None))
    on_item = counted(progress, total)
    longest = max(len(one.ids_T) for one in itertools.chain(*itertools.chain(*task_requests)))
    scores: list[dict[str, TaskScore]] = [{} for _ in tasks]
    for mode in modes:
        with options.open(artifact, mode, context=max(2, min(longest, context))) as opened:
            # One cache for all: answers of an item share its context, which is computed once.
            logits = partial(opened.logits, cache=opened.new_cache())
            if mode == modes[0]:
                progress(0, total)
            for found, task, items in zip(scores, tasks, task_requests, strict=True):
                found[mode] = score(task, items, logits, on_item)
    scores = [{mode: found[same.get(mode, mode)] for mode in modes_of(manifest)} for found in scores]
    if origin is not None:
        reference = reference_logits(origin)
        for found, task, items in zip(scores, tasks, task_requests, strict=True):
            found["checkpoint"] = score(task, items, reference, on_item)
    return [{**_row(*case), "same_as": same} for case in zip(tasks, task_requests, scores, strict=True)]


def _row(task: Task, task_requests: TaskRequests, scores: Mapping[str, TaskScore]) -> dict[str, Any]:
    return {
        "task": str(task.path),
        "kind": task.kind,
        "items": len(task.items),
        "truncated": sum(any(one.truncated for one in item) for item in task_requests),
        "chance": sum(1 / len(item.answers) for item in task.items) / len(task.items)
        if task.kind == MULTIPLE_CHOICE
        else None,
        "modes": {mode: _mode(task, found, _compared_with(mode, scores)) for mode, found in scores.items()},
    }


def _compared_with(mode: str, scores: Mapping[str, TaskScore]) -> TaskScore | None:
    """The scores that a mode's answers are compared with."""
    return None if mode == "checkpoint" else scores.get("checkpoint" if mode == "dense" else "dense")


def _mode(task: Task, found: TaskScore, other: TaskScore | None) -> dict[str, Any]:
    row: dict[str, Any] = {"acc": float(found.right_N.mean()), "acc_interval": accuracy_interval(found.right_N)}
    if task.kind == MULTIPLE_CHOICE:
        row["acc_norm"] = float(found.right_norm_N.mean())
        row["acc_norm_interval"] = accuracy_interval(found.right_norm_N)
    else:
        row["perplexity"] = found.perplexity
    if other is None:
        return row | {"agreement": None}
    same = [a == b for a, b in zip(found.answers, other.answers, strict=True)]
    return row | {"agreement": sum(same) / len(same)}
