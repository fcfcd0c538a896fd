"""BitNet's checkpoints, packed and as master weights: values are transformers' own, and q4 keeps them."""

import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from safetensors.torch import load_file
from support.families import random_checkpoint
from support.hf import edit_json, edit_tensors

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.packing import PackSpec, pack
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.kernels import reference

SIZES = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 6, "num_key_value_heads": 2}
IDS = np.random.default_rng(1).integers(0, 131, 30)
FORMS = {
    "packed": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "packed, divided": {"linear_class": "bitlinear"},
    "master weights": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}


def in_form(folder: Path, form: str) -> Any:
    """A checkpoint in one of the forms; returns the model with the values of its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what its compiler loads
        from transformers.integrations import bitnet
    model = random_checkpoint(folder, "bitnet", sizes=SIZES, dtype=torch.bfloat16).float()
    edit_json(folder / "config.json", quantization_config={"quant_method": "bitnet", **FORMS[form]})
    changes, rng = {}, np.random.default_rng(0)
    for name, weight in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            continue
        if form == "master weights":
            with torch.no_grad():
                weight.copy_(bitnet.WeightQuant.forward.__wrapped__(None, weight.bfloat16()))
            continue
        ternary = torch.from_numpy(rng.integers(-1, 2, weight.shape)).float()
        scale = torch.tensor([0.37 if "divided" not in form else 4.0]).bfloat16()
        changes |= {name: bitnet.pack_weights(ternary.clone()), name + "_scale": scale}
        weight.copy_(ternary / scale.float() if "divided" in form else ternary * scale.float())
    edit_tensors(folder, **{name.replace(".", "__"): tensor for name, tensor in changes.items()})
    return model


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_transformers_and_q4_keeps_them(form: str, tmp_path: Path) -> None:
    model, checkpoint = in_form(tmp_path, form), open_checkpoint(tmp_path)
    assert {checkpoint.format(part) for part in ("attention", "ffn")} == {"q4"}
    assert any("rounded to 8 bits" in line for line in checkpoint.source.notices)
    packed = pack(checkpoint, PackSpec(formats=dict.fromkeys(PARTS, "keep")), tmp_path / "a.pi", recipe={})
    assert all(error.squares == 0 for error in packed.errors.values())
    with Artifact.open(tmp_path / "a.pi") as artifact:
        for n, layer in enumerate(model.model.layers):
            rest = np.stack([layer.mlp.up_proj.weight.detach(), layer.mlp.down_proj.weight.detach().T], 1)
            np.testing.assert_array_equal(artifact.values(f"layers/{n}/ffn/rest"), rest)
            np.testing.assert_array_equal(
                artifact.values(f"layers/{n}/attention/out"), layer.self_attn.o_proj.weight.detach()
            )
    pack(checkpoint, PackSpec(formats=dict.fromkeys(PARTS, "f32")), tmp_path / "b.pi", recipe={})
    with Artifact.open(tmp_path / "b.pi") as artifact, torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(IDS)[None]).logits[0].numpy()
        assert np.abs(reference.forward(artifact, IDS) - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    in_form(tmp_path, "packed")
    name = "model.layers.1.mlp.down_proj.weight"
    stored = load_file(tmp_path / "model.safetensors")[name]
    edit_tensors(tmp_path, **{name.replace(".", "__"): stored.to(torch.int32)})
    with pytest.raises(CheckpointError, match="do not fit together"):
        open_checkpoint(tmp_path)
    partly = {**FORMS["master weights"], "modules_to_not_convert": ["q_proj"]}
    for fields in ({"use_rms_norm": True}, partly):
        edit_json(tmp_path / "config.json", quantization_config={"quant_method": "bitnet", **fields})
        with pytest.raises(CheckpointError, match=[*fields][-1]):
            open_checkpoint(tmp_path)
