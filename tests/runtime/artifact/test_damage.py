"""Damaged files: one bit anywhere is found, and the damaged part named."""

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forge import refusal, refused, take_apart
from support.paths import GOLDEN
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.verification import verify

DATA = GOLDEN.read_bytes()


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
        ("header", 11, Artifact.open),
        ("generated", 41, Artifact.open),
        ("directory", 11, Artifact.open),
        ("end", 1, Artifact.open),
        ("digest", 1, verify),
        ("file", 41, verify),
        ("array", 599, verify),
    ],
)
def test_one_flipped_bit_is_found(
    scratch: Path, kind: str, stride: int, check: Callable[[Path], object], long: bool
) -> None:
    assert sum(end - start for _, start, end in REGIONS) == len(DATA)
    scratch.write_bytes(DATA)
    with scratch.open("r+b", buffering=0) as file:
        for n in flipped(kind, 1 if long else stride):
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
    data[data.index(b"tokenizer.json") + 100] ^= 16
    scratch.write_bytes(data)
    Artifact.open(scratch).close()
    message = refusal(scratch, verify)
    assert "array embedding, array layers/1/ffn/rest" in message
    assert "file tokenizer.json" in message
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


def test_the_file_shrinks_while_it_is_verified(scratch: Path) -> None:
    path = random_artifact(scratch, small_decoder(vocab_size=60000, d_model=64))
    nbytes = path.stat().st_size

    def cut(done: int, total: int) -> None:
        if done < total:
            os.truncate(path, nbytes // 2)

    assert "became shorter" in refusal(path, lambda p: verify(p, cut))
