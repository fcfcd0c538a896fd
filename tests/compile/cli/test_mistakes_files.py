"""What users get wrong about outputs, artifacts and running them; and what happens to files when a run is cut short."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.commands import FIT, INPUT, INTERRUPTED, USAGE, assert_a_message, child
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.verification import verify
from pi_runtime.commands.run import app as pi_run

linux = pytest.mark.skipif(sys.platform != "linux", reason="signals and limits of POSIX")
Fails = Callable[..., str]

# The output.

Writes = dict[str, Callable[[Path, Path, Path], list[object]]]
WRITES: Writes = {
    "init": lambda model, _, output: ["init", model, "--force", "-o", output],
    "pack": lambda _, recipe, output: ["pack", "--plain", recipe, "-o", output],
    "build": lambda _, recipe, output: ["build", recipe, "-o", output],
    "machine": lambda _, __, output: ["machine", "-o", output],
}


@pytest.mark.parametrize("command", WRITES)
def test_an_output_in_no_folder(fails: Fails, model: Path, recipe: Path, tmp_path: Path, command: str) -> None:
    output = tmp_path / "no" / "where"
    fails(USAGE, *WRITES[command](model, recipe, output))


@pytest.mark.parametrize("command", WRITES)
def test_an_output_that_is_a_folder(fails: Fails, model: Path, recipe: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "out").mkdir()
    fails(USAGE, *WRITES[command](model, recipe, tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("command", ["profile", "train"])
def test_an_export_that_is_a_folder(fails: Fails, recipe: Path, tmp_path: Path, command: str) -> None:
    message = fails(USAGE, command, recipe, "--export", tmp_path)
    assert f"--export {tmp_path}: is a folder" in message
    assert f"try: --export {tmp_path / 'NAME'}" in message


@pytest.mark.parametrize("command", WRITES)
def test_an_output_where_writing_is_not_allowed(
    fails: Fails, model: Path, recipe: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    if os.access(tmp_path / "out", os.W_OK):  # we are root, to whom everything is allowed
        monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    message = fails(USAGE, *WRITES[command](model, recipe, tmp_path / "out" / "x"))
    assert f"no permission to write in {tmp_path / 'out'}" in message


@pytest.mark.parametrize("command", ["pack", "build"])
def test_only_artifacts_are_replaced(fails: Fails, model: Path, recipe: Path, command: str) -> None:
    for precious in (recipe, model / "model.safetensors"):
        before = precious.read_bytes()
        fails(USAGE, *WRITES[command](model, recipe, precious))
        assert precious.read_bytes() == before


@pytest.mark.slow
@linux
def test_a_full_disk_keeps_the_older_artifact(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # its file would meet the limit too
    old = random_artifact(tmp_path / "a.pi", small_decoder())
    before = old.read_bytes()
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))"
    process = child(limit, "pack", "--plain", recipe, "-o", old)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (FIT, ""), err
    assert_a_message(err)
    assert f"{old}: the file system or a limit allows no larger file" in err
    assert "name an output on another disk" in err
    assert old.read_bytes() == before
    assert not list(tmp_path.glob(".*.tmp"))
    verify(old)


@pytest.mark.slow
@linux
def test_interrupted(recipe: Path, tmp_path: Path) -> None:
    old = random_artifact(tmp_path / "a.pi", small_decoder())
    before = old.read_bytes()
    wait = """
        import time
        from pi_runtime.artifact.writer import ArtifactWriter
        def add_file(self, name, data):
            print("packing", flush=True)
            time.sleep(100)
        ArtifactWriter.add_file = add_file
    """
    process = child(wait, "pack", "--plain", recipe, "-o", old)
    assert process.stdout is not None
    assert process.stdout.readline() == "packing\n"
    assert list(tmp_path.glob(".a.pi.*.tmp"))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (INTERRUPTED, "interrupted\n")
    assert old.read_bytes() == before
    assert not list(tmp_path.glob(".a.pi.*.tmp"))


# The artifact.


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_such_artifact(fails: Fails, artifact: Path, command: str) -> None:
    fails(INPUT, command, artifact.with_name("b.pi"))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "an empty file"),
        (b"[model]\n", "a text file"),
        (b"GGUF\x03\0\0\0", "a GGUF model"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"\x10\0\0\0\0\0\0\0" + b'{"a":{}}        ', "a safetensors file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("command", ["inspect", "verify", "pi-run"])
def test_not_an_artifact(fails: Fails, tmp_path: Path, command: str, content: bytes, kind: str) -> None:
    path = tmp_path / "a.pi"
    path.write_bytes(content)
    run = [path, "--prompt", "x"]
    message = fails(INPUT, *run, app=pi_run) if command == "pi-run" else fails(INPUT, command, path)
    assert f"{path}: not an artifact" in message
    assert f"found: {kind}" in message


def test_a_checkpoint_instead_of_an_artifact(fails: Fails, model: Path) -> None:
    message = fails(INPUT, "inspect", model)
    assert "this looks like a checkpoint: pi-compile init " in message


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_truncated(fails: Fails, artifact: Path, command: str) -> None:
    artifact.write_bytes(artifact.read_bytes()[:50000])
    message = fails(INPUT, command, artifact)
    assert f"{artifact}: damaged at the end of the file" in message
    assert "truncated" in message
    assert "pack it anew" in message


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


FLIPS: dict[str, tuple[Callable[[bytes], int], str]] = {
    "data": (lambda data: data.index(b"layers/0/ffn/rest/c/0/0/0") + 4096, "array layers/0/ffn/rest"),
    "row-padding": (lambda data: data.index(b"layers/0/attention/out/c/0/0") + 160, "array layers/0/attention/out"),
    "header-padding": (lambda data: data.index(b"embedding/c/0/0") + 22, "local header of embedding/c/0/0 or its"),
    "tokenizer": (lambda data: data.index(b"tokenizer.json") + 100, "file tokenizer.json"),
    "directory": (lambda data: data.rindex(b"layers/0/ffn/rest/zarr.json") - 1, "layers/0/ffn/rest/zarr.json"),
    "digest": (lambda data: len(data) - 7, "the digest in the end record"),
}


@pytest.mark.parametrize("part", FLIPS)
def test_one_flipped_bit(fails: Fails, artifact: Path, part: str) -> None:
    offset, named = FLIPS[part]
    flip(artifact, offset(artifact.read_bytes()))
    message = fails(INPUT, "verify", artifact)
    assert f"{artifact}: damaged" in message
    assert named in message
    assert "copy or download it again" in message


@pytest.mark.parametrize("version", [3, 9])
def test_an_artifact_of_another_version(fails: Fails, artifact: Path, version: int) -> None:
    data = artifact.read_bytes()
    artifact.write_bytes(data.replace(b"pi-artifact/1 ", b"pi-artifact/%d " % version))
    message = fails(INPUT, "inspect", artifact)
    assert f"{artifact}: artifact format version {version}" in message
    assert "expected: version 1" in message
    assert "pi-compile pack --plain MODEL -o FILE" in message


# Running.


def test_a_gpu_that_is_not_there(fails: Fails, artifact: Path) -> None:
    message = fails(USAGE, artifact, "--prompt", "x", "--device", "cuda:99", app=pi_run)
    assert "--device cuda:99: no such GPU" in message
    assert "try: --device cpu" in message


def test_profiling_on_a_gpu_that_is_not_there(fails: Fails, recipe: Path) -> None:
    message = fails(USAGE, "profile", recipe, "--device", "cuda:99")
    assert "--device cuda:99: no such GPU" in message
    assert not (recipe.parent / ".pi-build").exists()


@pytest.mark.parametrize("command", ["profile", "pi-run"])
def test_a_device_nobody_knows(fails: Fails, artifact: Path, recipe: Path, command: str) -> None:
    if command == "pi-run":
        message = fails(USAGE, artifact, "--prompt", "x", "--device", "gpu", app=pi_run)
    else:
        message = fails(USAGE, command, recipe, "--device", "gpu")
    assert "--device gpu: unknown device" in message
    assert "cuda:N" in message


def test_a_prompt_longer_than_the_context(fails: Fails, artifact: Path) -> None:
    message = fails(INPUT, artifact, "--prompt", "x" * 100, app=pi_run)
    assert "the prompt has 100 tokens" in message
    assert "fewer than the context of 64" in message
    assert "--ctx-size" in message


def test_a_context_longer_than_the_model_has(fails: Fails, artifact: Path) -> None:
    assert "--ctx-size 65" in fails(USAGE, artifact, "--prompt", "x", "--ctx-size", 65, app=pi_run)


def test_neither_prompt_nor_chat(fails: Fails, artifact: Path) -> None:
    assert "give one of --prompt TEXT" in fails(USAGE, artifact, app=pi_run)
