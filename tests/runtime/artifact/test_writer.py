"""The file appears whole or not at all, whatever happens; an older one is never lost."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT
from support.synthetic import bare_manifest, random_artifact, small_decoder

from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.quantisation import quantise
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS, ArraySpec, array_specs, is_scales
from pi_runtime.artifact.verification import verify
from pi_runtime.artifact.writer import ArtifactWriter
from pi_runtime.errors import DoesNotFitError, InputError, UsageError
from pi_runtime.files import Replacement

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")
DECODER = small_decoder()
MANIFEST = bare_manifest(DECODER, dict.fromkeys(PARTS, "f32"), [None, None])
SPECS = array_specs(DECODER, dict.fromkeys(PARTS, "f32"), [None, None], False)


def write(
    path: Path,
    on_block: Callable[[], object] = lambda: None,
    *,
    expected_nbytes: int | None = None,
    recipe: dict[str, Any] | None = None,
) -> None:
    """Write an artifact of ones; `on_block` is called in the middle of the first array."""

    def blocks(shape: tuple[int, ...]) -> Iterator[Array]:
        yield np.ones((1, *shape[1:]), np.float32)
        on_block()
        yield np.ones((shape[0] - 1, *shape[1:]), np.float32)

    with ArtifactWriter(path, expected_nbytes=expected_nbytes) as writer:
        for name, spec in SPECS.items():
            writer.add_array(name, spec, blocks(spec.shape))
        writer.add_file("tokenizer.json", b"{}")
        writer.finish(replace(MANIFEST, recipe=recipe or {}))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An older artifact where the new one is to go."""
    return random_artifact(tmp_path / "a.pi", DECODER)


def assert_only(path: Path, content: bytes) -> None:
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == content


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_new_replaces_old(old: Path) -> None:
    before = old.read_bytes()
    with Artifact.open(old) as artifact:
        view = artifact.array("head")
        copy = view.copy()
        write(old)
        np.testing.assert_array_equal(view, copy)  # who has the old file open keeps it
    assert_only(old, old.read_bytes())
    assert old.read_bytes() != before
    verify(old)


@pytest.mark.parametrize("error", [ValueError("bad block"), KeyboardInterrupt(), OSError(errno.ENOSPC, "elsewhere")])
def test_errors_of_the_blocks_pass_unchanged(old: Path, error: BaseException) -> None:
    before = old.read_bytes()
    with pytest.raises(type(error)) as caught:
        write(old, raising(error))
    assert caught.value is error
    assert_only(old, before)


