"""The quality of a choice of rungs, measured by one worker."""

from collections.abc import Sequence
from pathlib import Path

import torch

from pi_compile.checkpoint import Checkpoint
from pi_compile.torch_model import ResidentLayers, SparseFfn
from pi_compile.training.rung_choice import MeasuredText, Quality
from pi_compile.training.samples import PushedText
from pi_compile.workers import work_folder


def measure_quality(
    checkpoint: Checkpoint, ids_NT: torch.Tensor, ffns: Sequence[SparseFfn], folder: Path, choice: str = "chosen"
) -> Quality:
    """The quality of `ffns`, whose name is `choice`; the text goes through the dense model first."""
    with work_folder(folder) as work:
        text = PushedText(checkpoint, ResidentLayers(checkpoint, "cpu"), ids_NT, "text", folder, "cpu", counts=True)
        for n in range(checkpoint.decoder.n_layers):
            work.run(text.tasks(n))
        return MeasuredText(text, work).measure(ffns.__getitem__, choice)
