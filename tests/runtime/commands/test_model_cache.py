"""Models that are packed on the way, and the cache they are kept in."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.paths import GOLDEN

from pi_runtime import Engine, console, load
from pi_runtime.commands import model_cache
from pi_runtime.commands.model_cache import app, artifact_of
from pi_runtime.errors import UsageError
from pi_runtime.files import hold, unused

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
    pytest.importorskip("gguf")  # without it nothing is asked of the hub
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


def test_a_bracket_in_a_name_is_no_pattern(tmp_path: Path) -> None:
    """Two models in parts, whose names a pattern would not match: each has its own key."""
    keys = set()
    for name in ("m [v1]", "m [v2]", "*", "m"):
        folder = tmp_path / name
        folder.mkdir()
        for part in (1, 2):
            (folder / f"{name}-0000{part}-of-00002.gguf").write_bytes(b"GGUF" + name.encode())
        parts = model_cache._key_parts(folder / f"{name}-00001-of-00002.gguf")
        assert parts is not None
        assert len(parts) == 2
        keys.add(tuple(parts))
    assert len(keys) == 4


@pytest.mark.parametrize("change", [0, 2 << 20, (4 << 20) - 1])
def test_another_file_of_the_same_name_size_time_and_beginning_is_another(tmp_path: Path, change: int) -> None:
    """A copy keeps the time of the last change, and files of one family begin alike."""
    paths = [tmp_path / folder / "m.gguf" for folder in "ab"]
    for n, path in enumerate(paths):
        path.parent.mkdir()
        data = bytearray(b"GGUF" * (1 << 20))
        data[max(change, 1 << 20 if change else 0)] ^= n
        path.write_bytes(data)
        os.utime(path, ns=(10**18, 10**18))
    one, other = (model_cache._key_parts(path) for path in paths)
    assert one != other
    before = model_cache._key_parts(paths[0])
    with paths[0].open("r+b") as file:  # in place, between what is sampled
        file.seek((1 << 20) + (1 << 15) + 99)
        file.write(b"x")
    os.utime(paths[0], ns=(10**18, 10**18))
    assert model_cache._key_parts(paths[0]) != before


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("qwen2.5-0.5b-q4_k_m.gguf", "qwen2.5-0.5b-q4_k_m"),
        ("a.b/model.v1.pi", "model.v1"),
        ("demo.pi", "demo"),
        ("gemma.pi.gguf", "gemma.pi"),
    ],
)
def test_a_version_in_a_name_is_no_ending(name: str, called: str) -> None:
    assert model_cache.name_of(Path(name)) == called


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are text")
def test_a_name_that_is_no_text_has_a_key(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Path] = []

    def pack(_model: Path, target: Path) -> None:
        packed.append(Path(shutil.copy(GOLDEN, target)))

    monkeypatch.setattr(model_cache, "_pack", pack)
    for name in (b"m\xff.gguf", b"m\xfe.gguf"):
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        path.write_bytes(b"GGUF")
        assert artifact_of(path, None).exists()
        assert artifact_of(path, None) == packed[-1]
    assert len(set(packed)) == 2


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="gives files away")
def test_what_another_user_put_into_the_cache_is_not_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cache, "_pack", lambda _model, target: shutil.copy(GOLDEN, target))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    entry = artifact_of(tmp_path / "m.gguf", None)
    os.chown(entry, 12345, 12345)
    with pytest.raises(UsageError, match=r"packed model of another user[\s\S]*found: user 12345[\s\S]*PI_CACHE_DIR="):
        artifact_of(tmp_path / "m.gguf", None)
    os.chown(cache, 12345, 12345)  # the folder's owner keeps it for others
    assert artifact_of(tmp_path / "m.gguf", None) == entry


PACKING = """
import sys
from pathlib import Path
from pi_runtime.commands import model_cache
import shutil

def pack(model, target):
    print("packing", flush=True)
    sys.stdin.readline()
    shutil.copy(sys.argv[2], target)

model_cache._pack = pack
path = model_cache.artifact_of(Path(sys.argv[1]), 1)
print("packed", flush=True)
sys.stdin.readline()
print(path.exists(), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="without locks")
def test_a_limit_removes_nothing_that_another_process_uses(cache: Path, tmp_path: Path) -> None:
    """Two processes pack at once, each with room for one model."""
    running = []
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF" + name.encode())
        command = [sys.executable, "-c", PACKING, str(tmp_path / f"{name}.gguf"), str(GOLDEN)]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for expected in ("packing", "packed"):
        for process in running:  # none goes on before both are there
            assert process.stdout is not None
            assert process.stdout.readline().strip() == expected
        for process in running:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    assert [process.communicate()[0].strip() for process in running] == ["True", "True"]
    assert len(entries(cache)) == 2
    model_cache._keep_within(1, cache / "other.pi")  # nobody uses them any more
    assert entries(cache) == []


