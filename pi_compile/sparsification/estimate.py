"""What a training takes, known before it starts: time, memory and disk.

A token costs 6 operations for each weight that it meets: 2 forward, 4 backward. Recomputing layers costs 2 more, the
original beside it 2, the control the whole again.
"""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from pi_compile.sparsification.checkpoints import KEPT
from pi_compile.sparsification.recipe import SparsifyRecipe
from pi_compile.torch_model import flops_per_s, layer_parameters
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.errors import DoesNotFitError, Setting, size

WEIGHT, STATE = 4, 16
"""Bytes of a weight; of a weight with its gradient and the optimiser's two moments."""


@dataclass(frozen=True)
class Needs:
    """Time, disk and memory of a whole run."""

    seconds: float
    disk_bytes: int
    memory_bytes: int
    """Of one process, without activations if they are recomputed."""
    tokens: int

    def words(self) -> str:
        """A line for the user."""
        hours = f"{self.seconds / 3600:.1f} h" if self.seconds > 5400 else f"{self.seconds / 60:.0f} min"
        return (
            f"{self.tokens:,} tokens: about {hours}, {size(self.memory_bytes)} of memory for each process, and "
            f"{size(self.disk_bytes)} of disk while it runs"
        )


def weights_of(d: Decoder, experts: int) -> int:
    """Weights of a model, with so many experts of each layer."""
    return layer_parameters(d, experts) * d.n_layers + d.vocab_size * d.d_model * (1 if d.tied_head else 2)


def operations_per_token(recipe: SparsifyRecipe, d: Decoder) -> float:
    """Floating-point operations of a token in training, of all arms."""
    # The embedding is looked up, the head is a product.
    met = layer_parameters(d, d.experts_per_token) * d.n_layers + d.vocab_size * d.d_model
    attended = recipe.train.window * d.n_heads * d.head_dim * d.n_layers
    forward = 2 * met + 2 * attended
    passes = 3 + recipe.train.activation_checkpointing
    return forward * (passes * (2 if recipe.run.control else 1) + (recipe.train.distillation > 0))


def estimate(recipe: SparsifyRecipe, d: Decoder, accelerator: Accelerator, after: int = 0) -> Needs:
    """Time by a short measurement here, memory and disk by counting; the steps up to `after` are done."""
    train = recipe.train
    per_s = flops_per_s(train.micro_batch * train.window, d.d_model, d.d_ff, str(accelerator.device))
    seconds = recipe.tokens(after) * operations_per_token(recipe, d) / per_s / accelerator.num_processes
    weights = weights_of(d, d.n_experts)
    tokens = train.micro_batch * train.window
    # Of each layer backward needs about ten vectors of the model's width for a token, and five of the FFN's.
    layers = 1 if train.activation_checkpointing else d.n_layers
    values = layers * (10 * d.d_model + 5 * d.d_ff * d.experts_per_token) + d.n_layers * d.d_model + 3 * d.vocab_size
    original = WEIGHT * weights if train.distillation else 0
    memory = STATE * weights + original + 4 * tokens * values
    checkpoint = 3 * WEIGHT * weights
    checkpoints = KEPT + 2 + recipe.run.control  # the model's last one stays while the control is trained
    return Needs(seconds, checkpoints * checkpoint + 2 * WEIGHT * weights, memory, recipe.tokens(after))


def check_room(needs: Needs, output: Path, work: Path) -> None:
    """Raise DoesNotFitError where the disk has less room than a run takes; what it has in `work` counts as room."""
    free, taken = shutil.disk_usage(output.resolve().parent).free, _bytes_in(work)
    if free + taken < needs.disk_bytes:
        own = f", and {size(taken)} of this run in {work}" if taken else ""
        raise DoesNotFitError(
            "the disk is too small for checkpoints",
            setting=Setting("output", output),
            expected=size(needs.disk_bytes),
            found=f"{size(free)} free{own}",
            remedy="name an output on another disk",
        )


def _bytes_in(folder: Path) -> int:
    """Bytes of the files of a folder."""
    nbytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a sign of life comes and goes
            nbytes += path.stat().st_size if path.is_file() else 0
    return nbytes
