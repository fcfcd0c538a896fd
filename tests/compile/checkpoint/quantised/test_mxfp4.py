"""Experts in MXFP4, as gpt-oss is published: values are those of transformers, and gate and up are kept exactly."""

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
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.packing import PackSpec, pack
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS as ARTIFACT_PARTS
from pi_runtime.kernels import reference

SIZES = {"hidden_size": 64, "intermediate_size": 96}
PARTS = {"gate_up": (192, 2), "down": (64, 3)}
"""Rows of a matrix, and blocks of a row."""


def in_mxfp4(folder: Path) -> Any:
    """A checkpoint as published, with random blocks; returns the model with the values that transformers reads."""
    model, rng = random_checkpoint(folder, "gpt-oss", sizes=SIZES), np.random.default_rng(0)
    changes, state = {}, model.state_dict()
    for layer in range(2):
        for part, (rows, blocks) in PARTS.items():
            name = f"model.layers.{layer}.mlp.experts.{part}_proj"
            block = torch.from_numpy(rng.integers(0, 256, (5, rows, blocks, 16), np.uint8))
            scale = torch.from_numpy(rng.integers(120, 126, (5, rows, blocks), np.uint8))
            changes |= {f"{name}_blocks": block, f"{name}_scales": scale}
            state[name].copy_(convert_moe_packed_tensors(block, scale, dtype=torch.float32))
    gone = [name for name in load_file(folder / "model.safetensors") if name.endswith(("gate_up_proj", "down_proj"))]
    edit_tensors(folder, *gone, **{name.replace(".", "__"): tensor for name, tensor in changes.items()})
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ignored})
    return model


@pytest.mark.parametrize("kind", ["q5", "q8", "f16"])
def test_values_are_those_of_transformers_and_gate_and_up_are_kept(kind: str, tmp_path: Path) -> None:
    model, checkpoint = in_mxfp4(tmp_path), open_checkpoint(tmp_path)
    assert checkpoint.formats()["ffn"] == "mxfp4 of 4 bits"
    assert checkpoint.bits("ffn") == 4.25
    packed = pack(
        checkpoint, PackSpec(formats=dict.fromkeys(ARTIFACT_PARTS, "f32") | {"ffn": kind}), tmp_path / "a.pi", recipe={}
    )
    with Artifact.open(tmp_path / "a.pi") as artifact, torch.no_grad():
        for layer in range(2):
            experts = model.model.layers[layer].mlp.experts
            gate, up = (experts.gate_up_proj.mT[:, start::2].reshape(-1, 64).numpy() for start in (0, 1))
            down = experts.down_proj.reshape(-1, 64).numpy()
            first, rest = (artifact.values(f"layers/{layer}/ffn/{name}") for name in ("first", "rest"))
            np.testing.assert_array_equal(first, gate)
            np.testing.assert_array_equal(rest[:, 0], up)
            np.testing.assert_array_equal(checkpoint.values(f"layers/{layer}/ffn/rest"), np.stack([up, down], 1))
            assert np.abs(rest[:, 1] - down).max() <= {"q5": 0.08, "q8": 0.01, "f16": 0}[kind] * np.abs(down).max()
        assert ("ffn" in packed.errors) == (kind != "f16")


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    model, checkpoint = in_mxfp4(tmp_path), open_checkpoint(tmp_path)
    pack(checkpoint, PackSpec(formats=dict.fromkeys(ARTIFACT_PARTS, "f32")), tmp_path / "a.pi", recipe={})
    ids = np.random.default_rng(1).integers(0, 131, 30)
    with Artifact.open(tmp_path / "a.pi") as artifact, torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
        assert np.abs(reference.forward(artifact, ids) - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_exponents_that_no_float_holds_are_refused(tmp_path: Path) -> None:
    in_mxfp4(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(tmp_path / "model.safetensors")[name]
    edit_tensors(tmp_path, **{name.replace(".", "__"): torch.full_like(scales, 255)})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        checkpoint.check_values()
    edit_tensors(tmp_path, **{name.replace(".", "__"): scales[:, 1:]})
    with pytest.raises(CheckpointError, match="do not fit together"):
        open_checkpoint(tmp_path)
