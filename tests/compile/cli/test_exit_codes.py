"""What becomes of errors: of the command line, of the installation, of the system, and of ourselves."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.commands import FIT, INPUT, INTERRUPTED, USAGE, assert_a_message, child

from pi_compile.checkpoint.families import family_names
from pi_compile.cli.main import app as pi_compile
from pi_runtime import console
from pi_runtime.errors.exit_codes import EXTRA_OF

Fails = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["compile", "x"], "No such command 'compile'"),
        (["inspect"], "Missing argument 'ARTIFACT'"),
        (["inspect", "a.pi", "--jsn"], "No such option: --jsn"),
        (["init", "m"], "Missing option '--output'"),
    ],
)
def test_a_command_line_that_is_none(fails: Fails, arguments: list[str], named: str) -> None:
    message = fails(USAGE, *arguments)
    assert named in message
    assert "--help" in message


def test_no_command_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(pi_compile, []) in (0, USAGE)  # versions of typer differ
    shown = "".join(capsys.readouterr())
    assert shown.startswith("Usage: ")
    assert "verify" in shown


BLOCK = """
    import sys
    class Blocked:
        '''Hides packages as if they were not installed.'''
        def __init__(self, finder): self.finder = finder
        def __getattr__(self, name): return getattr(self.finder, name)
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in {names}:
                return self.finder.find_spec(name, path, target)
    sys.meta_path[:] = [Blocked(f) for f in sys.meta_path]
"""


OPTIONAL = set(EXTRA_OF) - {"pydantic"}  # some versions of typer bring that one themselves


@pytest.mark.slow
@pytest.mark.parametrize("names", [{"transformers"}, OPTIONAL], ids=["transformers", "all"])
@pytest.mark.parametrize("command", ["init", "pack"])
def test_a_missing_extra(recipe: Path, model: Path, names: set[str], command: str) -> None:
    arguments = ["init", model, "-o", recipe, "--force"] if command == "init" else ["pack", "--plain", recipe]
    process = child(BLOCK.format(names=names), *arguments)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (USAGE, ""), err
    assert_a_message(err)
    assert "is not installed, and this command needs it" in err
    extra = EXTRA_OF[err.removeprefix("error: ").partition(" ")[0]] if command == "init" else "pack"
    assert f"try: pip install '.[{extra}]'" in err


@pytest.mark.slow
def test_without_any_extra_an_artifact_can_be_examined(artifact: Path) -> None:
    process = child(BLOCK.format(names=OPTIONAL), "inspect", artifact)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "llama" in out


def test_a_missing_module_of_our_own_is_an_internal_error(capsys: pytest.CaptureFixture[str]) -> None:
    broken = typer.Typer()

    @broken.command()
    def command() -> None:
        raise ModuleNotFoundError("No module named 'pi_compile.lost'", name="pi_compile.lost")

    assert console.run(broken, []) == 1
    err = capsys.readouterr().err
    assert "internal error: ModuleNotFoundError" in err
    assert "--debug" in err
    assert "Traceback" not in err
    assert console.run(broken, ["--debug"]) == USAGE  # no flag of this app


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (MemoryError("Unable to allocate 3 TiB"), FIT, "not enough memory\n  found: Unable to allocate 3 TiB"),
        (OSError(28, "No space left on device", "x/counts"), FIT, "x/counts: the disk is full"),
        (PermissionError(13, "Permission denied", "x/counts"), USAGE, "x/counts: Permission denied"),
        (EOFError("ran out"), 1, "internal error"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_the_system_refuses(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    broken = typer.Typer()

    @broken.command()
    def command() -> None:
        raise error

    assert console.run(broken, []) == code
    assert text in capsys.readouterr().err


def test_a_traceback_only_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(pi_compile, ["verify", str(tmp_path / "a.pi"), "--debug"]) == INPUT
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_a_message_as_a_user_sees_it(tmp_path: Path) -> None:
    """In another process, through the installed entry point: message on stderr, nothing on stdout, exit code 3."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    done = subprocess.run(
        [sys.executable, "-m", "pi_compile", "init", "model", "-o", "r.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (INPUT, "")
    assert done.stderr.splitlines() == [
        "error: model/config.json: model type 'mamba' is not supported",
        f"  expected: one of the families {', '.join(family_names())}",
        "  found: model_type = 'mamba', architectures = None",
        "  try: use a checkpoint of a supported family",
    ]
