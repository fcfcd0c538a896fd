"""The quality of a choice of rungs, measured by one worker."""

from collections.abc import Sequence
from pathlib import Path

import torch

from pi_compile.checkpoint import Checkpoint
from pi_compile.torch_model import SparseFfn
from pi_compile.training.quality import MeasuredText, Quality
from pi_compile.workers import work_folder


def measure_quality(
    checkpoint: Checkpoint, ids_NT: torch.Tensor, ffns: Sequence[SparseFfn], folder: Path, choice: str = ""
) -> Quality:
    """The quality of `ffns`; with a name its divergence is from the one without, which is measured first."""
    with work_folder(folder) as work:
        return MeasuredText(checkpoint, ids_NT, "text", work, "cpu").measure(ffns.__getitem__, choice)
