"""Models that are packed on the way, and the cache they are kept in."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.paths import GOLDEN

from pi_runtime import console
from pi_runtime.commands import model_cache
from pi_runtime.commands.model_cache import app, artifact_of
from pi_runtime.errors import UsageError

PI_RUN = [sys.executable, "-m", "pi_runtime"]
ASK = ("-p", "once", "-n", "2", "--temperature", "0")

pytestmark = pytest.mark.usefixtures("no_variables")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed models. Kernels stay where they are: compiling them takes minutes."""
    (tmp_path / "cache").mkdir()
    kernels = Path(os.environ.get("PI_CACHE_DIR") or Path.home() / ".cache" / "pi-runtime") / "kernels"
    if kernels.is_dir():
        (tmp_path / "cache" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("PI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model as a GGUF file."""
    for package in ("torch", "transformers", "gguf"):
        pytest.importorskip(package)
    from support.gguf_files import rounded_checkpoint, write_byte_tokenizer, write_gguf

    folder = tmp_path_factory.mktemp("gguf")
    rounded_checkpoint(folder / "model", "llama", "f16")
    write_byte_tokenizer(folder / "model")
    write_gguf(folder / "model", folder / "small.gguf", "f16")
    return folder / "small.gguf"


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path))


def pi_run(*arguments: object, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*PI_RUN, *map(str, arguments)], text=True, **pipes, **options)  # type: ignore[call-overload,no-any-return]


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def entries(cache: Path) -> list[str]:
    """Packed models; whatever else is there must be a mark of one of them."""
    names = sorted(path.name for path in cache.iterdir())
    packed = [name for name in names if name.endswith(".pi")]
    assert set(names) <= {*packed, *(f".{name}.used" for name in packed)}
    return packed


@pytest.mark.slow
def test_a_file_is_packed_once_and_answers(model: Path, cache: Path) -> None:
    code, out, err = ended(pi_run(model, *ASK))
    assert (code, out != "") == (0, True), err
    (line,) = [line for line in err.splitlines() if "packed in" in line]
    (name,) = entries(cache)
    assert name.startswith("small-")
    assert line.endswith(f" KiB in f16: {cache / name}")
    code, again, err = ended(pi_run(model, *ASK))
    assert (code, again, err) == (0, out, "")
    assert len(entries(cache)) == 1
    before = model_cache._key_parts(model)
    os.utime(model, ns=(0, 0))  # another file, as far as anybody can tell in a moment
    assert model_cache._key_parts(model) != before


@pytest.mark.slow
def test_two_at_once_make_one_file(model: Path, cache: Path) -> None:
    both = [ended(process) for process in [pi_run(model, *ASK) for _ in range(2)]]
    assert [code for code, *_ in both] == [0, 0], both
    assert both[0][1] == both[1][1]
    assert sum("packed in" in err for *_, err in both) == 1
    assert len(entries(cache)) == 1


@pytest.mark.slow
def test_a_damaged_file_leaves_nothing(model: Path, cache: Path) -> None:
    model.write_bytes(model.read_bytes()[:5000])
    code, out, err = ended(pi_run(model, *ASK))
    assert (code, out) == (3, "")
    assert "error: " in err
    assert "not a whole GGUF file" in err
    assert entries(cache) == []


@pytest.mark.slow
def test_no_room_leaves_nothing(model: Path, cache: Path) -> None:
    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    code, _, err = ended(pi_run(model, *ASK, preexec_fn=little_room))
    assert (code, "Traceback" in err) == (4, False), err
    assert entries(cache) == []


@pytest.mark.slow
def test_an_interrupted_pack_is_made_again(model: Path, cache: Path) -> None:
    process = pi_run(model, *ASK, start_new_session=True)
    assert process.stderr is not None
    assert "packing it once" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    code, _, err = ended(process)
    assert (code, "Traceback" in err) == (130, False), err
    assert entries(cache) == []
    assert ended(pi_run(model, *ASK))[0] == 0


