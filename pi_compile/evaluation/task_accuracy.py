"""Evaluate on tasks: how many questions each mode of an artifact gets right, and whether it answers as dense does."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pi_compile.evaluation.fidelity import modes_of
from pi_compile.evaluation.hf_reference import check_origin, original_logits
from pi_compile.evaluation.load_options import CPU, Where
from pi_compile.evaluation.scoring import Request, TaskScore, mean_and_error, requests, score
from pi_compile.evaluation.task_files import CHOICE, Task

Progress = Callable[[int, int], None]
Asked = list[tuple[Request, ...]]
"""The requests of each item of a task."""


def evaluate_tasks(
    artifact: Path, tasks: Sequence[Task], model: Path | None, *, progress: Progress, where: Where = CPU
) -> list[dict[str, Any]]:
    """A row a task: accuracy with its standard error by mode, and agreement of the answers.

    `model`: the checkpoint the artifact was packed from, asked the same tokens through transformers in float32.
    Agreement of `dense` is with the checkpoint, of the others with `dense`. Raises CheckpointError for a checkpoint
    that the artifact was not packed from, TaskError for an answer that this model's tokens or context cannot hold.
    """
    with where.read(artifact) as opened:
        manifest = opened.manifest
        context = manifest.decoder.context_length if where.context is None else where.context
        asked = [[requests(item, opened.tokenizer.encode, context) for item in task.items] for task in tasks]
    if model is not None:
        check_origin(manifest, model)
    modes = modes_of(manifest)
    counter = itertools.count(1)
    total = sum(map(len, asked)) * (len(modes) + (model is not None))

    def step() -> None:
        progress(next(counter), total)

    longest = max(len(one.ids_T) for one in itertools.chain(*itertools.chain(*asked)))
    scores: list[dict[str, TaskScore]] = [{} for _ in tasks]
    for mode in modes:
        with where.open(artifact, mode, context=max(2, min(longest, context))) as opened:
            # One cache: the answers of an item share its context, and that is computed once.
            logits = partial(opened.logits, cache=opened.new_cache())
            for found, task, items in zip(scores, tasks, asked, strict=True):
                found[mode] = score(task, items, logits, step)
    if model is not None:
        original = original_logits(model)
        for found, task, items in zip(scores, tasks, asked, strict=True):
            found["checkpoint"] = score(task, items, original, step)
    return [_row(*case) for case in zip(tasks, asked, scores, strict=True)]


def _row(task: Task, asked: Asked, scores: Mapping[str, TaskScore]) -> dict[str, Any]:
    return {
        "task": str(task.path),
        "kind": task.kind,
        "items": len(task.items),
        "truncated": sum(any(one.truncated for one in item) for item in asked),
        "chance": sum(1 / len(item.answers) for item in task.items) / len(task.items) if task.kind == CHOICE else None,
        "modes": {mode: _mode(task, found, _reference(mode, scores)) for mode, found in scores.items()},
    }


def _reference(mode: str, scores: Mapping[str, TaskScore]) -> TaskScore | None:
    """What the answers of a mode are held against."""
    return None if mode == "checkpoint" else scores.get("checkpoint" if mode == "dense" else "dense")


def _mode(task: Task, found: TaskScore, reference: TaskScore | None) -> dict[str, float | None]:
    acc, stderr = mean_and_error(found.right_N)
    row: dict[str, float | None] = {"acc": acc, "acc_stderr": stderr}
    if task.kind == CHOICE:
        row["acc_norm"], row["acc_norm_stderr"] = mean_and_error(found.right_norm_N)
    else:
        row["perplexity"] = found.perplexity
    if reference is None:
        return row | {"agreement": None}
    same = [ours == theirs for ours, theirs in zip(found.answers, reference.answers, strict=True)]
    return row | {"agreement": sum(same) / len(same)}