def test_a_writer_that_is_not_finished_leaves_nothing(old: Path) -> None:
    before = old.read_bytes()
    with ArtifactWriter(old) as writer:
        writer.add_file("tokenizer.json", b"{}")
    assert_only(old, before)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(old: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    before, real, calls = old.read_bytes(), Replacement.write, []

    def full(self: Replacement, data: bytes | memoryview) -> None:
        calls.append(len(data))
        if len(calls) > 2:
            raise OSError(code, os.strerror(code))
        real(self, data)

    monkeypatch.setattr(Replacement, "write", full)
    with pytest.raises(DoesNotFitError) as caught:
        write(old)
    message = str(caught.value)
    assert str(old) in message
    assert "full" in message or "quota" in message
    assert f"at least {sum(calls[:2]) + 1:,} bytes" in message
    assert "the file there now stays" in message
    assert "make room" in message
    assert_only(old, before)


def test_a_disk_too_small_is_noticed_before_anything_is_written(old: Path) -> None:
    before = old.read_bytes()
    with pytest.raises(DoesNotFitError, match="not enough room on the disk") as caught:
        write(old, expected_nbytes=1 << 60)
    assert f"at least {1 << 60:,} bytes" in str(caught.value)
    assert caught.value.exit_code == 4
    assert_only(old, before)


def test_a_disk_large_enough(tmp_path: Path) -> None:
    write(tmp_path / "a.pi", expected_nbytes=1000)
    verify(tmp_path / "a.pi")


@pytest.mark.slow
@posix
def test_a_limit_of_the_system(old: Path) -> None:
    before = old.read_bytes()
    done = run_child(old, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))")
    assert done.returncode == 4, done.stderr
    assert "allows no larger file" in done.stderr
    assert_only(old, before)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failing_at_the_very_end(old: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    before = old.read_bytes()
    target = (os, "fsync") if step == "fsync" else (Path, "replace")
    monkeypatch.setattr(*target, raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(UsageError, match="cannot be written"):
        write(old)
    assert_only(old, before)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder") as caught:
        write(tmp_path / "no" / "a.pi")
    assert "create it" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists and is not a file"):
        write(tmp_path)


def test_a_file_for_a_folder(old: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write(old / "a.pi")


@posix
def test_a_folder_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", raising(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(UsageError, match="cannot be written") as caught:
        write(tmp_path / "a.pi")
    assert "Permission denied" in str(caught.value)


def test_a_manifest_json_cannot_say(old: Path) -> None:
    before = old.read_bytes()
    with pytest.raises(InputError, match="the manifest has no JSON form"):
        write(old, recipe={"epsilon": float("nan")})
    assert_only(old, before)


def test_a_link_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "a.pi"
    link.symlink_to(tmp_path / "disk" / "real.pi")
    write(link)
    assert link.is_symlink()
    verify(tmp_path / "disk" / "real.pi")


@posix
def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    write(tmp_path / "a.pi")
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.pi").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_scales_are_the_writers_own(tmp_path: Path) -> None:
    spec = ArraySpec("q8", (257, 32))
    with ArtifactWriter(tmp_path / "a.pi") as writer:
        writer.add_array("embedding", spec, [np.ones(spec.shape, np.float32)])
        with pytest.raises(AssertionError, match="embedding_scales"):
            writer.add_array("embedding_scales", ArraySpec("scale", (257, 1)), [np.ones((257, 1), np.float32)])
    assert not list(tmp_path.iterdir())


def test_our_own_mistakes_are_assertions(tmp_path: Path) -> None:
    spec = SPECS["embedding"]
    for blocks in ([], [np.ones((3, 32), np.float32)], [np.ones((257, 31), np.float32)]):
        with pytest.raises(AssertionError), ArtifactWriter(tmp_path / "a.pi") as writer:
            writer.add_array("embedding", spec, blocks)
    with ArtifactWriter(tmp_path / "a.pi") as writer:
        writer.add_array("embedding", spec, [np.ones(spec.shape, np.float32)])
        with pytest.raises(AssertionError, match="not the arrays"):
            writer.finish(MANIFEST)
    assert not list(tmp_path.iterdir())


def test_blocks_may_share_one_buffer(tmp_path: Path) -> None:
    buffer = np.empty((1, 32), np.float32)

    def blocks(rows: int) -> Iterator[Array]:
        for row in range(rows):
            buffer[:] = row
            yield buffer

    path = tmp_path / "a.pi"
    with ArtifactWriter(path) as writer:
        for name, spec in SPECS.items():
            given = blocks(spec.shape[0]) if spec.shape[1:] == (32,) else [np.ones(spec.shape, np.float32)]
            writer.add_array(name, spec, given)
        writer.add_file("tokenizer.json", b"{}")
        writer.finish(MANIFEST)
    verify(path)
    with Artifact.open(path) as artifact:
        np.testing.assert_array_equal(artifact.values("embedding")[:, 0], np.arange(257))


@pytest.mark.slow
@posix
def test_a_killed_writer_leaves_the_old_file_and_the_next_one_cleans_up(old: Path) -> None:
    before = old.read_bytes()
    done = run_child(old, "", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert old.read_bytes() == before
    assert len(list(old.parent.iterdir())) == 2, "the killed writer's hidden file"
    write(old)
    assert_only(old, old.read_bytes())
    verify(old)


@posix
def test_a_living_writer_is_left_alone(old: Path) -> None:
    write(old, lambda: write(old))
    verify(old)
    assert_only(old, old.read_bytes())


def test_only_our_own_leftovers_are_removed(old: Path) -> None:
    others = [".a.pi.tmp", ".a.pi.1-0.tmp.txt", ".b.pi.1-0.tmp", "xa.pi.1-0.tmp", ".a.pi.x-0.tmp"]
    for name in (*others, ".a.pi.1-0.tmp"):
        (old.parent / name).write_bytes(b"x")
    write(old)
    assert {p.name for p in old.parent.iterdir()} == {"a.pi", *others}


def run_child(path: Path, before: str, on_block: str = "pass") -> subprocess.CompletedProcess[str]:
    """Write an artifact in another process, which runs `on_block` in the middle and exits with the error's code."""
    script = f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), str(ROOT / "tests")]}
        from pathlib import Path
        from pi_runtime.errors import PiError
        from test_writer import write
        {before}
        def on_block():
            {on_block}
        try:
            write(Path({str(path)!r}), on_block)
        except PiError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8", "q4"])
def test_arrays_already_encoded_make_the_same_file(tmp_path: Path, name: str) -> None:
    formats, rng = dict.fromkeys(PARTS, name), np.random.default_rng(0)
    manifest, values = bare_manifest(DECODER, formats, [None, None]), {}
    specs = {n: s for n, s in array_specs(DECODER, formats, [None, None], False).items() if not is_scales(n)}
    with ArtifactWriter(tmp_path / "plain") as writer:
        for key, spec in specs.items():
            values[key] = rng.standard_normal(spec.shape, np.float32)
            writer.add_array(key, spec, [values[key]])
        writer.add_file("tokenizer.json", b"{}")
        writer.finish(manifest)
    with ArtifactWriter(tmp_path / "encoded") as writer:
        for key, spec in specs.items():
            fmt = FORMATS[spec.format]
            stored, scales = quantise(fmt, values[key]) if fmt.quantised else (fmt.encode(values[key]), None)
            writer.add_stored(key, spec, stored, scales)
        writer.add_file("tokenizer.json", b"{}")
        writer.finish(manifest)
    assert (tmp_path / "encoded").read_bytes() == (tmp_path / "plain").read_bytes()
