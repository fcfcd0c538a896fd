"""Damaged and hostile files: refused by a named error, every one."""

import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact.forge import PREFIX, Forged, change_manifest, put_together, seal, take_apart
from hypothesis import given
from hypothesis import strategies as st
from synthetic import bare_manifest, random_artifact, small_decoder

from pi_runtime.artifact import Artifact, layout, verify
from pi_runtime.artifact.records import End
from pi_runtime.artifact.schema import ArrayEntry, FileEntry
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.errors import ArtifactError

GOLDEN = Path(__file__).with_name("golden.pi")
DATA = GOLDEN.read_bytes()
ZEROS = "0" * 64


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacks") / "a.pi"


def refusal(path: Path, check: Callable[[Path], object] = Artifact.open) -> str:
    """The message with which `check` refuses the file, and nothing but an ArtifactError."""
    with pytest.raises(ArtifactError) as caught:
        check(path)
    assert caught.value.exit_code == 3
    assert str(path) in str(caught.value)
    return str(caught.value)


def refused(path: Path, data: bytes, check: Callable[[Path], object] = Artifact.open) -> str:
    path.write_bytes(data)
    return refusal(path, check)


# Damage


def regions() -> Iterator[tuple[str, int, int]]:
    """(kind, start, end) of everything in the golden file."""
    at = 0
    for e in take_apart(GOLDEN):
        start = DATA.index(e.name, at) - 30
        data = start + 30 + len(e.name) + struct.unpack_from("<H", DATA, start + 28)[0]
        assert start == at
        yield "header", start, data
        generated = e.name.endswith((b"zarr.json", b"manifest.json"))
        yield "array" if b"/c/" in e.name else "generated" if generated else "file", data, data + len(e.data)
        at = data + len(e.data)
    end = DATA.rindex(b"PK\5\6")
    yield "directory", at, end
    yield "end", end, len(DATA) - 64
    yield "digest", len(DATA) - 64, len(DATA)


REGIONS = list(regions())


def flipped(kind: str, stride: int) -> Iterator[int]:
    offsets = (n for k, start, end in REGIONS if k == kind for n in range(start, end))
    return (n for i, n in enumerate(offsets) if i % stride == 0)


@pytest.mark.parametrize(
    ("kind", "stride", "check"),
    [
        ("header", 3, Artifact.open),
        ("generated", 17, Artifact.open),
        ("directory", 3, Artifact.open),
        ("end", 1, Artifact.open),
        ("digest", 1, verify),
        ("file", 41, verify),
        ("array", 211, verify),
    ],
)
def test_one_flipped_bit_is_found(scratch: Path, kind: str, stride: int, check: Callable[[Path], object]) -> None:
    assert sum(end - start for _, start, end in REGIONS) == len(DATA)
    scratch.write_bytes(DATA)
    with scratch.open("r+b", buffering=0) as file:
        for n in flipped(kind, stride):
            file.seek(n)
            file.write(bytes([DATA[n] ^ 1 << n % 8]))
            refusal(scratch, check)
            file.seek(n)
            file.write(DATA[n : n + 1])
    verify(scratch)


@given(st.integers(0, len(DATA) - 1), st.integers(0, 7))
def test_any_flipped_bit_is_found(scratch: Path, offset: int, bit: int) -> None:
    data = bytearray(DATA)
    data[offset] ^= 1 << bit
    refused(scratch, bytes(data), verify)


@pytest.mark.parametrize(
    ("where", "part"),
    [
        (b"embedding/c/0/0", "local header of embedding/c/0/0"),
        (b"layers/1/ffn/rest/zarr.json", "layers/1/ffn/rest/zarr.json"),
        (b'{"attributes":{"format":"bf16"', "embedding/zarr.json"),
        (b'"arrays"', "manifest.json"),
        (b"PK\1\2", "central directory"),
        (b"layers/0/ffn/first/c/0/0", "layers/0/ffn/first/c/0/0"),
        (b"PK\5\6", "end record"),
    ],
)
def test_damaged_structure_is_named(scratch: Path, where: bytes, part: str) -> None:
    data = bytearray(DATA)
    data[data.index(where)] ^= 4
    message = refused(scratch, bytes(data))
    assert part in message
    assert "copy or download it again" in message


