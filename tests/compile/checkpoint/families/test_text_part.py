"""Checkpoints that hold more than text: the text's part is read, and the rest is passed over by name."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from support.families import random_checkpoint

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.errors import CheckpointError


def as_published(folder: Path, *, stacked: bool) -> None:
    """Write a text's checkpoint as one with pictures, and a layer that drafts; experts in tensors of all, or apart."""
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    outer = {key: config.pop(key) for key in ("architectures", "tie_word_embeddings")}
    outer |= {"model_type": config["model_type"].removesuffix("_text"), "text_config": config, "image_token_id": 7}
    outer |= {"vision_config": {"depth": 2}}
    config["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in load_file(file).items()}
    if stacked:
        for layer in range(config["num_hidden_layers"]):
            block = f"model.language_model.layers.{layer}.mlp.experts."
            every = [
                {part: tensors.pop(f"{block}{e}.{part}_proj.weight") for part in ("gate", "up", "down")}
                for e in range(config["num_experts"])
            ]
            tensors[f"{block}gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in every])
            tensors[f"{block}down_proj"] = torch.stack([e["down"] for e in every])
    more = {"model.visual.blocks.0.norm1.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3, 3)}
    save_file(tensors | more, file, metadata={"format": "pt"})


def arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: checkpoint.values(name) for name in checkpoint.array_shapes}


@pytest.mark.parametrize(("case", "stacked"), [("qwen3.5-tied", False), ("qwen3.5-moe", False), ("qwen3.5-moe", True)])
def test_the_text_of_a_model_with_pictures(case: str, stacked: bool, tmp_path: Path) -> None:
    random_checkpoint(tmp_path, case)
    plain = open_checkpoint(tmp_path)
    wanted = arrays(plain)
    as_published(tmp_path, stacked=stacked)
    found = open_checkpoint(tmp_path)
    assert found.decoder == plain.decoder
    for name, values in arrays(found).items():
        np.testing.assert_array_equal(values, wanted[name])
    told = "\n".join(found.notices)
    assert all(part in told for part in ("text_config alone is read", "mtp.*", "model.visual.*"))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_is_refused(fields: dict[str, object], word: str, tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "qwen3.5", tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=word):
        open_checkpoint(tmp_path)
