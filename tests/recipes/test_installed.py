"""The installed package brings its profiles, its recipes and the demo model along."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.installed import install, new_environment
from support.paths import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command of a new environment, in a folder of its own; returns its stdout."""
    folder = tmp_path_factory.mktemp("installed")
    environment = new_environment(folder / "environment")
    install(["python", "-m", "pip", "install", str(ROOT)], environment)

    def run(*command: object) -> str:
        arguments = [str(word) for word in command]
        done = subprocess.run(arguments, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_the_demo_model_is_compiled_from_the_installed_package(run: Run) -> None:
    """The session `package` places and plans with one."""
    data = Path(json.loads(run("pi-compile", "doctor", "--json"))["bundled data"]["found"].partition(": ")[0])
    assert ROOT not in data.parents
    assert data.name == "bundled"
    run("pi-compile", "init", data / "recipes" / "demo", "-o", "demo.toml")
    run("pi-compile", "pack", "demo.toml", "-o", "demo.pi", "--plain")
    assert json.loads(run("pi-compile", "inspect", "demo.pi", "--json"))
    assert not list(data.rglob("*.py"))
    assert not list(data.rglob("relu2*"))
    assert not list(data.rglob(".pi-build"))
