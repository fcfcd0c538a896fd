"""Beyond 4 GiB: the same records with the threshold lowered, and one sparse file of real size."""

import struct
import sys
import zipfile
from pathlib import Path
from zlib import crc32

import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact import records
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.records import (
    EndRecord,
    Entry,
    central_record,
    local_header,
    parse_directory,
    parse_end,
    place,
)
from pi_runtime.artifact.verification import verify
from pi_runtime.errors import ArtifactError


@pytest.mark.parametrize(("size", "count"), [(30000, 0xFFFF), (5000, 0xFFFF), (1, 0xFFFF), (1 << 32, 3), (1, 1)])
def test_artifact_with_lowered_thresholds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, count: int
) -> None:
    plain = random_artifact(tmp_path / "plain.pi", small_decoder())
    monkeypatch.setattr(records, "ZIP64_FROM", size)
    monkeypatch.setattr(records, "MANY_FROM", count)
    path = random_artifact(tmp_path / "a.pi", small_decoder())
    verify(path)
    assert (path.read_bytes() != plain.read_bytes()) == (size < 1 << 32 or count < 10)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(plain) as other:
        assert archive.testzip() is None
        assert archive.namelist() == other.namelist()
        for name in archive.namelist()[:-1]:
            assert archive.read(name) == other.read(name)
    for n in range(len(path.read_bytes()) - 300, len(path.read_bytes()) - 64, 3):
        data = bytearray(path.read_bytes())
        data[n] ^= 1
        (tmp_path / "b.pi").write_bytes(data)
        with pytest.raises(ArtifactError):
            Artifact.open(tmp_path / "b.pi")


def test_zip64_is_refused_where_it_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as lowered:
        lowered.setattr(records, "ZIP64_FROM", 5000)
        path = random_artifact(tmp_path / "a.pi", small_decoder())
    with pytest.raises(ArtifactError, match="end record"):
        Artifact.open(path)


@pytest.mark.skipif(sys.platform == "win32", reason="files are not sparse by themselves there")
def test_a_sparse_file_of_real_size(tmp_path: Path) -> None:
    """Records around 5 GiB of nothing, as Python's zipfile reads them."""
    first = place("a/c/0", 5 << 30, 0, 4096)
    second = place("b/c/0", 3, first.data + first.size, 64)._replace(crc=crc32(b"abc"))
    path, directory = tmp_path / "a.zip", central_record(first) + central_record(second)
    with path.open("wb") as file:
        file.write(local_header(first))
        file.seek(second.offset)
        file.write(local_header(second) + b"abc" + directory)
        file.write(EndRecord(2, len(directory), second.data + 3).pack(0))
    assert path.stat().st_size == second.data + 3 + len(directory) + 56 + 20 + 22
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        assert [(i.filename, i.file_size, i.header_offset) for i in infos] == [
            ("a/c/0", 5 << 30, 0),
            ("b/c/0", 3, second.offset),
        ]
        with archive.open("b/c/0") as opened:
            assert opened.read() == b"abc"
    assert second.offset > 1 << 32


@pytest.mark.parametrize("size", [0, 0xFFFFFFFE, 0xFFFFFFFF, 0x100000000, 1 << 40])
@pytest.mark.parametrize("offset", [0, 0xFFFFFFFE, 0xFFFFFFFF, 1 << 40])
def test_records_round_trip(size: int, offset: int) -> None:
    entry = Entry("a/c/0", size, offset, offset + 4096, 7)
    assert list(parse_directory(central_record(entry))) == [entry._replace(data=0)]
    end = EndRecord(3, size, offset)
    assert parse_end(bytes(100) + end.pack(90)) == end
    header = local_header(entry)
    assert len(header) == 4096
    zip64 = size >= 0xFFFFFFFF
    assert struct.unpack_from("<H", header, 4)[0] == (45 if zip64 else 20)
    assert struct.unpack_from("<I", header, 22)[0] == (0xFFFFFFFF if zip64 else size)


def test_many_entries() -> None:
    for count in (0xFFFE, 0xFFFF, 0x10000):
        end = EndRecord(count, 46 * count, 1 << 30)
        assert parse_end(bytes(100) + end.pack(0)) == end
        assert len(end.pack(0)) == (22 if count < 0xFFFF else 98)