def test_damaged_data_is_named(scratch: Path) -> None:
    with Artifact.open(GOLDEN) as artifact:
        arrays = artifact.manifest.arrays
    data = bytearray(DATA)
    for name in ("embedding", "layers/1/ffn/rest"):
        data[arrays[name].offset + arrays[name].nbytes - 1] ^= 1  # the zero padding of the last row
    scratch.write_bytes(data)
    Artifact.open(scratch).close()
    message = refusal(scratch, verify)
    assert "array embedding, array layers/1/ffn/rest" in message
    assert "head" not in message


def test_damaged_padding_between_arrays_is_named(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(vocab_size=1000))
    with Artifact.open(path) as artifact:
        offset = artifact.manifest.arrays["embedding"].offset
    data = bytearray(path.read_bytes())
    assert not any(data[offset - 1000 : offset])
    data[offset - 500] = 1
    assert "embedding/c/0/0 or its padding" in refused(path, bytes(data))


def test_damaged_digest_is_named(scratch: Path) -> None:
    upper = DATA[:-64] + DATA[-64:].upper()
    assert "the digest in the end record" in refused(scratch, upper, verify)


def test_truncated_anywhere(scratch: Path) -> None:
    rng = random.Random(0)
    starts = [start for _, start, _ in REGIONS]
    for nbytes in {*starts, *(n - 1 for n in starts if n), *rng.sample(range(len(DATA)), 200), *range(100)}:
        scratch.write_bytes(DATA)
        os.truncate(scratch, nbytes)
        refusal(scratch)
    message = refused(scratch, DATA[:-1])
    assert f"{len(DATA) - 1:,} bytes that do not end with an end record: truncated" in message


@pytest.mark.parametrize("extra", [b"\n", b"x" * 1000, b"\0" * 70000, DATA])
def test_appended_or_prepended(scratch: Path, extra: bytes) -> None:
    refused(scratch, DATA + extra)
    refused(scratch, extra + DATA)


@given(st.binary(max_size=300))
def test_noise(scratch: Path, data: bytes) -> None:
    refused(scratch, data)
    refused(scratch, data + DATA[-300:])
    refused(scratch, DATA[:300] + data)


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)), st.integers(0, 2000))
def test_shuffled_bytes(scratch: Path, here: int, there: int, nbytes: int) -> None:
    data = DATA[:here] + DATA[there : there + nbytes] + DATA[here + nbytes :]
    scratch.write_bytes(data)
    if data != DATA:
        refusal(scratch, verify)


# Other things


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "an empty file"),
        (b"hello\n", "a text file"),
        (b"PK\5\6" + bytes(18), "a ZIP file of something else"),
        (b"GGUF\3\0\0\0", "a GGUF model"),
        (b"\x10\0\0\0\0\0\0\0" + b'{"a":{}}        ', "a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html>", "a web page"),
        (bytes(range(128, 256)), "a file of another kind"),
    ],
)
def test_other_files_are_recognised(tmp_path: Path, data: bytes, kind: str) -> None:
    message = refused(tmp_path / "a.pi", data)
    assert "not an artifact" in message
    assert f"found: {kind}" in message
    assert "pi-compile build" in message


def test_no_such_file(tmp_path: Path) -> None:
    message = refusal(tmp_path / "model.pi")
    assert "no such file" in message
    assert "pi-compile build" in message
    shutil.copy(GOLDEN, tmp_path / "modle.pi")
    assert f"did you mean {tmp_path / 'modle.pi'}?" in refusal(tmp_path / "model.pi")
    assert f"did you mean {tmp_path / 'modle.pi'}?" in refusal(tmp_path)


def test_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "looks like a checkpoint" in refusal(tmp_path)


