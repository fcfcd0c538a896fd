"""The commands that lead on from a recipe."""

import shlex
from pathlib import Path

from pi_compile.checkpoint import Checkpoint
from pi_compile.sparsification.recipe import FAMILIES


def steps_after_init(recipe: Path, checkpoint: Checkpoint) -> list[str]:
    """What to do with a recipe of `build`: lines for the user.

    Where no neuron is ever zero there is nothing to profile, so that packing is all; unless its experts are counted.
    """
    d = checkpoint.decoder
    if d.sparse or d.n_experts > 1:
        return [f"{recipe}: written; next: pi-compile build {shlex.quote(str(recipe))}"]
    artifact = recipe.with_suffix(".pi").name
    lines = [
        f"{recipe}: written; next: pi-compile pack --plain {shlex.quote(str(recipe))} -o {shlex.quote(artifact)}",
        f"with {d.activation} no neuron is ever exactly zero: nothing can be skipped, and it runs as fast as dense",
        "what gains all the same: fewer bits ([pack]), drafts (--speculate, on by itself), a published guess head, or "
        "another model: a mixture of experts reads only the experts that a token takes",
    ]
    return [*lines, _sparsify(checkpoint)] if d.family in FAMILIES else lines


def _sparsify(checkpoint: Checkpoint) -> str:
    """How a model is made sparse; a GGUF file cannot be trained, the checkpoint that it was made from can."""
    of_gguf = checkpoint.location.is_file()
    folder = "FOLDER" if of_gguf else shlex.quote(str(checkpoint.location))
    text = f"pi-compile init {folder} --sparsify -o sparsify.toml, then pi-compile sparsify sparsify.toml -o SPARSE"
    origin = " (FOLDER: the checkpoint that the GGUF file was made from)" if of_gguf else ""
    return f"to make it sparse first: {text}{origin}"
