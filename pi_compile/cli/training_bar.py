"""How a training shows itself on stderr: a bar on a terminal, elsewhere a line for each evaluation."""

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pi_runtime import console

if TYPE_CHECKING:
    from pi_compile.sparsification.training import Point, StepReport, Watch


@contextmanager
def training_bar() -> "Iterator[Watch]":
    """A watch that shows loss, perplexity on the tune text, sparsity, tokens a second and the time left."""
    from pi_compile.sparsification.training import Watch

    if not sys.stderr.isatty():
        yield Watch(point=lambda point: console.say(point_line(point)), notice=console.say)
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[numbers]}"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        shown: dict[str, object] = {"arm": None, "task": None, "perplexity": ""}

        def step(report: "StepReport") -> None:
            if shown["arm"] != report.arm:
                shown.update(
                    arm=report.arm, task=bar.add_task(report.arm, total=report.steps, numbers=""), perplexity=""
                )
            numbers = f"loss {report.loss:.3f}, {report.sparsity:.1%} zero, {report.tokens_per_s:,.0f} tokens/s"
            bar.update(shown["task"], completed=report.step, numbers=f"{numbers}{shown['perplexity']}")  # type: ignore[arg-type]

        def point(found: "Point") -> None:
            shown["perplexity"] = f"; perplexity {found.perplexity:.2f}"
            bar.console.print(point_line(found), highlight=False)

        yield Watch(step, point, lambda line: bar.console.print(line, highlight=False))


def point_line(point: "Point") -> str:
    """An evaluation as a line: perplexity, and the sparsity of each layer."""
    layers = point.sparsity_by_layer
    words = f"step {point.step:,}: loss {point.loss:.3f}, perplexity on the tune text {point.perplexity:.3f}"
    if not layers:
        return words
    each = " ".join(f"{100 * sparsity:.0f}" for sparsity in layers)
    return f"{words}, {statistics.fmean(layers):.1%} zero (by layer, %: {each}), {point.dead:.1%} never fired"
