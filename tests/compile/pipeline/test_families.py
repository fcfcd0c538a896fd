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
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"hidden_activation": "relu", "intermediate_size": 192},
    "glm4-moe": {"hidden_act": "relu", "moe_intermediate_size": 96, "intermediate_size": 250},
    "granitemoe": {"hidden_act": "relu", "intermediate_size": 96},
    "nanochat": {"intermediate_size": 192},
    "olmo2": {"hidden_act": "relu", "intermediate_size": 192},
    "olmoe": {"hidden_act": "relu", "intermediate_size": 96},
    "smallthinker": {"moe_ffn_hidden_size": 96, "num_hidden_layers": 3},
    "smollm3": {"hidden_act": "relu", "intermediate_size": 192, "no_rope_layers": [1, 0]},
}

FIRST, MORE = {"gemma3", "olmoe"}, pytest.mark.more
"""A dense model and a mixture run in the first tier of tests."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in FIRST else MORE) for case in MODELS])
def test_a_model_is_built_and_run(case: str, tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path / "model", case, sizes={**SIZES, **MODELS[case]})
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "0.txt").write_text(prose(0, 3000))
    (tmp_path / "held-out.txt").write_text(prose(9, 1500))
    recipe, output = tmp_path / "small.toml", tmp_path / "a.pi"
    recipe.write_text(small_recipe().to_toml())
    with (pipeline := Pipeline(recipe, "cpu", lambda _line: None, no_progress, output=output)).worker:
        pipeline.pack(output)
    assert {"profile", "train", "pack"} <= {*pipeline.ran}
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
