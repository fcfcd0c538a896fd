"""What users get wrong about outputs and devices; and what happens to files when a run is cut short."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.commands import FIT, INTERRUPTED, USAGE, assert_a_message, child
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
    assert (process.returncode, err.splitlines()[-1]) == (INTERRUPTED, "interrupted")
    assert old.read_bytes() == before
    assert not list(tmp_path.glob(".a.pi.*.tmp"))


# Running.


def test_a_gpu_that_is_not_there(fails: Fails, artifact: Path) -> None:
    message = fails(USAGE, artifact, "--prompt", "x", "--device", "cuda:99", app=pi_run)
    assert "--device cuda:99: no such GPU" in message
    assert "try: --device cpu" in message


def test_profiling_on_a_gpu_that_is_not_there(fails: Fails, recipe: Path) -> None:
    message = fails(USAGE, "profile", recipe, "--device", "cuda:99")
    assert "--device cuda:99: no such GPU" in message
    assert not (recipe.parent / ".pi-build").exists()
