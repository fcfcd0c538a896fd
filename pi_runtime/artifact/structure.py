"""The strict check of an artifact's structure: everything but the data itself, before anything is mapped.

The manifest and the checksums in the directory determine every other byte outside the arrays and plain files. So the
check makes from them what the writer would have written, and compares: end record, central directory, local headers
with their padding, `zarr.json` documents. What is accepted has one spelling, so nothing overlaps, hides or escapes.
"""

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from pi_runtime.artifact.layout import (
    COMMENT,
    DIGEST_NBYTES,
    MANIFEST,
    manifest_specs,
    place_arrays,
    place_files,
    trailer,
)
from pi_runtime.artifact.manifest_file import LARGEST, read_manifest, wrong_version
from pi_runtime.artifact.records import (
    LOCAL,
    TAIL_NBYTES,
    EndRecord,
    Entry,
    central_record,
    local_header,
    parse_directory,
    parse_end,
)
from pi_runtime.artifact.schema import FORMAT_NAME, FORMAT_VERSION, Manifest
from pi_runtime.errors import ArtifactError

_LARGEST_DIRECTORY = 16 << 20
"""Most bytes of a central directory, so that a hostile file cannot fill the memory."""


@dataclass(frozen=True)
class Structure:
    """The result of checking a file's structure."""

    manifest: Manifest
    arrays: dict[str, Entry]
    files: dict[str, Entry]
    nbytes: int
    digest: str
    """The digest in the end record; `verify` compares it with the bytes."""


def damaged(path: Path, part: str, expected: object = None, found: object = None) -> ArtifactError:
    """The error for one damaged part of an artifact."""
    return ArtifactError(f"{path}: damaged at {part}", expected=expected, found=found)


def read_structure(file: BinaryIO, path: Path) -> Structure:
    """Check the structure of an open file. Raises ArtifactError naming the first part that is wrong."""
    nbytes = os.fstat(file.fileno()).st_size
    tail_nbytes = TAIL_NBYTES + len(COMMENT) + DIGEST_NBYTES
    tail = _read(file, path, max(0, nbytes - tail_nbytes), min(nbytes, tail_nbytes))
    comment = tail[-DIGEST_NBYTES - len(COMMENT) : -DIGEST_NBYTES]
    if comment != COMMENT:
        raise foreign(file, path, nbytes)
    digest = tail[-DIGEST_NBYTES:]
    end = _check_end(path, tail[: -DIGEST_NBYTES - len(COMMENT)], nbytes)
    records = _read(file, path, end.offset, end.size)
    found = _parse_directory(path, records, end)
    manifest, text = _read_manifest(file, path, found, end)
    arrays, files, generated, trailing = _expected(path, manifest, text, found)
    every = [*arrays.values(), *files.values(), *generated]
    _compare_entries(path, found, every, end)
    _compare_directory(path, records, every)
    _compare_manifest(path, manifest, arrays, files)
    _compare_headers(file, path, [*arrays.values(), *files.values()])
    _compare_generated(file, path, generated, trailing)
    return Structure(manifest, arrays, files, nbytes, digest.decode("latin-1"))


