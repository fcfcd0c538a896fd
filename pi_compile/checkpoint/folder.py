"""Finding the folder of a checkpoint, on disk or on the hub, and the names of the files that are read."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from pi_compile.checkpoint.config import is_gguf
from pi_compile.errors import CheckpointError
from pi_runtime.errors import size

CLIENT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""What the hub's HTTP client raises where it reaches nobody; which client that is depends on the hub's version."""
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
ADAPTER_FILE = "adapter_config.json"
"""What PEFT writes beside an adapter (LoRA)."""
GGUF_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of a part of a split GGUF file."""
_HUB_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[\w./-]+))?")
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""In the name of a GGUF file that is no model: a projector of pictures, or counts for quantising."""
_TEXTS = (CONFIG_FILE, GENERATION_FILE, *TOKENIZER_FILES)
WEIGHTS = ((*SAFETENSORS, "model-*.safetensors"), (*PICKLES, "pytorch_model-*.bin"))
"""Patterns of weight files, the preferred form first."""


def find_checkpoint(model: str | Path, revision: str | None = None) -> Path:
    """The folder or GGUF file of a checkpoint.

    `model` is a GGUF file, a folder, or the name of a hub model, whose snapshot at `revision` is fetched;
    `OWNER/NAME:Q4_K_M` is its GGUF file whose name ends so, in any of its folders. A folder, or a hub model, with one
    GGUF file and no other weights stands for that file; with the parts of one, for its first part. Only config,
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
    named = _HUB_NAME.fullmatch(model.as_posix() if isinstance(model, Path) else model)
    if named is None:
        raise CheckpointError(
            f"{model}: no such folder",
            expected="a folder with config.json and weights, a GGUF file, or a hub name OWNER/NAME",
        )
    with _hub_faults(named["name"], revision):
        return _fetch(named, revision)


def hub_commit(location: Path) -> str:
    """The commit of a fetched checkpoint: its snapshot's folder, in which a GGUF file may stand deeper."""
    folder = location if location.is_dir() else location.parent
    return next((path for path in (folder, *folder.parents) if path.parent.name == "snapshots"), folder).name


def names_model(text: str) -> bool:
    """Whether this names a model, and not a recipe: a folder, a GGUF file, or a hub name that is no path here."""
    path = Path(text)
    if path.exists():
        return path.is_dir() or is_gguf(path)
    is_hub_name = path.suffix != ".toml" and _HUB_NAME.fullmatch(text) is not None and not path.parent.exists()
    return is_hub_name or path.suffix == ".gguf"  # what is not there is told as a missing model


def fetch_offer(model: str) -> str | None:
    """What fetching a hub model takes, and its licence, for a question; None where nothing is to be fetched.

    Raises CheckpointError where the hub does not say, or must not be asked (`HF_HUB_OFFLINE`).
    """
    named = _HUB_NAME.fullmatch(model)
    if Path(model).exists() or named is None:
        return None
    with _hub_faults(named["name"], None):
        try:
            _fetch(named, None, local=True)
        except (LocalEntryNotFoundError, CheckpointError):
            if huggingface_hub.constants.HF_HUB_OFFLINE:
                raise
            info = huggingface_hub.HfApi().model_info(named["name"], files_metadata=True)
        else:
            return None
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    weights = next((form for form in WEIGHTS if _matching(sizes, form)), ())
    if named["file"] is None and (weights or not _gguf_models(sizes)):
        files = _matching(sizes, (*_TEXTS, *weights))
    else:
        files = _gguf_files(sizes, named)
    licence = info.card_data.license if info.card_data else None
    return f"{model}: {size(sum(map(sizes.__getitem__, files)))}, licence {licence or 'not stated'}"


def fetched_config(model: str) -> Path | None:
    """The config.json of a hub name, which alone is fetched: some KB. None for what is no hub name.

    A repository without one, such as of GGUF files, has that of the model it says it was made from.
    Raises CheckpointError where the hub does not give it.
    """
    named = _HUB_NAME.fullmatch(model)
    if named is None:
        return None
    with _hub_faults(named["name"], None):
        try:
            return Path(huggingface_hub.hf_hub_download(named["name"], CONFIG_FILE))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            card = huggingface_hub.HfApi().model_info(named["name"]).card_data
            base = card.base_model if card else None
            if not base:
                raise
            return Path(huggingface_hub.hf_hub_download(base if isinstance(base, str) else base[0], CONFIG_FILE))