@pytest.mark.slow
def test_a_hub_name_is_never_fetched_unasked(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    code, _, err = ended(pi_run("owner/name", *ASK))
    assert code == 3, err
    assert "the hub cannot be reached" in err
    assert entries(cache) == []


@pytest.mark.slow
def test_a_fetched_hub_model_needs_no_question(original: Path, cache: Path, tmp_path: Path) -> None:
    """The folder that the hub's client keeps, one checkpoint and one file of several."""
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(original.parent / "model", snapshot)
    for ending in ("Q4_K_M", "F16"):
        shutil.copy(original, snapshot / f"name-{ending}.gguf")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    for name in ("owner/name", "owner/name:f16"):
        code, out, err = ended(pi_run(name, *ASK, env=environment))
        assert (code, out != "") == (0, True), err
    assert ended(pi_run(name, *ASK))[0] == 0  # the packed model needs no hub
    code, _, err = ended(pi_run("owner/name:Q5_0", *ASK, env=environment))
    assert code == 3
    assert "name-F16, name-Q4_K_M" in err


@pytest.mark.parametrize("name", ["a.pi", "missing/a.pi", "models/tiny", "no-slash", "a/b/c"])
def test_what_is_no_model_is_left_alone(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    shutil.copy(GOLDEN, tmp_path / "a.pi")
    assert artifact_of(Path(name), None) == Path(name)
    assert not cache.exists()


def test_what_a_key_depends_on(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    keys = []
    for name, text in (("config.json", "{}"), ("config.json", "{ }"), ("model.safetensors", "w"), ("README.md", "r")):
        (folder / name).write_text(text)
        keys.append(model_cache._key_parts(folder))
    assert None not in keys
    assert [keys.count(key) for key in keys] == [1, 1, 2, 2]  # a README changes nothing
    for part in range(1, 3):
        (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    parts = model_cache._key_parts(tmp_path / "m-00001-of-00002.gguf")
    assert parts is not None
    assert len(parts) == 2


@pytest.fixture
def three(cache: Path) -> list[Path]:
    """Three packed models, the first used last."""
    cache.mkdir()
    paths = [Path(shutil.copy(GOLDEN, cache / f"{name}.pi")) for name in ("one", "two", "three")]
    for age, path in enumerate(paths):
        model_cache._mark(path).touch()
        os.utime(model_cache._mark(path), (0, 1_600_000_000 - age * 1000))
    return paths


def test_the_cache_is_listed(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    (three[0].parent / "broken.pi").write_text("x")
    assert console.run(app, ["list"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["name", "broken", "one", "two", "three"], out
    assert err.startswith("4 packed models, ")
    assert console.run(app, ["list", "--json"]) == 0
    assert '"name": "one"' in capsys.readouterr().out


def test_models_are_removed_by_name(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(app, ["rm", "two", "three.pi"]) == 0
    assert entries(three[0].parent) == ["one.pi"]
    assert console.run(app, ["rm", "four"]) == 2
    assert "no such packed model" in capsys.readouterr().err


def test_a_limit_removes_what_was_used_longest_ago(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    nbytes = three[0].stat().st_size
    model_cache._keep_within(None, three[2])
    model_cache._keep_within(3 * nbytes, three[2])
    assert all(path.exists() for path in three)
    model_cache._keep_within(2 * nbytes, three[2])
    assert [path.exists() for path in three] == [True, False, True]
    assert "two.pi" in capsys.readouterr().err
    model_cache._keep_within(1, three[2])
    assert [path.exists() for path in three] == [False, False, True]  # what is in use stays


def test_without_a_folder_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PI_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="no folder for packed models"):
        artifact_of(Path("owner/name"), None)


def test_one_process_after_the_other(tmp_path: Path) -> None:
    from pi_runtime.files import locked

    waits, entered = threading.Event(), threading.Event()

    def other() -> None:
        with locked(tmp_path / "a.pi", waits.set):
            entered.set()

    with locked(tmp_path / "a.pi", lambda: None):
        thread = threading.Thread(target=other)
        thread.start()
        assert waits.wait(60)
        assert not entered.is_set()
    thread.join(60)
    assert entered.is_set()
    assert list(tmp_path.iterdir()) == []
