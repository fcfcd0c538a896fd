"""The error message for a file that is not an artifact, or no longer one: it says what the file is."""

import re
import shlex
from pathlib import Path
from typing import BinaryIO

from pi_runtime.artifact.manifest_file import wrong_version
from pi_runtime.artifact.records import LOCAL
from pi_runtime.artifact.schema import FORMAT_NAME, FORMAT_VERSION
from pi_runtime.errors import ArtifactError

_COMMENT = re.compile(rf"{FORMAT_NAME}/(\d+) [ -~]*".encode())
_FIRST_ENTRY = b"embedding/c/0/0"
_PACK = "pack a checkpoint with `pi-compile build`, and name the artifact it writes"
_MODELS = ("a GGUF model", "a GGUF model of PowerInfer")
_WINDOW = 1 << 16
_KINDS = (
    (b"PK", "a ZIP file of something else"),
    (b"GGUF", _MODELS[0]),
    (b"PWRI", _MODELS[1]),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x80\x02", "a pickle"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"<!DOCTYPE", "a web page"),
    (b"<html", "a web page"),
)


def pack_commands(model: Path) -> str:
    """The two commands that make an artifact of a model, quickly and exactly."""
    name, given = model.absolute().stem if model.is_file() else model.resolve().name, shlex.quote(str(model))
    recipe, artifact = (shlex.quote(f"{name}{suffix}") for suffix in (".toml", ".pi"))
    return f"pi-compile init {given} -o {recipe}, then pi-compile pack --plain {recipe} -o {artifact}"


def foreign(file: BinaryIO, path: Path, nbytes: int) -> ArtifactError:
    """The error for a file that does not end like an artifact of this version."""
    head = _window(file, 0, nbytes)
    tail = _window(file, nbytes - _WINDOW, nbytes)
    comments = list(_COMMENT.finditer(tail))
    if comments and int(comments[-1][1][:9]) != FORMAT_VERSION:
        return wrong_version(str(path), int(comments[-1][1][:9]))
    if head[LOCAL.size : LOCAL.size + len(_FIRST_ENTRY)] != _FIRST_ENTRY:
        kind = _kind(head)
        remedy = pack_commands(path) if kind in _MODELS else _PACK
        return ArtifactError(f"{path}: not an artifact", expected="a .pi file", found=kind, remedy=remedy)
    found = f"{nbytes:,} bytes that do not end with an end record: truncated, or with bytes after its end"
    return ArtifactError(f"{path}: damaged at the end of the file", found=found)


def _window(file: BinaryIO, start: int, nbytes: int) -> bytes:
    file.seek(max(0, start))
    return file.read(min(_WINDOW, nbytes))


def _kind(head: bytes) -> str:
    if not head:
        return "an empty file"
    for magic, kind in _KINDS:
        if head.startswith(magic):
            return kind
    if head[8:10] == b'{"':
        return "a safetensors file"
    try:
        head[:1000].decode("ascii")
    except UnicodeDecodeError:
        return "a file of another kind"
    return "a text file"
