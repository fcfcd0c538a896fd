"""Evaluate on tasks: how many questions each mode of an artifact answers right, and how often it agrees with dense.

Shape letter: N items of a task.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pi_compile.evaluation.fidelity import Progress, counted, modes_of, same_as
from pi_compile.evaluation.intervals import accuracy_interval
from pi_compile.evaluation.load_options import ON_CPU, LoadOptions
from pi_compile.evaluation.reference import check_origin, reference_logits
from pi_compile.evaluation.scoring import Continuation, TaskScore, requests, score
from pi_compile.evaluation.task_files import MULTIPLE_CHOICE, Task

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
