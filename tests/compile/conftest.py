"""A small checkpoint with its recipe, an artifact, and a way to run a command that must fail."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from support.commands import assert_a_message
from support.paths import GOLDEN

from pi_runtime import console

Fails = Callable[..., str]


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that no test changes."""
    from support.hf import random_llama

    folder = tmp_path_factory.mktemp("original") / "model"
    random_llama(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path, original: Path) -> Path:
    """A checkpoint of the test's own."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    """Its recipe."""
    from pi_compile.recipe import default_recipe

    path = tmp_path / "tiny.toml"
    path.write_text(default_recipe(model.name).to_toml())
    return path


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A copy of the golden artifact."""
    return Path(shutil.copy(GOLDEN, tmp_path / "a.pi"))


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Runs a command that must end with a code, a message on stderr and nothing on stdout; returns the message."""

    def run(code: int, *arguments: object, app: typer.Typer | None = None) -> str:
        from pi_compile.cli.main import app as pi_compile

        found = console.run(app or pi_compile, [str(a) for a in arguments])
        captured = capsys.readouterr()
        assert found == code, captured.err
        assert_a_message(captured.err)
        assert captured.out == ""
        return captured.err

    return run
