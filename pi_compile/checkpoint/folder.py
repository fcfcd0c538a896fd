"""Finding the folder of a checkpoint, on disk or on the hub, and the names of the files that are read."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from pi_compile.checkpoint.gguf_magic import is_gguf
from pi_compile.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
GGUF_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of a part of a split GGUF file."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_checkpoint(model: str | Path, revision: str | None = None) -> Path:
    """The folder or GGUF file of a checkpoint.

    `model` is a GGUF file, a folder, or the name of a hub model, whose snapshot at `revision` is fetched. A folder with
    one GGUF file and no other weights stands for that file; with the parts of one, for its first part. Only config,
    tokenizer and weights are fetched, pickled weights only where there are no others. Raises CheckpointError where
    there is no checkpoint.
    """
    path = Path(model).expanduser()
    if path.exists() and revision is not None:
        raise CheckpointError(
            f"{model}: revision {revision!r} is given for a local {'folder' if path.is_dir() else 'file'}",
            expected="a revision only with a hub name",
            remedy="drop the revision, or name the hub model",
        )
    if path.is_dir():
        return _only_gguf(path) or _checked(path)
    if is_gguf(path):
        return path
    if path.exists():
        raise CheckpointError(f"{model}: is a file", expected="a checkpoint folder", remedy=_advice_for_file(path))
    if not _HUB_NAME.fullmatch(str(model)):
        raise CheckpointError(
            f"{model}: no such folder",
            expected="a folder with config.json and weights, a GGUF file, or a hub name OWNER/NAME",
        )
    return _checked(_fetch(str(model), revision))


def _only_gguf(folder: Path) -> Path | None:
    found = sorted(filter(is_gguf, folder.iterdir()))
    parts = [GGUF_PART.fullmatch(path.name) for path in found]
    models = {(part["name"], part["count"]) if part else path.name for part, path in zip(parts, found, strict=True)}
    other = any((folder / name).is_file() for name in (*SAFETENSORS, *PICKLES))
    return found[0] if len(models) == 1 and not other else None


def _checked(folder: Path) -> Path:
    if (folder / CONFIG_FILE).is_file():
        return folder
    entries = sorted(folder.iterdir())
    names, remedy = [path.name for path in entries], None
    if any(map(is_gguf, entries)):
        remedy = "name one of its GGUF files"
    elif "adapter_config.json" in names:
        remedy = "this is an adapter (LoRA), not a model: merge it into its base model and save that"
    elif "params.json" in names:
        remedy = "this is a checkpoint in its maker's own form: use the one converted for Hugging Face"
    found = f"{len(names)} entries: {', '.join(names[:8])}" if names else "an empty folder"
    raise CheckpointError(f"{folder}: no {CONFIG_FILE}", expected="a checkpoint folder", found=found, remedy=remedy)


def _advice_for_file(path: Path) -> str:
    if path.suffix == ".pi":
        return "this is already an artifact: run it with `pi-run`"
    return f"name the folder: {path.parent}"


def _fetch(name: str, revision: str | None) -> Path:
    patterns = [CONFIG_FILE, GENERATION_FILE, *TOKENIZER_FILES]
    try:
        folder = _snapshot(name, revision, [*patterns, *SAFETENSORS, "model-*.safetensors"])
        if not any((folder / file).is_file() for file in SAFETENSORS):
            folder = _snapshot(name, revision, [*patterns, *PICKLES, "pytorch_model-*.bin"])
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{name}: no such folder, and the hub cannot be reached",
            found=str(error).split("\n")[0],
            remedy="give the path of a local checkpoint, or go online to fetch this one once",
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{name}: no such folder, and the hub does not give {name} at revision {revision or 'main'}",
            found=f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}",
            remedy="check name and revision; for a gated model log in with `hf auth login`",
        ) from None
    return folder


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
