"""The command `init`: a complete recipe for a checkpoint, of `build` or of `sparsify`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.part_formats import nearest_format
from pi_compile.checkpoint.tokenizer_files import read_text_files
from pi_compile.corpus import HUB, PYTHON
from pi_compile.files import check_output, write_text
from pi_compile.recipe import AnyRecipe, default_recipe
from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.errors import UsageError


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

    The path of a folder or file is written relative to the recipe, so that both can move together; a hub name is
    written with the commit that it means today. `ignore_config` names keys of its config.json that have no effect, as
    the user declares, `activation` that of a GGUF file; the recipe repeats them. A part in blocks that no number format
    keeps is written as the smallest quantised format with about its bits. `notice` gets what the user should know about
    the checkpoint. `make` is the recipe's default, and `check` refuses checkpoints that it is not for. Raises
    UsageError rather than replace a recipe, unless `force`, and what `open_checkpoint` and `read_text_files` raise.
    """
    check_output(output)
    if output.exists() and not force:
        raise UsageError(f"-o {output}: exists already", remedy="--force replaces it; or name another file")
    folder = Path(os.path.realpath(output)).parent
    text = [_source(source, folder) for source in corpus] or [PYTHON]
    checkpoint = open_checkpoint(model, revision or None, ignore_config, activation=activation)
    check(checkpoint)
    found = read_text_files(checkpoint.location, checkpoint.decoder.vocab_size)
    for line in (*checkpoint.notices, *found.notices):
        notice(line)
    name = _relative(checkpoint.location, folder) if checkpoint.revision is None else model
    of_gguf = checkpoint.location.is_file()
    declared = {"activation": activation, "formats": _quantised_again(checkpoint, notice)} if of_gguf else {}
    recipe = make(
        name,
        revision=checkpoint.revision or "",
        corpus=text,
        ignore_config=list(dict.fromkeys(ignore_config)),
        **declared,
    )
    write_text(output, recipe.to_toml())
    return recipe


def _quantised_again(checkpoint: Checkpoint, notice: Callable[[str], None]) -> dict[str, str]:
    """The format of each part whose blocks no number format keeps; a notice for each."""
    stored = {part: name for part, name in checkpoint.formats().items() if name not in WEIGHT_FORMATS}
    formats = {part: nearest_format(checkpoint.bits(part)) for part in stored}
    for part, name in formats.items():
        notice(
            f"{part}: {stored[part]}, {checkpoint.bits(part):.1f} bits a value, is quantised again, to {name}; `pack` "
            f'and `eval` state the loss; [pack] {part} = "f32" has none, in 32 bits a value'
        )
    return formats


def _source(source: str, folder: Path) -> str:
    """A corpus as the recipe writes it: a path relative to the recipe, `python`, or a pinned hub name as it is."""
    if source == PYTHON or source.startswith(HUB):
        return source
    if not Path(source).exists():
        raise UsageError(
            f"--corpus {source}: no such file or folder", expected=f"a path, {PYTHON}, or {HUB}OWNER/NAME@REVISION"
        )
    return _relative(Path(source), folder)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder)).as_posix()