def _read(file: BinaryIO, path: Path, offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    data = file.read(nbytes)
    if len(data) != nbytes:
        raise damaged(path, f"byte {offset}", f"{nbytes} bytes", f"{len(data)}")
    return data


def _check_end(path: Path, tail: bytes, nbytes: int) -> EndRecord:
    """Parse the end record, which must be the one that fits a file of this size."""
    try:
        end = parse_end(tail)
    except ValueError as error:
        raise damaged(path, "the end record", found=error) from None
    if end.offset + end.size >= nbytes:
        raise damaged(path, "the end record", f"a directory inside {nbytes:,} bytes", f"at {end.offset:,}")
    packed = end.pack(len(COMMENT) + DIGEST_NBYTES)
    size = end.offset + end.size + len(packed) + len(COMMENT) + DIGEST_NBYTES
    if size != nbytes:
        raise damaged(path, "the end record", f"a file of {size:,} bytes", f"{nbytes:,} bytes")
    if not tail.endswith(packed):
        raise damaged(path, "the end record", "the bytes that follow from its values", "others")
    if end.size > _LARGEST_DIRECTORY:
        raise damaged(path, "the end record", f"a directory of at most {_LARGEST_DIRECTORY:,} bytes", f"{end.size:,}")
    return end


def _parse_directory(path: Path, records: bytes, end: EndRecord) -> list[Entry]:
    try:
        found = list(parse_directory(records))
    except ValueError as error:
        raise damaged(path, "the central directory", found=error) from None
    if len(found) != end.entries or not found:
        raise damaged(path, "the central directory", f"{end.entries} entries", len(found))
    return found


def _read_manifest(file: BinaryIO, path: Path, found: list[Entry], end: EndRecord) -> tuple[Manifest, bytes]:
    """Read the manifest, which must be the last entry and end where the directory begins."""
    name, size, *_ = found[-1]
    if name != MANIFEST:
        raise damaged(path, "the central directory", f"{MANIFEST} as the last entry", repr(name))
    if size > min(LARGEST, end.offset):
        raise damaged(path, MANIFEST, f"at most {min(LARGEST, end.offset):,} bytes", f"{size:,}")
    text = _read(file, path, end.offset - size, size)
    if crc32(text) != found[-1].crc:
        raise damaged(path, MANIFEST, f"CRC-32 {found[-1].crc:08x}", f"{crc32(text):08x}")
    return read_manifest(text, str(path)), text


def _expected(
    path: Path, manifest: Manifest, text: bytes, found: list[Entry]
) -> tuple[dict[str, Entry], dict[str, Entry], list[Entry], bytes]:
    """The entries that must be there: arrays, files, generated entries; and the bytes of the last.

    Checksums of arrays and files are those of the directory.
    """
    specs = manifest_specs(manifest)
    arrays, offset = place_arrays(specs)
    files, offset = place_files([(name, manifest.files[name].nbytes) for name in sorted(manifest.files)], offset)
    generated, trailing = trailer(specs, text, offset)
    names = [entry.name for entry in (*arrays.values(), *files.values(), *generated)]
    if [entry.name for entry in found] != names:
        raise damaged(path, "the central directory", **_difference(names, [entry.name for entry in found]))
    checksums = iter(entry.crc for entry in found)
    arrays = {name: entry._replace(crc=next(checksums)) for name, entry in arrays.items()}
    files = {name: entry._replace(crc=next(checksums)) for name, entry in files.items()}
    return arrays, files, generated, trailing


def _difference(expected: list[str], found: list[str]) -> dict[str, object]:
    """The first place where two lists of names differ, as fields of an error."""
    for n, (wanted, name) in enumerate(zip(expected, found, strict=False)):
        if wanted != name:
            twice = " (again)" if name in found[:n] else ""
            return {"expected": f"entry {wanted}", "found": f"{name[:200]!r}{twice}"}
    return {"expected": f"{len(expected)} entries", "found": len(found)}


def _compare_entries(path: Path, found: list[Entry], every: list[Entry], end: EndRecord) -> None:
    """Compare sizes and offsets; names have been compared. The last entry must end at the directory, so all of them lie
    inside the file."""
    for entry, wanted in zip(found, every, strict=True):
        if (entry.size, entry.offset) != (wanted.size, wanted.offset):
            raise damaged(
                path,
                f"the directory's entry {entry.name}",
                f"{wanted.size:,} bytes, header at {wanted.offset:,}",
                f"{entry.size:,} bytes, header at {entry.offset:,}",
            )
    last = every[-1].data + every[-1].size
    if last != end.offset:
        raise damaged(path, "the end record", f"the directory at {last:,}, after the last entry", f"{end.offset:,}")


def _compare_directory(path: Path, records: bytes, every: list[Entry]) -> None:
    at = 0
    for entry in every:
        record = central_record(entry)
        if records[at : at + len(record)] != record:
            raise damaged(path, f"the directory's entry {entry.name}", "the record that follows from the manifest")
        at += len(record)
    if at != len(records):
        raise damaged(path, "the central directory", f"{at} bytes", len(records))


def _compare_manifest(path: Path, manifest: Manifest, arrays: dict[str, Entry], files: dict[str, Entry]) -> None:
    """Compare offsets: the one thing in a checked manifest that the layout may still contradict."""
    for kind, said, lies in (("arrays", manifest.arrays, arrays), ("files", manifest.files, files)):
        for name, entry in lies.items():
            if said[name].offset != entry.data:
                raise damaged(path, f"{MANIFEST}, {kind}.{name}.offset", entry.data, said[name].offset)


def _compare_headers(file: BinaryIO, path: Path, entries: Iterable[Entry]) -> None:
    for entry in entries:
        header = local_header(entry)
        if _read(file, path, entry.offset, len(header)) != header:
            raise damaged(path, f"the local header of {entry.name} or its padding")


def _compare_generated(file: BinaryIO, path: Path, generated: list[Entry], trailing: bytes) -> None:
    start = generated[0].offset
    read = _read(file, path, start, len(trailing))
    if read == trailing:
        return
    for entry in generated:
        end = entry.data + entry.size - start
        if read[:end] != trailing[:end]:
            raise damaged(path, entry.name, "the content that follows from the manifest", "another")


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


def pack_command(model: Path) -> str:
    """The command that makes an artifact of a model, quickly and exactly."""
    name = model.absolute().stem if model.is_file() else model.resolve().name
    return f"pi-compile pack --plain {shlex.quote(str(model))} -o {shlex.quote(name + '.pi')}"


def foreign(file: BinaryIO, path: Path, nbytes: int) -> ArtifactError:
    """The error for a file that does not end like an artifact of this version."""
    head = _window(file, 0, nbytes)
    tail = _window(file, nbytes - _WINDOW, nbytes)
    comments = list(_COMMENT.finditer(tail))
    if comments and int(comments[-1][1][:9]) != FORMAT_VERSION:
        return wrong_version(str(path), int(comments[-1][1][:9]))
    if head[LOCAL.size : LOCAL.size + len(_FIRST_ENTRY)] != _FIRST_ENTRY:
        kind = _kind(head)
        remedy = pack_command(path) if kind in _MODELS else _PACK
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
