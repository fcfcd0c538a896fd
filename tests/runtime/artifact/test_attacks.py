"""Hostile files, consistent but for one lie, digest included: refused by a named error, every one."""

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forge import PREFIX, Forged, change_manifest, put_together, refused, seal, take_apart
from support.paths import GOLDEN
from support.synthetic import bare_manifest, small_decoder

from pi_runtime.artifact import layout
from pi_runtime.artifact.decoding import canonical_json
from pi_runtime.artifact.features import used
from pi_runtime.artifact.records import EndRecord, central_record
from pi_runtime.artifact.schema import ArrayEntry, FileEntry
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.artifact.verification import verify

DATA = GOLDEN.read_bytes()
ZEROS = "0" * 64
NODE = [e.name for e in take_apart(GOLDEN)].index(b"embedding/zarr.json")


def forged(change: Callable[[list[Forged]], object], **options: Any) -> bytes:
    entries = take_apart(GOLDEN)
    change(entries)
    return put_together(entries, **options)


def nothing(_: list[Forged]) -> None:
    pass


def test_the_forger_can_write_the_truth() -> None:
    assert forged(nothing) == DATA


def duplicate(entries: list[Forged]) -> None:
    entries.insert(1, Forged(entries[0].name, entries[0].data, 64))


def overlap(entries: list[Forged]) -> None:
    entries[1].offset = 0


def swap(entries: list[Forged]) -> None:
    entries[1], entries[2] = entries[2], entries[1]


def rename(n: int, name: bytes, local: bytes | None = None) -> Callable[[list[Forged]], None]:
    def change(entries: list[Forged]) -> None:
        entries[n].name, entries[n].local_name = name, local

    return change


def put(n: int, **values: Any) -> Callable[[list[Forged]], None]:
    def change(entries: list[Forged]) -> None:
        for key, value in values.items():
            setattr(entries[n], key, value)

    return change


def insert(n: int, entry: Forged) -> Callable[[list[Forged]], None]:
    return lambda entries: entries.insert(n, entry)


def compress(entries: list[Forged]) -> None:
    raw = zlib.compressobj(wbits=-15)
    packed = raw.compress(bytes(1 << 24)) + raw.flush()
    entries[0].data, entries[0].method, entries[0].size = packed, 8, 1 << 24


