"""The activation of a GGUF file: llama.cpp's, PowerInfer's, by a key of the file, or as the user declares."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.gguf_files import rounded_checkpoint, write_byte_tokenizer, write_gguf, write_powerinfer

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.pipeline.recipe_checkpoint import create_recipe, recipe_checkpoint
from pi_compile.recipe import read_recipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rounded_checkpoint(tmp_path / "hf", "llama", "f16", hidden_act="relu")
    write_byte_tokenizer(tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", "f16")
    return tmp_path


def notice(checkpoint: Checkpoint) -> str:
    return next(line for line in checkpoint.notices if "activation" in line)


def test_llama_cpp_takes_silu(folder: Path) -> None:
    checkpoint = open_checkpoint(folder / "model.gguf")
    assert checkpoint.decoder.activation == "silu"
    assert "does not say its activation: silu is taken, as llama.cpp takes it" in notice(checkpoint)
    assert "--activation NAME" in notice(checkpoint)


def test_as_declared(folder: Path) -> None:
    file, declared = folder / "model.gguf", open_checkpoint(folder / "model.gguf", activation="relu")
    theirs = open_checkpoint(folder / "hf")
    assert (declared.decoder.activation, declared.decoder.sparse) == ("relu", True)
    assert {**vars(declared.decoder), "rotary_frequencies": ()} == {**vars(theirs.decoder), "rotary_frequencies": ()}
    assert notice(declared) == "activation relu is taken, as declared; llama.cpp takes silu for this file"
    assert declared.digest() != open_checkpoint(file).digest()  # another function, so other results of stages


def test_a_recipe_declares_it(folder: Path) -> None:
    create_recipe(str(folder / "model.gguf"), folder / "r.toml", activation="relu")
    assert 'ignore_config = []\nactivation = "relu"\n' in (folder / "r.toml").read_text()
    recipe = read_recipe(folder / "r.toml")
    assert recipe_checkpoint(recipe, folder).decoder.activation == "relu"
    create_recipe(str(folder / "model.gguf"), folder / "plain.toml")
    assert "activation = " not in (folder / "plain.toml").read_text()


@pytest.mark.parametrize("name", ["reluu", "fatrelu"])
def test_no_such_activation(name: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"activation '{name}', as declared") as caught:
        open_checkpoint(folder / "model.gguf", activation=name)
    assert "one of relu, relu2, drelu, silu" in str(caught.value)


def test_a_config_says_its_own(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"declared for it, but config\.json says its own"):
        open_checkpoint(folder / "hf", activation="relu")


def test_a_key_of_the_file(folder: Path) -> None:
    write_gguf(folder / "hf", folder / "model.gguf", "f16", **{"ARCH.hidden_activation": "relu"})
    checkpoint = open_checkpoint(folder / "model.gguf")
    assert checkpoint.decoder.activation == "relu"
    assert "by its key llama.hidden_activation" in notice(checkpoint)
    write_gguf(folder / "hf", folder / "model.gguf", "f16", **{"ARCH.hidden_activation": "mish"})
    with pytest.raises(CheckpointError, match=r"activation 'mish', by llama\.hidden_activation"):
        open_checkpoint(folder / "model.gguf")


@pytest.mark.parametrize("kind", ["f16", "q4"])
def test_a_file_of_powerinfer(kind: str, tmp_path: Path) -> None:
    """The rows of its transposed down are those of an artifact, so that blocks are kept too."""
    rounded_checkpoint(tmp_path / "hf", "llama", kind, hidden_act="relu")
    write_byte_tokenizer(tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "whole.gguf", kind)
    write_powerinfer(tmp_path / "whole.gguf", tmp_path / "relu.powerinfer.gguf")
    whole, found = open_checkpoint(tmp_path / "whole.gguf"), open_checkpoint(tmp_path / "relu.powerinfer.gguf")
    assert found.decoder.activation == "relu"
    assert "relu is taken, as PowerInfer takes it" in notice(found)
    assert any("own predictors are left out" in line for line in found.notices)
    assert not any("ffn_down" in line for line in found.notices)
    for array in whole.array_shapes:
        if kind == "f16" or "ffn/rest" not in array:  # whose blocks of down have other columns
            np.testing.assert_array_equal(found.values(array), whole.values(array), err_msg=array)
    create_recipe(str(tmp_path / "relu.powerinfer.gguf"), tmp_path / "r.toml")  # reads the tokenizer


@pytest.mark.parametrize(
    ("case", "architecture", "activation"), [("llama", "bamboo", "drelu"), ("falcon-7b", "falcon", "relu")]
)
def test_architectures_of_powerinfer(case: str, architecture: str, activation: str, tmp_path: Path) -> None:
    rounded_checkpoint(tmp_path / "hf", case, "f16")
    write_gguf(tmp_path / "hf", tmp_path / "whole.gguf", "f16", **{"general.architecture": architecture})
    write_powerinfer(tmp_path / "whole.gguf", tmp_path / "model.gguf")
    found, theirs = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(tmp_path / "hf")
    assert (found.decoder.family, found.decoder.activation) == (architecture, activation)
    for array in theirs.array_shapes:
        np.testing.assert_array_equal(found.values(array), theirs.values(array), err_msg=array)


def test_what_powerinfer_does_not_have(tmp_path: Path) -> None:
    rounded_checkpoint(tmp_path / "hf", "qwen2", "f16")
    write_gguf(tmp_path / "hf", tmp_path / "whole.gguf", "f16")
    write_powerinfer(tmp_path / "whole.gguf", tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="architecture 'qwen2' is not supported in GGUF of PowerInfer"):
        open_checkpoint(tmp_path / "model.gguf")
