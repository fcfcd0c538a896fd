"""Events for TensorBoard, where that is installed, beside whoever else watches a training."""

import importlib.util
from pathlib import Path
from typing import Any

from pi_compile.sparsification.training import Point, StepReport, Watch


def writer(folder: Path) -> Any:
    """A writer of event files to a folder; None where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  optional

    return SummaryWriter(str(folder))


def both(watch: Watch, events: Any) -> Watch:
    """The watch, with everything it is told written as events too."""
    if events is None:
        return watch

    def step(report: StepReport) -> None:
        for name in ("loss", "sparsity", "penalty", "learning_rate", "tokens_per_s"):
            events.add_scalar(f"training/{name}", getattr(report, name), report.step)
        watch.step(report)

    def point(found: Point) -> None:
        events.add_scalar("tune text/perplexity", found.perplexity, found.step)
        events.add_scalar("tune text/dead", found.dead, found.step)
        for layer, sparsity in enumerate(found.sparsity_by_layer):
            events.add_scalar(f"sparsity/layer {layer}", sparsity, found.step)
        events.flush()
        watch.point(found)

    return Watch(step, point, watch.notice)