LIES: dict[str, tuple[Callable[[list[Forged]], object], dict[str, Any], str]] = {
    "prepended": (nothing, {"before": b"#!/bin/sh\n"}, "entry embedding/c/0/0"),
    "hole before the directory": (nothing, {"between": b"x"}, "manifest.json"),
    "duplicate entry": (duplicate, {}, "central directory"),
    "overlapping entries": (overlap, {}, "entry layers/0/attention/norm/weight/c/0"),
    "another order": (swap, {}, "central directory"),
    "entry missing": (lambda e: e.pop(3), {}, "central directory"),
    "foreign entry": (insert(5, Forged(b"setup.py", b"import os")), {}, "'setup.py'"),
    "entry after the manifest": (lambda e: e.append(Forged(b"z", b"")), {}, "manifest.json as the last entry"),
    "absolute name": (rename(2, b"/etc/passwd"), {}, "'/etc/passwd'"),
    "escaping name": (rename(2, b"../../x"), {}, "'../../x'"),
    "backslashes": (rename(2, b"layers\\0\\attention\\qkv"), {}, "central directory"),
    "name with a zero byte": (rename(2, b"layers/0\0"), {}, "central directory"),
    "name that is not ASCII": (rename(2, "läyers".encode()), {}, "central directory"),
    "empty name": (rename(2, b""), {}, "central directory"),
    "terminal escapes": (rename(2, b"\x1b[2J"), {}, "'\\x1b[2J'"),
    "two names for one entry": (rename(2, b"layers/0/attention/qkv/c/0/0", b"other"), {}, "damaged at"),
    "compressed entry": (put(0, method=8), {}, "entry embedding/c/0/0"),
    "zip bomb": (compress, {}, "damaged at"),
    "encrypted": (put(0, flags=1), {}, "entry embedding/c/0/0"),
    "data descriptor": (put(0, flags=8), {}, "entry embedding/c/0/0"),
    "entry comment": (put(0, comment=b"hello"), {}, "central directory"),
    "size too small": (put(0, size=257 * 192 - 1), {}, "entry embedding/c/0/0"),
    "size too large": (put(0, size=257 * 192 + 1), {}, "entry embedding/c/0/0"),
    "size of 4 GiB": (put(0, size=0xFFFFFFFE), {}, "entry embedding/c/0/0"),
    "ZIP64 size without its record": (put(0, size=0xFFFFFFFF), {}, "entry embedding/c/0/0"),
    "ZIP64 offset without its record": (put(1, offset=0xFFFFFFFF), {}, "entry layers/0/attention"),
    "manifest of 4 GiB": (put(-1, size=0xFFFFFFFE), {}, "manifest.json"),
    "offset far away": (put(1, offset=0xFFFFFFF0), {}, "entry layers/0/attention/norm/weight"),
    "padding that is not zero": (put(0, fill=b"x"), {}, "its padding"),
    "alignment lost": (put(0, align=1), {}, "damaged at"),
    "longer array": (lambda e: setattr(e[0], "data", e[0].data + bytes(64)), {}, "entry embedding/c/0/0"),
    "count too high": (nothing, {"count": 100}, "100 entries"),
    "count of ZIP64": (nothing, {"count": 0xFFFF}, "end record"),
    "directory size": (nothing, {"directory_size": 100}, "end record"),
    "directory of 4 GiB": (nothing, {"directory_size": 0xFFFFFFFF}, "end record"),
    "directory offset": (nothing, {"directory_offset": 0}, "end record"),
    "directory offset of ZIP64": (nothing, {"directory_offset": 0xFFFFFFFF}, "end record"),
    "zarr.json of another shape": (
        lambda e: put(NODE, crc=zlib.crc32(e[NODE].data), data=e[NODE].data.replace(b"257", b"999"))(e),
        {},
        "damaged at embedding/zarr.json",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_of_the_container(scratch: Path, name: str) -> None:
    change, options, part = LIES[name]
    data = forged(change, **options)
    assert data != DATA
    message = refused(scratch, data)
    assert part in message
    assert "\x1b" not in message
    assert "\0" not in message


MANIFEST_LIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "shape": (lambda m: m["arrays"]["embedding"].update(shape=[257, 73]), "arrays.embedding"),
    "huge shape": (lambda m: m["decoder"].update(vocab_size=2**31 - 1), "arrays.embedding"),
    "dtype": (lambda m: m["arrays"]["embedding"].update(format="f16"), "arrays.embedding"),
    "array elsewhere": (lambda m: m["arrays"]["embedding"].update(offset=128), "arrays.embedding.offset"),
    "array outside": (lambda m: m["arrays"]["embedding"].update(offset=2**62), "arrays.embedding.offset"),
    "array before": (lambda m: m["arrays"]["embedding"].update(offset=-64), "arrays.embedding.offset"),
    "file elsewhere": (lambda m: m["files"]["tokenizer.json"].update(offset=0), "files.tokenizer.json.offset"),
    "file longer": (lambda m: m["files"]["tokenizer.json"].update(nbytes=10**6), "entry tokenizer.json"),
    "file of 2⁶² bytes": (lambda m: m["files"]["tokenizer.json"].update(nbytes=2**62), "entry tokenizer.json"),
    "scales missing": (
        lambda m: m["arrays"].pop("layers/0/ffn/rest_scales"),
        "arrays.layers/0/ffn/rest_scales: missing",
    ),
    "scales of another shape": (
        lambda m: m["arrays"]["layers/0/ffn/first_scales"].update(shape=[40, 4]),
        "arrays.layers/0/ffn/first_scales: scale (40, 4) in 320 bytes, expected scale (40, 3) in 320",
    ),
    "array missing": (lambda m: m["arrays"].pop("head"), "arrays.head: missing"),
    "unknown key": (lambda m: m.update(code="import os"), "manifest.code: unknown key"),
    "wrong type": (lambda m: m.update(profiled_tokens="many"), "manifest.profiled_tokens: expected int"),
    "other decoder": (lambda m: m["decoder"].update(tied_head=True), "arrays.head: not an array of this decoder"),
    "other version": (lambda m: m.update(version=2), "artifact format version 2"),
    "not a number": (lambda m: m["decoder"].update(norm_eps=float("nan")), "not JSON"),
}


@pytest.mark.parametrize("name", MANIFEST_LIES)
def test_lies_of_the_manifest(scratch: Path, name: str) -> None:
    change, part = MANIFEST_LIES[name]
    assert part in refused(scratch, forged(lambda entries: change_manifest(entries, change)))


def test_a_manifest_that_is_not_canonical(scratch: Path) -> None:
    data = forged(lambda e: setattr(e[-1], "data", json.dumps(json.loads(e[-1].data)).encode()))
    assert "not in canonical JSON" in refused(scratch, data)


def test_a_wrong_digest_in_the_manifest(scratch: Path) -> None:
    def change(m: Any) -> None:
        m["arrays"]["head"]["sha256"] = "0" * 64
        m["files"]["tokenizer.json"]["sha256"] = "0" * 64

    message = refused(scratch, forged(lambda entries: change_manifest(entries, change)), verify)
    assert "array head, file tokenizer.json" in message


def test_a_wrong_checksum_in_the_directory(scratch: Path) -> None:
    assert "array embedding" in refused(scratch, forged(put(0, crc=1)), verify)
    assert "manifest.json" in refused(scratch, forged(put(-1, crc=1)))
    assert "entry embedding/zarr.json" in refused(scratch, forged(put(NODE, crc=1)))


def test_a_true_file_with_other_data_passes(scratch: Path) -> None:
    """The refusals above are not for the forger's sake: an honest change of everything is accepted."""
    import hashlib

    def change(entries: list[Forged]) -> None:
        entries[0].data = np.arange(257 * 96, dtype="<u2").tobytes()
        digest = hashlib.sha256(entries[0].data).hexdigest()
        change_manifest(entries, lambda m: m["arrays"]["embedding"].update(sha256=digest))

    scratch.write_bytes(forged(change))
    verify(scratch)


def test_end_record_alone(scratch: Path) -> None:
    """A directory of no entries, and sizes that point before the file."""
    for size, offset in ((0, 0), (46, 0), (0, 46), (0xFFFFFFFE, 0xFFFFFFFE)):
        end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 0, 0, size, offset, len(PREFIX) + 64) + PREFIX
        assert "damaged at" in refused(scratch, seal(end))