@pytest.mark.skipif(sys.platform == "win32", reason="without locks")
def test_what_is_being_removed_is_not_begun_to_be_used(tmp_path: Path) -> None:
    mark = tmp_path / ".a.pi.used"
    with unused(mark) as free:
        assert free
        other = threading.Thread(target=hold, args=(mark,))
        other.start()
        other.join(0.5)
        assert other.is_alive()
        mark.unlink()
    other.join()
    with unused(mark) as free:
        assert not free


@pytest.mark.skipif(sys.platform == "win32", reason="without locks")
@pytest.mark.parametrize("gone", ["mark", "entry", "both"])
def test_what_others_remove_meanwhile(gone: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that fails removes its mark, `pi-run rm` the entry too: it is packed again, and held."""
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    packed = []

    def pack(_: Path, target: Path) -> None:
        packed.append(shutil.copy(GOLDEN, target))
        if len(packed) == 1:
            if gone != "entry":
                model_cache._mark(target).unlink()
            if gone != "mark":
                target.unlink()

    monkeypatch.setattr(model_cache, "_pack", pack)
    path = artifact_of(tmp_path / "a.gguf", None)
    assert len(packed) == (1 if gone == "mark" else 2)
    assert entries(cache) == [path.name]
    model_cache._keep_within(1, cache / "other.pi")
    assert path.exists()


def test_what_a_killed_packer_left_is_removed(three: list[Path]) -> None:
    left = three[0].with_name(".gone-0123.pi.999999-5.tmp")
    left.write_bytes(b"x" * 100)
    other = three[0].with_name(".unlike.tmp")
    other.touch()
    assert console.run(app, ["list"]) == 0
    assert not left.exists()
    assert other.exists()


def test_one_of_several_models_of_a_name_is_removed_by_its_own(
    three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What was packed twice, of another version, has one name of the model and two of entries."""
    (name,) = {entry.model for entry in model_cache._entries()}
    assert console.run(app, ["rm", name]) == 2
    assert "several packed models\n  found: one, two, three\n  try: name each" in capsys.readouterr().err
    assert len(entries(three[0].parent)) == 3
    assert console.run(app, ["rm", "one", "two"]) == 0
    assert console.run(app, ["rm", name]) == 0
    assert entries(three[0].parent) == []


FAKE_PACKER = """
import signal, sys, time
from pathlib import Path
Path(sys.argv[-1]).with_name("began").touch()
try:
    {does}
except KeyboardInterrupt:
    Path(sys.argv[-1]).with_name("cleaned").touch()
    sys.exit(130)
"""


def with_packer(does: str, folder: Path) -> dict[str, str]:
    """Variables with which another packer is found in place of `pi_compile`."""
    (folder / "fake" / "pi_compile").mkdir(parents=True)
    (folder / "fake" / "pi_compile" / "__init__.py").touch()
    (folder / "fake" / "pi_compile" / "__main__.py").write_text(FAKE_PACKER.format(does=does))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "fake"), *sys.path])}


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_packer_too(cache: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    process = pi_run(tmp_path / "m.gguf", *ASK, env=with_packer("time.sleep(600)", tmp_path))
    deadline = time.monotonic() + 60
    while not (cache / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # it is asleep by now
    process.send_signal(number)
    code, _, err = ended(process)
    assert (code, "Traceback" in err) == (128 + number, False), err
    assert (cache / "cleaned").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_packer_is_told_of(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    does = "import os; os.kill(os.getpid(), signal.SIGKILL)"
    code, out, err = ended(pi_run(tmp_path / "m.gguf", *ASK, env=with_packer(does, tmp_path)))
    assert (code, out) == (137, "")
    assert "m.gguf: packing was ended by SIGKILL, as the system does with what takes more memory" in err


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


def test_keys_and_values_of_a_folder_are_listed_and_removed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, said = tmp_path / "pages", list[str]()
    for mode in ("dense", "gate"):
        with load(GOLDEN, mode=mode, device="cpu") as model, Engine(model, kv_disk=folder, say=said.append) as engine:
            "".join(engine.generate([5] * 40, max_tokens=2))
    assert said == [f"{folder}: what is stored there is of other models or runs, or of another version"]
    capsys.readouterr()
    assert console.run(app, ["list", "--kv-disk", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == []
    assert [(run["model"], run["mode"]) for run in found["kv_disk"]["runs"]] == [
        (GOLDEN.name, "gate"),
        (GOLDEN.name, "dense"),
    ]
    assert console.run(app, ["list", "--kv-disk", str(folder)]) == 0
    shown = capsys.readouterr()
    assert GOLDEN.name in shown.out
    assert "keys and values of 2 runs" in shown.err
    name = found["kv_disk"]["runs"][0]["name"]
    assert console.run(app, ["rm", name, "--kv-disk", str(folder)]) == 0
    assert [path.name.partition("-")[0] for path in folder.glob("*.pages")] == [found["kv_disk"]["runs"][1]["name"]]
    assert console.run(app, ["rm", GOLDEN.name, "--kv-disk", str(folder)]) == 0
    assert not [*folder.glob("*.pages")]
    assert console.run(app, ["rm", name, "--kv-disk", str(folder)]) == 2


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
