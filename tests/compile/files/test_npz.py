"""Arrays in files: written whole, however little one call of the system writes."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pi_compile.errors import ProfileError
from pi_compile.files import read_arrays, write_array_stream, write_arrays


@pytest.mark.parametrize("way", ["plain", "compressed", "stream"])
def test_a_write_that_writes_a_part_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    arrays = {"a": np.arange(300), "b": np.eye(7, dtype=np.float32)}

    def written(name: str) -> bytes:
        path = tmp_path / name
        if way == "stream":
            write_array_stream(path, arrays.items())
        else:
            write_arrays(path, arrays, compressed=way == "compressed")
        assert read_arrays(path).keys() == arrays.keys()
        return path.read_bytes()

    whole, write, calls = written("whole.npz"), os.write, list[int]()

    def short(fd: int, data: memoryview) -> int:
        calls.append(len(data))
        return write(fd, data[: max(1, len(data) // 3)])

    monkeypatch.setattr(os, "write", short)
    assert written("short.npz") == whole
    assert len(calls) > 20


def test_only_a_compressed_file_is_compressed(tmp_path: Path) -> None:
    zeros, sizes = {"zeros": np.zeros(10_000)}, []
    for compressed in (False, True):
        path = tmp_path / f"{compressed}.npz"
        write_arrays(path, zeros, compressed=compressed)
        np.testing.assert_array_equal(read_arrays(path)["zeros"], zeros["zeros"])
        sizes.append(path.stat().st_size)
    assert sizes[0] > zeros["zeros"].nbytes
    assert sizes[1] < zeros["zeros"].nbytes / 10


def test_an_array_may_have_as_many_bytes_as_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_arrays(path, {"a": np.arange(300)}, compressed=False)
    with zipfile.ZipFile(path) as file:
        nbytes = file.getinfo("a.npy").file_size
    assert read_arrays(path, most=nbytes)["a"][-1] == 299
    with pytest.raises(ProfileError, match=f"more than {nbytes - 1:,} bytes"):
        read_arrays(path, most=nbytes - 1)
