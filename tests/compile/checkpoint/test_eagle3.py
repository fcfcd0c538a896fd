"""Published EAGLE-3 heads: read in the field's layout, run as their equations say, refused where they differ."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import save_file
from support import guess_heads, hf
from support.small_project import no_progress, small_project, small_recipe

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.eagle3 import read_head
from pi_compile.errors import CheckpointError
from pi_compile.pipeline.pipeline import Pipeline
from pi_runtime import Sampling, load
from pi_runtime.artifact.formats import Array
from pi_runtime.artifact.reader import Artifact
from pi_runtime.execution.executor import SequenceStep

SHORTLIST = 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_act": "silu", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "draft_vocab_size": SHORTLIST,
}  # fmt: skip


def tensors(width: int, vocabulary: int) -> dict[str, Array]:
    """A head's tensors, spelled from the published layout."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Array:
        return rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    attention = {"q": (32, 2 * width), "k": (16, 2 * width), "v": (16, 2 * width), "o": (width, 32)}
    ids = np.sort(rng.permutation(vocabulary)[:SHORTLIST])
    return {
        "fc.weight": matrix(width, 3 * width),
        **{f"midlayer.self_attn.{name}_proj.weight": matrix(*shape) for name, shape in attention.items()},
        "midlayer.mlp.gate_proj.weight": matrix(48, width),
        "midlayer.mlp.up_proj.weight": matrix(48, width),
        "midlayer.mlp.down_proj.weight": matrix(width, 48),
        **{f"{name}.weight": 1 + rng.standard_normal(width).astype(np.float32) / 10 for name in norms},
        "lm_head.weight": matrix(SHORTLIST, width),
        "d2t": ids - np.arange(SHORTLIST),
        "t2d": np.isin(np.arange(vocabulary), ids),
    }


def written(folder: Path, found: dict[str, Array], config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir()
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in found.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("eagle3") / "model"
    hf.random_llama(folder, intermediate_size=192, num_hidden_layers=2)
    return open_checkpoint(str(folder))


@pytest.mark.parametrize("renamed", [lambda n: n, lambda n: f"model.{n.replace('midlayer', 'layers.0')}"])
def test_the_layout_is_read(checkpoint: Checkpoint, tmp_path: Path, renamed: Callable[[str], str]) -> None:
    d = checkpoint.decoder
    found = tensors(d.d_model, d.vocab_size)
    read = read_head(written(tmp_path / "head", {renamed(name): tensor for name, tensor in found.items()}), d)
    head, arrays = read.head, read.arrays
    assert (head.states, head.shortlist, head.n_heads, head.n_kv_heads) == ((0, 1, 2), SHORTLIST, 4, 2)
    assert head.rotary_frequencies == pytest.approx([500 ** (-j / 4) for j in range(4)])
    assert np.array_equal(arrays["ids"], np.flatnonzero(found["t2d"]))
    assert np.array_equal(arrays["qkv"][32:48], found["midlayer.self_attn.k_proj.weight"])


def test_without_layers_in_its_config_a_head_reads_the_usual_ones(tmp_path: Path) -> None:
    hf.random_llama(tmp_path / "model", num_hidden_layers=8)
    d = open_checkpoint(str(tmp_path / "model")).decoder
    config = {key: value for key, value in CONFIG.items() if key != "eagle_config"}
    folder = written(tmp_path / "head", tensors(d.d_model, d.vocab_size), config)
    assert read_head(folder, d).head.states == (2, 4, 5)


@pytest.mark.slow
def test_it_is_packed_and_drafts_as_its_equations_say(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    d = open_checkpoint(str(project / "model")).decoder
    found = tensors(d.d_model, d.vocab_size)
    written(project / "head", found)
    (project / "small.toml").write_text(small_recipe(guess={"head": "head"}).to_toml())
    pipeline = Pipeline(project / "small.toml", "cpu", lambda _line: None, no_progress)
    with pipeline.worker:
        pipeline.pack(project / "small.pi")
    tokens = [5, 120, 7, 9, 31, 8]
    with load(project / "small.pi", device="cpu") as model, Artifact.open(project / "small.pi") as file:
        head, runner = file.manifest.guess, model.executor.guess_head
        assert head is not None
        assert runner is not None
        step = SequenceStep(
            cache=model.new_cache(), tokens=np.array(tokens[:-1]), select=True, states=model.manifest.guess_states
        )
        states_TC = model.executor.step([step])[0].states_TC
        assert states_TC is not None
        w = {name: file.values(f"guess/{name}") for name in ("fc", "qkv", "out", "gate", "up", "down", "head", "ids")}
        assert np.abs(w["fc"] - found["fc.weight"]).max() < 0.02
        w |= {name: file.values(f"guess/{name}") for name in ("embedding_norm", "hidden_norm", "ffn_norm", "norm")}
        _, logits = guess_heads.drafted(head, w, file.values("embedding"), tokens, states_TC, 1)
        _, logits_S = runner.draft(runner.new_cache(), tokens[1:], states_TC, states_TC[:0])
        assert np.abs(logits_S - logits[0]).max() < 0.1 * np.abs(logits).max()
        settings: dict[str, Any] = {"max_tokens": 20, "sampling": Sampling(temperature=1.0, seed=1)}
        wanted = "".join(model.generate(tokens, speculate="off", **settings))
        assert "".join(model.generate(tokens, speculate=3, **settings)) == wanted


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"fc.weight": None}, {}, "expected: also fc.weight"),
        ({"midlayer.self_attn.q_proj.bias": np.zeros(32, np.float32)}, {}, "found: midlayer.self_attn.q_proj.bias"),
        ({"layers.1.hidden_norm.weight": np.ones(4, np.float32)}, {}, "found: layers.1.hidden_norm.weight"),
        ({}, {"norm_before_residual": True}, "norm_before_residual"),
        ({}, {"hidden_act": "gelu"}, "hidden_act"),
        ({}, {"intermediate_size": 40}, "guess/gate: "),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "guess.states"),
        ({"d2t": np.full(SHORTLIST, 10**6)}, {}, "d2t: not tokens of a vocabulary"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path, change: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    d = checkpoint.decoder
    found = {name: t for name, t in (tensors(d.d_model, d.vocab_size) | change).items() if t is not None}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_head(written(tmp_path / "head", found, CONFIG | config), d)
