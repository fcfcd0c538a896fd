"""A recipe and its checkpoint: the one that `init` writes for a checkpoint, and the checkpoint that a recipe names."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.part_formats import AGAIN, KEEP, resolve_formats
from pi_compile.checkpoint.tokenizer_files import TextFiles
from pi_compile.corpus import HUB, PYTHON
from pi_compile.errors import CheckpointError, RecipeError
from pi_compile.files import check_output, write_text
from pi_compile.recipe import OWN_HEAD, AnyRecipe, GuessSection, Recipe, default_recipe
from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.artifact.layout import place_arrays
from pi_runtime.artifact.sizes import PARTS, array_specs
from pi_runtime.errors import Setting, UsageError, size


def create_recipe(
    model: str,
    output: Path,
    *,
    revision: str = "",
    corpus: Sequence[str] = (),
    ignore_config: Sequence[str] = (),
    activation: str = "",
    force: bool = False,
    notice: Callable[[str], None] = lambda _line: None,
    make: Callable[..., AnyRecipe] = default_recipe,  # type: ignore[assignment]
    check: Callable[[Checkpoint], None] = lambda _checkpoint: None,
) -> AnyRecipe:
    """Check that the checkpoint can be compiled, tokenizer included, then write its recipe.

    The path of a folder or file is written relative to the recipe, so that both can move together, and keeps the names
    of links; a hub name is written with the commit that it means today. `ignore_config` names keys of its config.json
    that have no effect, as the user declares, `activation` that of a GGUF file; the recipe repeats them. A part in
    blocks that no number format keeps is written as `AGAIN`. `notice` gets what the user should know about the
    checkpoint. `make` is the recipe's default, and `check` refuses checkpoints that it is not for. Raises UsageError
    rather than replace a recipe, unless `force`, and what `open_checkpoint` and `Checkpoint.text_files` raise.
    """
    check_output(output)
    if output.exists() and not force:
        raise UsageError(
            "exists already",
            setting=Setting("output", output),
            remedy=(Setting("force"), " replaces it; or name another file"),
        )
    text = [_source(source, output) for source in corpus] or [PYTHON]
    checkpoint = open_checkpoint(model, revision or None, ignore_config, activation=activation)
    check(checkpoint)
    found = checkpoint.text_files
    for line in (*checkpoint.notices, *found.notices):
        notice(line)
    name = _relative(checkpoint.location, output) if checkpoint.revision is None else model
    ignored = list(dict.fromkeys(ignore_config))
    recipe = proposed_recipe(checkpoint, name, make, notice, corpus=text, ignore_config=ignored)
    write_text(output, recipe.to_toml())
    return recipe


def proposed_recipe(
    checkpoint: Checkpoint, name: str, make: Callable[..., AnyRecipe], notice: Callable[[str], None], **settings: Any
) -> AnyRecipe:
    """The recipe that is proposed for a checkpoint, called `name` in it; `notice` gets what becomes of its formats."""
    again = _quantised_again(checkpoint, checkpoint.text_files, notice)
    declared = {"activation": checkpoint.declared_activation} if checkpoint.location.is_file() else {}
    formats = {"formats": again} if again else {}
    found = make(name, revision=checkpoint.revision or "", **declared, **formats, **settings)
    own = isinstance(found, Recipe) and checkpoint.can_draft
    return found.model_copy(update={"guess": GuessSection(head=OWN_HEAD)}) if own else found


def _quantised_again(checkpoint: Checkpoint, text: TextFiles, notice: Callable[[str], None]) -> dict[str, str]:
    """The format of each part whose blocks no number format keeps; a notice for each, and one of the sizes."""
    stored = {part: name for part, name in checkpoint.formats().items() if name not in WEIGHT_FORMATS}
    for part, name in stored.items():
        again = f"{name}, {checkpoint.bits(part):.1f} bits a value, is quantised again, to {AGAIN}"
        if part == "ffn" and checkpoint.keeps_whole:
            again += ", where it is stored by neuron; whole matrices, as a plain pack has them, keep it"
        notice(f"{part}: {again}; `pack` and `eval` state the loss")
    if stored:
        q8, q4, f32 = (size(_artifact_bytes(checkpoint, text, dict.fromkeys(stored, to))) for to in ("q8", "q4", "f32"))
        parts = ", ".join(f'{part} = "q4"' for part in stored)
        much = f"{q4} in q4, which loses much more ([pack] {parts}), less so when rounded on text ([quantise])"
        much += f"; {f32} in f32, which loses nothing; in between, [bits] divides a budget by what errors cost"
        notice(f"the artifact takes about {q8} in q8; {much}")
    return dict.fromkeys(stored, AGAIN)


def _artifact_bytes(checkpoint: Checkpoint, text: TextFiles, formats: Mapping[str, str]) -> int:
    """Bytes of an artifact with some parts in these formats, without predictors and manifest."""
    d, wanted = checkpoint.decoder, {**dict.fromkeys(PARTS, KEEP), **formats}
    resolved = resolve_formats(checkpoint.formats(), wanted, tied_head=d.tied_head)
    specs = array_specs(d, resolved, [None] * d.n_layers, profiled=False)
    return place_arrays(specs)[1] + sum(map(len, text.files.values()))


def _source(source: str, recipe: Path) -> str:
    """A corpus as the recipe writes it: a path relative to the recipe, `python`, or a pinned hub name as it is."""
    if source == PYTHON or source.startswith(HUB):
        return source
    if not Path(source).exists():
        raise UsageError(
            "no such file or folder",
            setting=Setting("corpus", source),
            expected=f"a path, {PYTHON}, or {HUB}OWNER/NAME@REVISION",
        )
    return _relative(Path(source), recipe)


def _relative(path: Path, recipe: Path) -> str:
    """The way from a recipe to a path. The names of links are kept: a hub's cache gives files no other.

    To another drive of Windows there is no way, and its whole path is written.
    """
    folder = Path(os.path.realpath(recipe)).parent
    try:
        beside = Path(os.path.relpath(path, recipe.parent))
    except ValueError:
        return path.absolute().as_posix()
    if os.pardir not in beside.parts and (folder / beside).exists() and (folder / beside).samefile(path):
        return beside.as_posix()
    # The system follows links before it goes up, so that only real folders have a way up that can be written down.
    named = path.resolve() if path.name in ("", os.pardir) else path.parent.resolve() / path.name
    return Path(os.path.relpath(named, folder)).as_posix()


def recipe_checkpoint(recipe: Recipe, folder: Path) -> Checkpoint:
    """The checkpoint a recipe names; `folder` is the recipe's own."""
    section = recipe.model
    # A recipe pins a hub model by its revision; a folder has none.
    model = section.path if section.revision else folder / Path(section.path).expanduser()
    if not section.revision and not Path(model).exists():
        raise RecipeError(
            f"[model] path = {section.path!r}: no such folder or file",
            expected="a folder or a GGUF file, from the recipe's own on; or a hub name with its revision",
            found=f"no {model}",
            remedy="correct the path; for a hub name `pi-compile init` finds the revision",
        )
    checkpoint = open_checkpoint(
        model, section.revision or None, section.ignore_config, activation=section.activation, in_recipe=True
    )
    # No long stage is to end in `pack` refusing a format.
    resolve_formats(checkpoint.formats(), recipe.pack.model_dump(), tied_head=checkpoint.decoder.tied_head)
    return with_own_head(checkpoint, recipe)


def with_own_head(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """The checkpoint with its own layer that drafts tokens, where the recipe wants it."""
    if recipe.guess.head != OWN_HEAD:
        return checkpoint
    if not checkpoint.can_draft:
        raise CheckpointError(
            f"{checkpoint.location}: no layer that drafts tokens is read",
            expected=f'with [guess] head = "{OWN_HEAD}" a layer for multi-token prediction behind the last one',
            found="; ".join(line for line in checkpoint.notices if "draft" in line) or "none",
            remedy="take [guess] out of the recipe, or name the folder of a published EAGLE-3 head",
        )
    return replace(checkpoint, drafts=True)