def test_a_file_that_cannot_be_read(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch.write_bytes(DATA)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert "Permission denied" in refusal(scratch)


def test_a_pipe(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no pipes with names here")
    os.mkfifo(tmp_path / "a.pi")
    assert "no regular file" in refusal(tmp_path / "a.pi")


@pytest.mark.parametrize("version", [b"0", b"2", b"10"])
def test_other_versions(scratch: Path, version: bytes) -> None:
    message = refused(scratch, DATA.replace(b"pi-artifact/1 ", b"pi-artifact/" + version + b" "))
    assert f"artifact format version {version.decode()}" in message
    assert "expected: version 1" in message


# Lies: everything consistent, digest included, but one thing


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
    "size too small": (put(0, size=16447), {}, "entry embedding/c/0/0"),
    "size too large": (put(0, size=16449), {}, "entry embedding/c/0/0"),
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
        lambda e: put(25, crc=zlib.crc32(e[25].data), data=e[25].data.replace(b"257", b"999"))(e),
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
    "shape": (lambda m: m["arrays"]["embedding"].update(shape=[257, 25]), "arrays.embedding"),
    "huge shape": (lambda m: m["decoder"].update(vocab_size=2**31 - 1), "arrays.embedding"),
    "dtype": (lambda m: m["arrays"]["embedding"].update(format="f16"), "arrays.embedding"),
    "array elsewhere": (lambda m: m["arrays"]["embedding"].update(offset=128), "arrays.embedding.offset"),
    "array outside": (lambda m: m["arrays"]["embedding"].update(offset=2**62), "arrays.embedding.offset"),
    "array before": (lambda m: m["arrays"]["embedding"].update(offset=-64), "arrays.embedding.offset"),
    "file elsewhere": (lambda m: m["files"]["tokenizer.json"].update(offset=0), "files.tokenizer.json.offset"),
    "file longer": (lambda m: m["files"]["tokenizer.json"].update(nbytes=10**6), "entry tokenizer.json"),
    "file of 2⁶² bytes": (lambda m: m["files"]["tokenizer.json"].update(nbytes=2**62), "entry tokenizer.json"),
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
    assert "entry embedding/zarr.json" in refused(scratch, forged(put(25, crc=1)))


def test_a_true_file_with_other_data_passes(scratch: Path) -> None:
    """The refusals above are not for the forger's sake: an honest change of everything is accepted."""
    import hashlib

    def change(entries: list[Forged]) -> None:
        entries[0].data = np.arange(257 * 32, dtype="<u2").tobytes()
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
    """Manifest, directory and end record agree on 2⁶³ bytes that are not there."""
    decoder = small_decoder(vocab_size=2**31 - 1, d_model=2**30, n_layers=1)
    manifest = bare_manifest(decoder, dict.fromkeys(PARTS, "f32"), [None])
    specs = layout.manifest_specs(manifest)
    arrays, offset = layout.place_arrays(specs)
    files, offset = layout.place_files([("tokenizer.json", 2)], offset)
    text = replace(
        manifest,
        arrays={
            name: ArrayEntry(format=s.format, shape=s.shape, offset=arrays[name].data, nbytes=s.nbytes, sha256=ZEROS)
            for name, s in specs.items()
        },
        files={"tokenizer.json": FileEntry(offset=files["tokenizer.json"].data, nbytes=2, sha256=ZEROS)},
    ).to_json()
    generated, trailing = layout.trailer(specs, text, offset)
    directory = layout.directory([*arrays.values(), *files.values(), *generated])
    end = End(len(arrays) + 1 + len(generated), len(directory), len(trailing)).pack(len(PREFIX) + 64)
    assert "after the last entry" in refused(scratch, seal(trailing + directory + end + PREFIX))


def test_the_file_shrinks_while_it_is_verified(scratch: Path) -> None:
    path = random_artifact(scratch, small_decoder(vocab_size=60000, d_model=64))
    nbytes = path.stat().st_size

    def cut(done: int, total: int) -> None:
        if done < total:
            os.truncate(path, nbytes // 2)

    assert "became shorter" in refusal(path, lambda p: verify(p, cut))
