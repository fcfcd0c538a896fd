"""What comes out: folders that stock transformers computes alike, or that only this project reads, and says so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from support.hf import edit_json
from transformers import AutoModelForCausalLM

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.recipe import ModelSection
from pi_compile.sparsification import export
from pi_compile.sparsification.activation import Activation, FfnActivity
from pi_compile.sparsification.model import load_model, open_base

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "model")
FORMS = {
    ("model", "drelu"): ("bamboo", "relu"),
    ("mistral", "drelu"): ("bamboo", "relu"),
    ("mixtral", "drelu"): ("turbosparsemixtral", "relu"),
    ("llama", "drelu"): ("llama", "drelu"),  # its positions are scaled, which Bamboo's are not
    ("qwen2", "drelu"): ("qwen2", "drelu"),
    ("qwen3", "drelu"): ("qwen3", "drelu"),
    ("model", "fatrelu"): ("sparsellama", "fatrelu"),
}
"""Model and activation → model_type and hidden_act of what comes out, where that is not the usual form."""


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("activation", ["relu", "relu2", "drelu", "fatrelu"])
def test_the_folder_computes_what_was_trained(bases: Path, tmp_path: Path, name: str, activation: str) -> None:
    base = open_base(ModelSection(path=name, revision="", ignore_config=[]), bases)
    model = load_model(base)
    activity = FfnActivity(Activation(activation, 0.1 if activation == "fatrelu" else 0.0))
    activity.install(model)
    form = export.save_model(model, model.state_dict(), base, activity.activation, tmp_path / "out")
    ids = torch.arange(3, 20)
    with torch.no_grad():
        wanted = model.eval()(ids[None]).logits[0]
    assert export.check_model(tmp_path / "out", ids, wanted, base.decoder) < 1e-4
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    usual = (base.family, activation)
    assert (config["model_type"], config["hidden_act"]) == FORMS.get((name, activation), usual)
    assert form.stock is (activation in ("relu", "relu2"))
    assert bool(form.words) is not form.stock
    assert open_checkpoint(tmp_path / "out").decoder.sparse
    if form.stock:
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        # The quick implementation of experts asks for rows of a multiple of 16 bytes.
        stock.config._experts_implementation = "eager"
        found = stock(ids[None]).logits[0]
        assert (found - wanted).abs().max() < 1e-5
    else:
        with pytest.raises((ValueError, KeyError)):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_folder_that_says_something_else_is_refused(bases: Path, tmp_path: Path) -> None:
    base = open_base(ModelSection(path="model", revision="", ignore_config=[]), bases)
    model: Any = load_model(base)
    export.save_model(model, model.state_dict(), base, Activation("relu"), tmp_path / "out")
    ids = torch.arange(3, 20)
    with (
        torch.no_grad(),
        pytest.raises(CheckpointError, match=r"does not compute what was trained\n(.*\n)+  try: report it"),
    ):
        export.check_model(tmp_path / "out", ids, model(ids[None]).logits[0], base.decoder)


LONGER = {
    "a Llama of 8,192 positions": ("model", {"max_position_embeddings": 8192}, 8192),
    "a Mistral with a window": ("mistral", {"sliding_window": 23}, 23),
    "a Mistral without": ("mistral", {"sliding_window": None, "max_position_embeddings": 9000}, 9000),
    "a Mixtral with a window": ("mixtral", {"sliding_window": 23}, 23),
    "a Mixtral without": ("mixtral", {"max_position_embeddings": 9000}, 9000),
    "another base": ("model", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, 40),
}


@pytest.mark.parametrize("case", LONGER)
@pytest.mark.parametrize("activation", ["drelu", "fatrelu", "relu2"])
def test_window_and_base_are_the_models(bases: Path, tmp_path: Path, case: str, activation: str) -> None:
    """The published forms have defaults of their own, so that both stand in the folder where its code looks."""
    name, fields, context = LONGER[case]
    shutil.copytree(bases / name, tmp_path / "base")
    edit_json(tmp_path / "base" / "config.json", **fields)
    base = open_base(ModelSection(path="base", revision="", ignore_config=[]), tmp_path)
    model: Any = load_model(base)
    activity = FfnActivity(Activation(activation, 0.1 if activation == "fatrelu" else 0.0))
    activity.install(model)
    form = export.save_model(model, model.state_dict(), base, activity.activation, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").decoder.context_length == base.decoder.context_length == context
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if "model_type" in form.fields:
        assert "sliding_window" in config
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    ids = torch.arange(3, 20)
    with torch.no_grad():
        wanted = model.eval()(ids[None]).logits[0]
    assert export.check_model(tmp_path / "out", ids, wanted, base.decoder) < 1e-4


@pytest.mark.parametrize(
    "change", [{"sliding_window": 30}, {"max_position_embeddings": 64}, {"rms_norm_eps": 1.0001e-6}], ids=str
)
def test_a_folder_that_says_something_else_behind_what_is_probed(
    bases: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    base = open_base(ModelSection(path="mistral", revision="", ignore_config=[]), bases)
    model: Any = load_model(base)
    FfnActivity(Activation("drelu")).install(model)
    export.save_model(model, model.state_dict(), base, Activation("drelu"), tmp_path / "out")
    edit_json(tmp_path / "out" / "config.json", **change)
    ids = torch.arange(3, 20)
    with torch.no_grad(), pytest.raises(CheckpointError, match="does not compute what was trained") as caught:
        export.check_model(tmp_path / "out", ids, model(ids[None]).logits[0], base.decoder)
    assert "context_length" in str(caught.value) or "norm_eps" in str(caught.value)


def test_the_number_format_of_the_base_is_kept(bases: Path, tmp_path: Path, sparsified: Any) -> None:
    from support.families import random_checkpoint

    random_checkpoint(bases / "half", "mistral")
    model = AutoModelForCausalLM.from_pretrained(bases / "half", dtype=torch.float16)
    model.save_pretrained(bases / "half")
    edit_json(bases / "half" / "config.json", dtype="float16")
    record = sparsified("half")
    assert open_checkpoint(tmp_path / "out").formats()["ffn"] == "f16"
    assert record["difference"] < 1e-4


def test_a_model_that_transformers_cannot_load_is_named_with_what_to_do(
    bases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no such class")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(CheckpointError, match=r"transformers cannot load it\n  found: no such class\n  try: see"):
        load_model(open_base(ModelSection(path="model", revision="", ignore_config=[]), bases))
