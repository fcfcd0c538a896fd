"""`pi-run` as a process: what it loads, and readers, disks and terminals that let it down."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripted import saying, scripted_artifact

PI_RUN = [sys.executable, "-m", "pi_runtime"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_variables")]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_loads_nothing_heavy() -> None:
    heavy = {"numpy", "numba", "torch", "tokenizers", "jinja2", "pi_runtime.engine.model", "pi_runtime.kernels"}
    shown = python(
        "import sys; from pi_runtime import console\n"
        "from pi_runtime.commands import run as cli\n"
        "code = console.run(cli.app, ['--help'])\n"
        f"print(code, sorted({heavy!r} & set(sys.modules)))"
    )
    assert shown.endswith("0 []\n")
    assert "--prompt" in shown


def test_a_process_speaks(alphabet: Path) -> None:
    done = subprocess.run(
        [*PI_RUN, alphabet, "-p", "-", "-n", "3"], input="u", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "vwx\n", "")


def test_a_terminal_without_the_characters_does_not_end_the_text(tmp_path: Path) -> None:
    path = scripted_artifact(tmp_path / "a.pi", saying("a→b"))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*PI_RUN, path, "-p", "a"], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "?b\n", "")


@pytest.fixture
def talking(endless: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A pi-run in the middle of a text without end."""
    command = [*PI_RUN, str(endless), "-p", "a", "-n", "1000000", "--ctx-size", str(1 << 20)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.read(4) == b"baba"
        yield process
        process.kill()


def test_a_reader_that_has_enough(talking: subprocess.Popen[bytes]) -> None:
    assert talking.stdout
    assert talking.stderr
    talking.stdout.close()
    assert talking.wait(60) == 0
    assert talking.stderr.read() == b""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process there")
def test_ctrl_c(talking: subprocess.Popen[bytes]) -> None:
    assert talking.stderr
    talking.send_signal(signal.SIGINT)
    assert talking.wait(60) == 130
    message = talking.stderr.read().decode()
    assert "interrupted" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_was_never_there(alphabet: Path, flags: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*PI_RUN, alphabet, "-p", "a", *flags]
    with open(writer, "wb") as out:  # noqa: PTH123  an open descriptor has no path
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_full_disk_behind_stdout(alphabet: Path, flags: list[str]) -> None:
    command = [*PI_RUN, alphabet, "-p", "a", *flags]
    with Path("/dev/full").open("wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert "the disk is full" in done.stderr
    assert "Exception ignored" not in done.stderr
