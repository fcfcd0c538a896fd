"""The folder of compiled kernels: never stale, wherever it can be written, and used."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numba
import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.errors import UsageError
from pi_runtime.kernels.codegen import jit
from pi_runtime.kernels.forward import forward

KERNELS = Path(jit.__file__).parents[1]
DISK_KERNELS = KERNELS.parent / "disk" / "kernels"
ENVIRONMENT = dict(os.environ)
jit._folder()  # kept for the process, before a test changes a variable


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the user's, and a temporary folder of our own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("PI_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    "changed",
    [
        str(path.relative_to(KERNELS.parent))
        for folder in (KERNELS, DISK_KERNELS)
        for path in sorted(folder.rglob("*.py"))
    ],
)
def test_one_byte_of_any_kernel_source_means_another_folder(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = jit.cache_folder()
    for folder in (KERNELS, DISK_KERNELS):
        shutil.copytree(folder, tmp_path / folder.relative_to(KERNELS.parent))
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "kernels" / "codegen" / "jit.py"))
    assert jit.cache_folder() == before
    (tmp_path / changed).write_bytes((tmp_path / changed).read_bytes() + b"\n")
    assert jit.cache_folder() != before


def test_another_numba_means_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    before = jit.cache_folder()
    monkeypatch.setattr(jit.numba, "__version__", "0.0.1")
    assert jit.cache_folder() != before


def test_the_users_cache_folder_is_the_default(tmp_path: Path) -> None:
    assert jit.cache_folder().parent == tmp_path / "home" / "pi-runtime" / "kernels"
    assert not any((tmp_path / "tmp").iterdir())


def test_pi_cache_dir_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI_CACHE_DIR", str(tmp_path / "named" / "deep"))
    folder = jit.cache_folder()
    assert folder.parent == tmp_path / "named" / "deep" / "kernels"
    assert folder.is_dir()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("variable", ["PI_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_folder_that_cannot_be_written_is_replaced(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder can be made below a file")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "cache"))
    folder = jit.cache_folder()
    assert folder.is_relative_to(tmp_path / "tmp")
    assert folder.is_dir()


def test_a_read_only_home_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only file system, where the folder is there already."""
    there = jit.cache_folder()
    monkeypatch.setattr(os, "access", lambda path, _mode: not Path(path).is_relative_to(tmp_path / "home"))
    assert jit.cache_folder().name == there.name
    assert jit.cache_folder().is_relative_to(tmp_path / "tmp")


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert jit.cache_folder().is_relative_to(tmp_path / "tmp")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have owners there")
def test_kernels_that_another_user_may_have_planted_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels are code. Without a folder of our own there is an error that says what to do."""
    somebody = os.getuid() + 1
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp" / f"pi-runtime-{somebody}").mkdir(mode=0o777)
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="PI_CACHE_DIR=FOLDER"):
        jit.cache_folder()


def test_cold_until_something_is_compiled() -> None:
    assert jit.is_cold()
    there = jit.cache_folder() / "serial" / "x"
    there.mkdir(parents=True)
    (there / "forward.nbi").write_bytes(b"")
    assert not jit.is_cold()


@pytest.mark.slow
def test_one_compilation_serves_all_models_later_processes_and_other_copies(tmp_path: Path) -> None:
    paths = [
        random_artifact(tmp_path / "a.pi", small_decoder(), format="bf16", ranks=[3, None]),
        random_artifact(tmp_path / "b.pi", small_decoder("opt"), format="f32"),
    ]
    script = (
        "import sys, pi_runtime; from pi_runtime import load\n"
        "print(pi_runtime.__file__)\n"
        "for path in sys.argv[1:]:\n"
        "    with load(path) as model: model.logits([1, 2, 3]), ''.join(model.generate([65], max_tokens=3))"
    )
    for path in paths:
        with load(path) as model:
            model.logits([1, 2, 3]), "".join(model.generate([65], max_tokens=3))
    assert len(forward.signatures) == 1
    copy = tmp_path / "copy"
    shutil.copytree(KERNELS.parent, copy / "pi_runtime", ignore=shutil.ignore_patterns("__pycache__"))
    for packages in (KERNELS.parents[1], copy):
        done = subprocess.run(
            [sys.executable, "-c", script, *paths],
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, "NUMBA_DEBUG_CACHE": "1", "PYTHONPATH": os.pathsep.join([str(packages), *sys.path])},
            cwd=packages,
            check=True,
        )
        assert f"{packages}/pi_runtime/__init__.py" in done.stdout
        assert "data loaded from" in done.stdout
        assert "data saved to" not in done.stdout


@pytest.mark.slow
def test_a_warm_start_prepares_nothing_for_compiling(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder())
    script = (
        "import sys; from pi_runtime import load\n"
        "with load(sys.argv[1]) as model: model.logits([1, 2, 3]), ''.join(model.generate([65], max_tokens=3))\n"
        "print(*sys.modules)"
    )

    def loaded() -> set[str]:
        done = subprocess.run(
            [sys.executable, "-c", script, path], capture_output=True, text=True, env=ENVIRONMENT, check=True
        )
        return set(done.stdout.split())

    loaded()  # compiles what is not there
    assert "numba.np.arraymath" not in loaded()


def test_what_kernels_alone_call_is_refused_to_python() -> None:
    """Compiled or not: numba has nothing there to jump to."""
    doubled = jit.device(_double)
    quadrupled = numba.njit(lambda x: doubled(doubled(x)))
    for _ in range(2):
        with pytest.raises(TypeError, match="_double is called by kernels only"):
            doubled(3)
        assert quadrupled(3) == 12
    assert doubled.signatures


def test_a_kernel_from_the_cache_is_compiled_into_another() -> None:
    """Its intermediate code is parsed then, and not before."""
    assert jit.public(_tripled)(3) == 9
    tripled = jit.public(_tripled)
    assert tripled(3) == 9
    (compiled,) = tripled.overloads.values()
    assert tripled.stats.cache_hits
    assert compiled.library._bitcode
    assert numba.njit(lambda x: tripled(x) + 1)(3) == 10
    assert not compiled.library._bitcode


def _double(x: int) -> int:
    return 2 * x


def _tripled(x: int) -> int:
    return 3 * x
