"""What `init` names as the next step is what the model needs, and works."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hf import edit_json, random_llama

from pi_compile.cli.main import app
from pi_runtime import console
from pi_runtime.artifact.reader import Artifact


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    random_llama(tmp_path / "a model")
    monkeypatch.chdir(tmp_path)
    return Path("a model")


def commands(err: str) -> list[list[str]]:
    """Every command of `pi-compile` that a message names."""
    found = re.findall(r"pi-compile ((?:'[^']*'|[^',\n])+)", err)
    return [shlex.split(text) for text in found]


def test_a_sparse_model_is_built(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(model / "config.json", hidden_act="relu")
    assert console.run(app, ["init", str(model), "-o", "r.toml"]) == 0
    assert commands(capsys.readouterr().err) == [["build", "r.toml"]]


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_dense_model_is_packed_or_made_sparse(
    model: Path, capsys: pytest.CaptureFixture[str], activation: str
) -> None:
    edit_json(model / "config.json", hidden_act=activation)
    assert console.run(app, ["init", str(model), "-o", "r.toml"]) == 0
    err = capsys.readouterr().err
    pack, init, sparsify = commands(err)
    assert f"with {activation} no neuron is ever exactly zero" in err
    assert sparsify[0] == "sparsify"
    assert console.run(app, pack) == 0
    with Artifact.open("r.pi"):
        pass
    assert console.run(app, init) == 0
    assert Path(sparsify[1]).is_file()