@pytest.mark.parametrize("size", [0, 100, (1 << 63) - 1, (1 << 64) - 1])
@pytest.mark.parametrize("offset", [0, 1 << 62, (1 << 64) - 1])
def test_lies_of_zip64_end_records(scratch: Path, size: int, offset: int) -> None:
    full = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, len(PREFIX) + 64)
    for count in (0, 1, (1 << 64) - 1):
        end64 = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 3 << 8 | 45, 45, 0, 0, count, count, size, offset)
        locator = b"PK\6\7" + struct.pack("<IQI", 0, (size + offset) % (1 << 64), 1)
        assert "damaged at" in refused(scratch, seal(DATA[:5000] + end64 + locator + full + PREFIX))


def test_arrays_far_larger_than_the_file(scratch: Path) -> None:
    """Manifest, directory and end record agree on 2⁶² bytes that are not there."""
    decoder = small_decoder(vocab_size=2**31 - 1, d_model=2**28, n_layers=1)
    manifest = bare_manifest(decoder, dict.fromkeys(PARTS, "f32"), [None])
    specs = layout.manifest_specs(manifest)
    arrays, offset = layout.place_arrays(specs)
    files, offset = layout.place_files([("tokenizer.json", 2)], offset)
    changed = replace(
        manifest,
        features=used(manifest),
        arrays={
            name: ArrayEntry(format=s.format, shape=s.shape, offset=arrays[name].data, nbytes=s.nbytes, sha256=ZEROS)
            for name, s in specs.items()
        },
        files={"tokenizer.json": FileEntry(offset=files["tokenizer.json"].data, nbytes=2, sha256=ZEROS)},
    )
    generated, trailing = layout.trailer(specs, canonical_json(changed), offset)
    directory = b"".join(map(central_record, [*arrays.values(), *files.values(), *generated]))
    end = EndRecord(len(arrays) + 1 + len(generated), len(directory), len(trailing)).pack(len(PREFIX) + 64)
    assert "after the last entry" in refused(scratch, seal(trailing + directory + end + PREFIX))
