"""Models whose decoders differ from Llama's are profiled, trained, placed, packed, planned for and run all the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.families import random_checkpoint
from support.small_project import no_progress, prose, small_recipe

from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.planning.model_config import find_planned
from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.kernels import reference

SIZES = {"max_position_embeddings": 64, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
MIXERS = ["linear_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"hidden_activation": "relu", "intermediate_size": 192},
    "glm4-moe": {"hidden_act": "relu", "moe_intermediate_size": 96, "intermediate_size": 250},
    "granitemoe": {"hidden_act": "relu", "intermediate_size": 96},
    "nanochat": {"intermediate_size": 192},
    "nemotron-h-experts": {"moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96},
    "nemotron-h-latents": {"moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 50},
    "olmo2": {"hidden_act": "relu", "intermediate_size": 192},
    "olmoe": {"hidden_act": "relu", "intermediate_size": 96},
    "qwen3.5-fatrelu": {"intermediate_size": 192, "layer_types": MIXERS},
    "qwen3.5-moe-fatrelu": EXPERTS | {"layer_types": MIXERS},
    "smallthinker": {"moe_ffn_hidden_size": 96, "num_hidden_layers": 3},
    "smollm3": {"hidden_act": "relu", "intermediate_size": 192, "no_rope_layers": [1, 0]},
}

FIRST, MORE = {"gemma3", "olmoe"}, pytest.mark.more
"""A dense model and a mixture run in the first tier of tests."""


def built(folder: Path, case: str, sizes: dict[str, Any], **sections: dict[str, object]) -> tuple[Any, Path]:
    """The model that computes the logits of a small random checkpoint, and the artifact of a recipe for it."""
    model = random_checkpoint(folder / "model", case, sizes={**SIZES, **sizes})
    (folder / "text").mkdir()
    (folder / "text" / "0.txt").write_text(prose(0, 3000))
    (folder / "held-out.txt").write_text(prose(9, 1500))
    recipe, output = folder / "small.toml", folder / "a.pi"
    recipe.write_text(small_recipe(**sections).to_toml())
    with (pipeline := Pipeline(recipe, "cpu", lambda _line: None, no_progress, output=output)).worker:
        pipeline.pack(output)
    assert {"profile", "train", "pack"} <= {*pipeline.ran}
    return model, output


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in FIRST else MORE) for case in MODELS])
def test_a_model_is_built_and_run(case: str, tmp_path: Path) -> None:
    model, output = built(tmp_path, case, MODELS[case])
    ids = np.random.default_rng(0).integers(3, 130, 20)
    with Artifact.open(output) as artifact, torch.no_grad():
        m, predicted = artifact.manifest, reference.forward(artifact, ids, "predicted")
        assert m.plans
        wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
        dense = reference.forward(artifact, ids)
    assert np.abs(dense - wanted).max() <= 2e-4 * np.abs(wanted).max()
    with load(output) as running:
        found, tally = running.examine(ids)
    np.testing.assert_allclose(found, predicted, atol=2e-3 * np.abs(predicted).max())
    assert (tally[:, 2] < len(ids) * m.decoder.experts_per_token * m.decoder.d_ff).all(), "something is skipped"
    planned = find_planned("config.json", tmp_path / "model")
    assert planned.decoder == m.decoder


@pytest.mark.parametrize("case", ["qwen3.5-moe", pytest.param("qwen3.5", marks=MORE)])
def test_small_values_are_left_out_beside_states(case: str, tmp_path: Path) -> None:
    """SiLU is never zero: a layer, or its experts, may be cut at a magnitude."""
    sections: dict[str, Any] = {"train": {"rungs": ["dense", "threshold"]}, "quality": {"perplexity_increase": 1.0}}
    _, output = built(tmp_path, case, MODELS[f"{case}-fatrelu"], **sections)
    ids = np.random.default_rng(0).integers(3, 130, 20)
    with Artifact.open(output) as artifact:
        m, wanted = artifact.manifest, reference.forward(artifact, ids, "predicted")
        dense = reference.forward(artifact, ids)
    cut = [n for n, layer in enumerate(m.layers) if layer.rung == "threshold"]
    assert cut
    assert np.abs(dense - wanted).max() > 1e-3 * np.abs(dense).max()
    with load(output) as running:
        found, tally = running.examine(ids)
    np.testing.assert_allclose(found, wanted, atol=2e-3 * np.abs(wanted).max())
    assert (tally[cut, 2] < len(ids) * m.decoder.experts_per_token * m.decoder.d_ff).all(), "something is skipped"
