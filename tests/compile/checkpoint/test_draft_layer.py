"""Layers behind the last that draft tokens: read as checkpoints have them, run as equations say, or left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.families import CASES, random_checkpoint
from support.gguf_files import rounded_checkpoint, write_gguf
from support.hf import edit_json, edit_tensors
from support.small_project import no_progress

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.pipeline.packed import pack_model
from pi_compile.pipeline.recipe_checkpoint import create_recipe, recipe_checkpoint
from pi_compile.recipe import GuessSection, Recipe
from pi_runtime import Sampling, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.execution.executor import SequenceStep

LAYERS = 2


def with_draft_layer(folder: Path, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random model whose last layer is behind the others; what that has beside them is random too."""
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS + 1}
    if "mlp_layer_types" in CASES[name].own:
        sizes["mlp_layer_types"] = ["dense", "sparse", "sparse"]
    model = random_checkpoint(folder, name, sizes=sizes)
    rng, width = torch.Generator().manual_seed(7), model.config.hidden_size
    own = {part: 1 + torch.randn(width, generator=rng) / 5 for part in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = torch.randn(width, 2 * width, generator=rng) / (2 * width) ** 0.5
    copies = {"embed_tokens": torch.ones(130, width), "shared_head.head": torch.ones(130, width)}
    tensors = {f"model.layers.{LAYERS}.{part}.weight": tensor for part, tensor in (own | copies).items()}
    edit_tensors(folder, **{key.replace(".", "__"): tensor for key, tensor in tensors.items()})
    edit_json(folder / "config.json", num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    return model, own


def defined(model: Any, own: dict[str, torch.Tensor], tokens: list[int]) -> np.ndarray:
    """Logits of the token behind a text: W (n₁(e) | n₂(n(x))) through transformers' own layer, a norm, and the head."""
    m, eps, count = model.model, model.config.rms_norm_eps, len(tokens) - 1

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], own[name], eps)

    with torch.no_grad():
        block, m.layers = m.layers[LAYERS], m.layers[:LAYERS]
        h = m(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state  # behind the final norm
        e = m.embed_tokens(torch.tensor([tokens[1:]]))
        x = torch.cat([norm(e, "enorm"), norm(h, "hnorm")], -1) @ own["eh_proj"].T
        position = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = m.rotary_emb(x, position)
        y = block(x, attention_mask=mask, position_ids=position, position_embeddings=angles)
        return model.lm_head(norm(y[0] if isinstance(y, tuple) else y, "shared_head.norm"))[0, -1].numpy()


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3", "glm4-moe-lite"])
def test_it_is_packed_and_drafts_as_its_equations_say(name: str, tmp_path: Path) -> None:
    model, own = with_draft_layer(tmp_path / "model", name)
    notices = list[str]()
    pack_model(str(tmp_path / "model"), tmp_path / "a.pi", progress=no_progress, notice=notices.append)
    assert not [line for line in notices if "draft" in line]
    tokens = [5, 120, 7, 9, 31, 8]
    with load(tmp_path / "a.pi", device="cpu") as running, Artifact.open(tmp_path / "a.pi") as file:
        assert file.manifest.guess_layers == 1
        runner = running.executor.guess_head
        assert runner is not None
        step = SequenceStep(
            cache=running.new_cache(), tokens=np.array(tokens[:-1]), select=True, states=running.manifest.guess_states
        )
        states_TC = running.executor.step([step])[0].states_TC
        assert states_TC is not None
        _, logits_V = runner.draft(runner.new_cache(), tokens[1:], states_TC, states_TC[:0])
        wanted = defined(model, own, tokens)
        assert np.abs(logits_V - wanted).max() < 1e-4 * np.abs(wanted).max()
        settings: dict[str, Any] = {"max_tokens": 20, "sampling": Sampling(temperature=1.0, seed=1)}
        text = "".join(running.generate(tokens, speculate="off", **settings))
        assert "".join(running.generate(tokens, speculate=3, **settings)) == text


def test_a_recipe_may_want_it_or_not(tmp_path: Path) -> None:
    with_draft_layer(tmp_path / "model", "glm4-moe")
    recipe = create_recipe(str(tmp_path / "model"), tmp_path / "a.toml")
    assert isinstance(recipe, Recipe)
    assert recipe.guess == GuessSection(head="own")
    found = recipe_checkpoint(recipe, tmp_path)
    assert found.array_shapes["guess/fc"] == (found.decoder.d_model, 2 * found.decoder.d_model)
    without = recipe_checkpoint(recipe.model_copy(update={"guess": GuessSection(head="")}), tmp_path)
    assert not [name for name in without.array_shapes if name.startswith("guess/")]
    assert without.decoder == found.decoder


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("mlp.gate.weight", {}, "model.layers.2.mlp.gate.weight"),
        ("shared_head.norm.weight", {}, "model.layers.2.shared_head.norm.weight"),
        ("", {"self_attn__indexer__wk__weight": torch.ones(3, 3)}, "self_attn.indexer.wk.weight"),
        ("", {"eh_proj__weight": torch.ones(3, 3)}, "model.layers.2.eh_proj.weight"),
    ],
)
def test_what_is_not_computed_is_left_out_by_name(
    removed: str, added: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    with_draft_layer(folder, "glm4-moe")
    recipe = create_recipe(str(folder), tmp_path / "a.toml")
    edit_tensors(folder, f"model.layers.2.{removed}", **{f"model__layers__2__{k}": v for k, v in added.items()})
    found = open_checkpoint(folder)
    assert not found.can_draft
    (notice,) = [line for line in found.notices if "draft further tokens, are left out" in line]
    assert message in notice
    assert isinstance(recipe, Recipe)
    with pytest.raises(CheckpointError, match="no layer that drafts tokens is read"):
        recipe_checkpoint(recipe, tmp_path)


def test_a_gguf_file_has_it_too(tmp_path: Path) -> None:
    rounded_checkpoint(tmp_path / "hf", "glm4-moe", "f16", num_hidden_layers=4)
    width = json.loads((tmp_path / "hf" / "config.json").read_text())["hidden_size"]
    fc, rng = np.zeros((width, 2 * width), np.float16), np.random.default_rng(0)
    fc[:] = rng.standard_normal(fc.shape)
    norms = {part: np.full(width, n, np.float32) for n, part in enumerate(("enorm", "hnorm", "shared_head_norm"), 1)}
    from gguf import GGMLQuantizationType as Type

    parts = {"eh_proj": (fc, Type.F16), **{part: (values, Type.F32) for part, values in norms.items()}}
    behind = {f"blk.3.nextn.{part}.weight": tensor for part, tensor in parts.items()}
    write_gguf(tmp_path / "hf", tmp_path / "a.gguf", "f16", tensors=behind, **{"ARCH.nextn_predict_layers": 1})
    ours, theirs = replace(open_checkpoint(tmp_path / "a.gguf"), drafts=True), open_checkpoint(tmp_path / "hf")
    assert ours.can_draft
    assert ours.decoder.n_layers == 3
    np.testing.assert_array_equal(ours.values("guess/fc"), fc)
    np.testing.assert_array_equal(ours.values("guess/norm"), norms["shared_head_norm"])
    for array in ("attention/qkv", "attention/out", "ffn/norm/weight", "ffn/router", "ffn/first", "ffn/rest"):
        np.testing.assert_array_equal(ours.values(f"guess/{array}"), theirs.values(f"layers/3/{array}"))