def gguf_sizes(model: str) -> dict[str, int]:
    """Bytes of each GGUF model of a folder or a hub name, by what names it to `find_checkpoint`.

    Raises CheckpointError where the hub does not say.
    """
    folder, named = Path(model), _HUB_NAME.fullmatch(model)
    if folder.is_dir():
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.gguf")}
        return {str(folder / one[0]): sum(map(sizes.__getitem__, one)) for one in _gguf_models(sizes).values()}
    if named is None:
        return {}
    with _hub_faults(named["name"], None):
        info = huggingface_hub.HfApi().model_info(named["name"], files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return {f"{named['name']}:{name}": sum(map(sizes.__getitem__, one)) for name, one in _gguf_models(sizes).items()}


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def _only_gguf(folder: Path) -> Path | None:
    found = [path for path in sorted(filter(is_gguf, folder.iterdir())) if not _NO_MODEL.search(path.name)]
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
        remedy = "name one of its GGUF files; of a hub model by how its name ends: OWNER/NAME:Q4_K_M"
    elif ADAPTER_FILE in names:
        remedy = "this is an adapter (LoRA), not a model: merge it into its base model and save that"
    elif "params.json" in names:
        remedy = "this is a checkpoint in its maker's own form: use the one converted for Hugging Face"
    found = f"{len(names)} entries: {', '.join(names[:8])}" if names else "an empty folder"
    raise CheckpointError(f"{folder}: no {CONFIG_FILE}", expected="a checkpoint folder", found=found, remedy=remedy)


def _advice_for_file(path: Path) -> str:
    if path.suffix == ".pi":
        return "this is already an artifact: run it with `pi-run`"
    return f"name the folder: {path.parent}"


@contextmanager
def _hub_faults(name: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub's client raises into CheckpointError."""
    try:
        yield
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise _unreachable(name, error) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{name}: no such folder, and the hub does not give {name} at revision {revision or 'main'}",
            found=f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}",
            remedy="check name and revision; for a gated model log in with `hf auth login`",
        ) from None
    except CLIENT_ERROR as error:
        raise _unreachable(name, error) from None


def _unreachable(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name}: no such folder, and the hub cannot be reached",
        found=str(error).split("\n")[0],
        remedy="give the path of a local checkpoint, or go online to fetch this one once",
    )


def _fetch(named: re.Match[str], revision: str | None, *, local: bool = False) -> Path:
    """The folder or GGUF file of a hub model. `local`: as far as it has been fetched already."""
    name = named["name"]
    for weights in WEIGHTS if named["file"] is None else ():
        folder = _snapshot(name, revision, [*_TEXTS, *weights], local=local)
        if any((folder / file).is_file() for file in weights[:2]):
            return _checked(folder)
    if local or huggingface_hub.constants.HF_HUB_OFFLINE:
        folder = _snapshot(name, revision, ["*.gguf"], local=True)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    else:
        names = huggingface_hub.HfApi().list_repo_files(name, revision=revision)
    if named["file"] is None and not _gguf_models(names):
        return _checked(_snapshot(name, revision, [*_TEXTS], local=local))
    files = _gguf_files(names, named)
    return _snapshot(name, revision, files, local=local) / files[0]


def _gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Name of each model among the files of a repository, without its ending → its GGUF file, or its parts in turn."""
    models = dict[str, list[str]]()
    for name in sorted(names):
        if name.endswith(".gguf") and not _NO_MODEL.search(Path(name).name):
            part = GGUF_PART.fullmatch(name)
            models.setdefault(part["name"] if part else name.removesuffix(".gguf"), []).append(name)
    return models


def _gguf_files(names: Iterable[str], named: re.Match[str]) -> list[str]:
    """The one GGUF file, or all parts of it, whose name ends as wanted. Raises CheckpointError naming the others.

    An ending is one of whole words: F16 is not how BF16 ends. A whole name counts before an ending.
    """
    models, wanted = _gguf_models(names), (named["file"] or "").removesuffix(".gguf")
    ending = re.compile(rf"(?:.*[^a-z0-9])?{re.escape(wanted)}", re.IGNORECASE)
    whole = [model for model in models if wanted in (model, Path(model).name)]
    found = [models[model] for model in whole or models if not wanted or ending.fullmatch(model)]
    if len(found) != 1:
        problem = (
            f"{len(found) or 'no'} GGUF files of {named['name']} have a name that ends so"
            if wanted
            else f"{named['name']} has no weights but in GGUF files, of which one is to be named"
        )
        raise CheckpointError(
            f"{named[0]}: {problem}",
            expected="one, such as OWNER/NAME:Q4_K_M",
            found=", ".join(models) or "no GGUF file",
        )
    return found[0]


def _snapshot(name: str, revision: str | None, patterns: list[str], *, local: bool = False) -> Path:
    found = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=local)
    return Path(found)
