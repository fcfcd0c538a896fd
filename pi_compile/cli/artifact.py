"""The commands that examine an artifact: eval, inspect, verify; and how far an evaluation has come."""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pi_compile.cli.options import (
    ArtifactPath,
    Debug,
    Json,
    RunCacheFormat,
    RunCtxSize,
    RunDevice,
    RunVramBudget,
    Threads,
)
from pi_compile.cli.rendering import artifact_text, emit, eval_line, eval_report, print_report, task_reports
from pi_runtime import console
from pi_runtime.errors import UsageError, size

if TYPE_CHECKING:
    from pi_compile.evaluation import LoadOptions, Task


def evaluate(
    artifact: ArtifactPath,
    text: Annotated[
        list[Path] | None, typer.Option(help="Held-out text, or a folder of it; may be given again.")
    ] = None,
    task: Annotated[
        list[Path] | None,
        typer.Option(
            help="Questions with known answers, JSON Lines (see docs/explanation/fidelity.md); may be given again."
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The checkpoint, to compare with.", show_default=False)] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of the text to score.")] = 16_384,
    window: Annotated[int, typer.Option(min=2, help="Tokens of one sequence.")] = 512,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Score this many questions of a task, the first. Default: all.")
    ] = None,
    device: RunDevice = None,
    vram_budget: RunVramBudget = None,
    ctx_size: RunCtxSize = None,
    cache_format: RunCacheFormat = "auto",
    threads: Threads = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how faithful an artifact is in each mode.

    It scores held-out text (--text), questions (--task), or both. On a GPU it scores what decoding computes, token by
    token.
    """
    from pi_compile.evaluation import evaluate as score_text
    from pi_compile.evaluation import evaluate_tasks

    if not text and not task:
        raise UsageError("eval: nothing to score", expected="--text FILE or --task FILE, or both")
    if limit is not None and not task:
        raise UsageError(
            "--limit counts questions", expected="--task FILE", remedy="--tokens limits the text that is scored"
        )
    options = _load_options(device, vram_budget, ctx_size, cache_format, threads)
    tasks = _read_tasks(task or [], limit)
    found: dict[str, Any] = {}
    if text:
        with progress_lines("scoring text", "windows") as progress:
            found = score_text(artifact, text, model, tokens=tokens, window=window, progress=progress, options=options)
    if tasks:
        with progress_lines("scoring tasks", "questions") as progress:
            found["tasks"] = evaluate_tasks(artifact, tasks, model, progress=progress, options=options)
    if as_json:
        console.print_json(found)
    else:
        if text:
            typer.echo(eval_line(found))
        for report in [*([eval_report(found)] if text else []), *task_reports(found.get("tasks", []))]:
            print_report(report)


def _load_options(
    device: str | None, vram_budget: str | None, ctx_size: int | None, cache_format: str, threads: int | None
) -> "LoadOptions":
    from pi_compile.evaluation import LoadOptions
    from pi_runtime.console import parse_size

    budget = None if vram_budget is None else parse_size(vram_budget, "vram_budget")
    chosen = ("cpu" if budget is None else "auto") if device is None else device
    tell = functools.cache(console.say)  # each mode is opened for itself: a line once
    return LoadOptions(
        device=chosen, vram_budget=budget, context=ctx_size, cache_format=cache_format, threads=threads, tell=tell
    )


def _read_tasks(paths: list[Path], limit: int | None) -> list["Task"]:
    from pi_compile.evaluation import read_task

    tasks = [read_task(path, limit) for path in paths]
    for task in tasks:
        if task.joined:
            share = f"{task.joined:,} of {len(task.items):,} questions"
            console.say(f"{task.path}: no space between context and answer in {share}; they are scored as they are")
    return tasks


def inspect(artifact: ArtifactPath, as_json: Json = False, debug: Debug = False) -> None:
    """Say what an artifact holds."""
    from pi_runtime.artifact.inspection import inspect as look

    emit(look(artifact), as_json, artifact_text)


def verify(artifact: ArtifactPath, as_json: Json = False, debug: Debug = False) -> None:
    """Check every byte of an artifact against its digests."""
    from pi_runtime.artifact.verification import verify as check

    with console.progress("verifying") as progress:
        found = check(artifact, progress)
    fields = asdict(found)
    report = {"artifact": str(fields.pop("path")), "bytes": fields.pop("nbytes"), **fields}
    held = f"{size(found.nbytes)} in {found.arrays + found.files} parts"
    emit(report, as_json, lambda _: f"{artifact}: every byte is as it was written ({held})")


EVERY = 10.0
"""Seconds between two lines."""


@contextmanager
def progress_lines(title: str, unit: str) -> Iterator[console.Progress]:
    """Show a bar on a terminal; elsewhere lines on stderr."""
    if sys.stderr.isatty():
        with console.progress(title, unit) as bar:
            yield bar
    else:
        console.say(f"{title}: opening")
        yield ProgressLines(title, unit, console.say)


class ProgressLines:
    """Tells how long it will take as soon as a piece has been measured, and every `EVERY` seconds what is done."""

    def __init__(
        self, title: str, unit: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._unit, self._say, self._clock = title, unit, say, clock
        self._began = self._shown_at = clock()
        self._announced = False

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done == 0:  # what is measured begins here: files are open, kernels compiled
            self._began = self._shown_at = now
            return
        left = (now - self._began) / done * (total - done)
        if not self._announced:
            self._say(f"{self._title}: {total:,} {self._unit}, about {now - self._began + left:,.0f} s")
        elif now - self._shown_at >= EVERY and done < total:
            self._say(f"{self._title}: {done:,} of {total:,} {self._unit}, about {left:,.0f} s left")
        else:
            return
        self._announced, self._shown_at = True, now
