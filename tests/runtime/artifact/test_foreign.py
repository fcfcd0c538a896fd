"""Other things in an artifact's place: recognised, and the message helps."""

import os
import shutil
from pathlib import Path

import pytest
from support.forge import refusal, refused
from support.paths import GOLDEN

DATA = GOLDEN.read_bytes()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "an empty file"),
        (b"hello\n", "a text file"),
        (b"PK\5\6" + bytes(18), "a ZIP file of something else"),
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


@pytest.mark.parametrize(("magic", "kind"), [(b"GGUF", "a GGUF model"), (b"PWRI", "a GGUF model of PowerInfer")])
def test_a_gguf_file_has_a_command(tmp_path: Path, magic: bytes, kind: str) -> None:
    message = refused(tmp_path / "my model.gguf", magic + b"\3\0\0\0")
    assert f"found: {kind}\n" in message
    assert f"try: pi-compile pack --plain '{tmp_path}/my model.gguf' -o 'my model.pi'" in message


def test_no_such_file(tmp_path: Path) -> None:
    message = refusal(tmp_path / "model.pi")
    assert "no such file" in message
    assert "pi-compile build" in message
    shutil.copy(GOLDEN, tmp_path / "modle.pi")
    assert f"did you mean {tmp_path / 'modle.pi'}?" in refusal(tmp_path / "model.pi")
    assert f"did you mean {tmp_path / 'modle.pi'}?" in refusal(tmp_path)


def test_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = f"pi-compile pack --plain {tmp_path} -o {tmp_path.name}.pi"
    assert f"this looks like a checkpoint: {command}" in refusal(tmp_path)


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


@pytest.mark.parametrize("version", [b"0", b"2", b"3", b"10"])
def test_other_versions(scratch: Path, version: bytes) -> None:
    message = refused(scratch, DATA.replace(b"pi-artifact/1 ", b"pi-artifact/" + version + b" "))
    assert f"artifact format version {version.decode()}" in message
    assert "expected: version 1" in message
    assert "pi-compile pack --plain MODEL -o FILE" in message
