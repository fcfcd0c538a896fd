"""Files by llama.cpp's own converter: read, and computed as transformers and llama.cpp compute them.

LLAMA_CPP_SOURCE names the folder of its `convert_hf_to_gguf.py` (`nox -s converted` fetches it), and LLAMA_CPP_PYTHON
an interpreter that has llama_cpp, whose logits are compared too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import torch
from compile.checkpoint.gguf import test_llama_cpp as theirs
from support.changed_configs import logits
from support.families import CASES as FAMILIES
from support.families import (
    GEMMA3,
    GEMMA4,
    GLM_LITE,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    MLA,
    MLA_YARN,
    PHI3,
    Case,
    random_checkpoint,
)
from support.gguf_files import write_byte_tokenizer, write_dequantised
from support.hf import edit_json

from pi_compile.checkpoint import open_checkpoint
from pi_compile.packing import PackSpec, pack
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import BESIDE, PARTS

SOURCE = os.environ.get("LLAMA_CPP_SOURCE", "")
SCRIPT = Path(__file__).parents[3] / "support" / "llama_cpp_converter.py"
pytestmark = pytest.mark.skipif(not SOURCE, reason="LLAMA_CPP_SOURCE names no source of llama.cpp")
ONE = {"num_experts_per_tok": 1}
_ALIKE = {"mscale": 0.9, "mscale_all_dim": 0.9}
MORE: dict[str, Case] = {
    "mixtral-one": Case("Mixtral", MIXTRAL | ONE | {"num_local_experts": 1}),
    "qwen3-moe-one": Case(
        "Qwen3Moe", LLAMA | ONE | {"moe_intermediate_size": 53, "num_experts": 1, "norm_topk_prob": True}
    ),
    "qwen3-plain": Case("Qwen3", LLAMA),
    "deepseek-v2-queries": Case("DeepseekV2", MLA | {"kv_lora_rank": 22, "rope_parameters": MLA_YARN | _ALIKE}),
    "deepseek-v2-grouped": Case(
        "DeepseekV2",
        MLA | {"kv_lora_rank": 22, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    "gemma3-six": Case("Gemma3Text", GEMMA3 | {"num_hidden_layers": 7, "layer_types": None, "sliding_window": 5}),
    "gemma3-linear": Case(
        "Gemma3Text",
        GEMMA3
        | {"num_hidden_layers": 7, "layer_types": None, "final_logit_softcapping": 3.0}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            }
        },
    ),
    "gemma4-six": Case("Gemma4Text", GEMMA4 | {"num_hidden_layers": 6, "layer_types": None, "attention_k_eq_v": False}),
    "phi3-longrope": Case(
        "Phi3",
        PHI3
        | {"original_max_position_embeddings": 600, "max_position_embeddings": 1200}  # llama.cpp has 256 at least
        | {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.3, 1.7, 2.0, 2.5],
                "long_factor": [3.0] * 5,
            }
        },
    ),
    "glm4-moe-lite-groups": Case("Glm4MoeLite", GLM_LITE | {"n_group": 3, "topk_group": 2}),
}
_STATES = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_MAMBA = {"time_step_min": 0.001, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]}
CHANGES: dict[str, dict[str, Any]] = {
    "nemotron": {"hidden_size": 72},
    **dict.fromkeys(("nemotron-h", "nemotron-h-experts", "nemotron-h-latents"), _MAMBA),
    "granite-hybrid": {"mamba_d_state": 8, "shared_intermediate_size": 53},
    "granite-hybrid-experts": {"mamba_d_state": 8},
    "phi": {"intermediate_size": 240},
    **{name: {"hidden_size": 60} for name in ("granite", "granite-biases", "granitemoe")},
    **{name: {"ffn_hidden_size": 144} for name in ("falcon-7b", "falcon-40b", "falcon-11b")},
    **{name: {"n_inner": 144} for name in ("gpt2", "gpt2-relu-wide")},
    **{name: {"num_key_value_heads": 6} for name in ("olmoe", "olmoe-normalised")},
    "qwen3-next": _STATES,
    **dict.fromkeys(
        ("qwen3.5", "qwen3.5-tied", "qwen3.5-moe"), _STATES | {"head_dim": 64, "rope_parameters": _SECTIONS}
    ),
    "gpt-oss": {"rope_parameters": GPT_OSS["rope_parameters"] | {"truncate": True}},
    "nemotron-biases": {"hidden_size": 72},
    "deepseek-v2": {"num_hidden_layers": 27, "rope_parameters": MLA_YARN | _ALIKE},
    "deepseek-v3": {"rope_parameters": MLA_YARN | _ALIKE},
    "gemma3": {"query_pre_attn_scalar": 10, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "gemma3-six": {"query_pre_attn_scalar": 10},
    "gemma3-linear": {"query_pre_attn_scalar": 10},
}
"""Fields without which llama.cpp has no such model: widths of whole heads, and what a file does not say."""
USUAL = {"hidden_act": "silu", "activation_function": "gelu_new", "activation": "gelu_pytorch_tanh"}
"""The activations that llama.cpp takes, by the keys of the families."""
_ALTERNATING = {"hybrid_override_pattern": "ME*E", "num_hidden_layers": 4}
SAID = {
    "GPT2": {"n_ctx": 37},
    "DeepseekV2": {"scoring_func": "softmax"},
    "DeepseekV3": {"scoring_func": "sigmoid"},
    "Glm4MoeLite": {"scoring_func": "sigmoid", "first_k_dense_replace": 1},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "nemotron-h": {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5},
    "nemotron-h-experts": _ALTERNATING,
    "nemotron-h-latents": _ALTERNATING,
}
"""Keys of published configs that transformers does not write, or otherwise, by the case or the class of its model."""
UNSAID = {
    "nemotron-h": ("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group", "layers_block_type"),
    **dict.fromkeys(("nemotron-h-experts", "nemotron-h-latents"), ("layers_block_type",)),
}
"""Keys that published configs of such a case do not have."""
OTHERWISE = {
    "deepseek-v2-grouped": "llama.cpp chooses groups by two experts, transformers by one",
    **dict.fromkeys(("qwen3", "olmo2-biases", "arcee-biases"), "llama.cpp has no bias of attention's output there"),
}
"""Cases that llama.cpp refuses, or computes otherwise than transformers, as which they are read."""
LOOSE = dict.fromkeys(("gemma3-linear", "gemma3-six", "gemma4-six", "gemma4-e", "gemma4-e-narrow"), 2e-2)
"""Tolerance where llama.cpp's table of GELU, in binary16, is seen: a cap leaves little of the logits."""


def converted(folder: Path) -> Path:
    command = [sys.executable, SCRIPT, SOURCE, folder, folder / "model.gguf"]
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder / "model.gguf"


CONVERTED = [
    name
    for name, case in (FAMILIES | MORE).items()
    if not (case.not_in_gguf or case.model == "OPT" or case.made or case.computes or "model_type" in case.own)
]


@pytest.mark.parametrize("case", CONVERTED)
def test_logits_are_those_of_both(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.families.CASES", FAMILIES | MORE)
    compare(case, tmp_path / "model")  # some names of folders mean something to llama.cpp


WHOLE_BLOCKS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "global_head_dim": 64,
}


@pytest.mark.skipif(not theirs.has_llama_cpp(), reason="no llama_cpp")
def test_gemma_4_in_q4_0(tmp_path: Path) -> None:
    """The form in which its vendor publishes it: q4 holds the blocks that llama.cpp's quantiser makes, bit for bit."""
    model, file = tmp_path / "model", tmp_path / "q4.gguf"
    words, _ = made("gemma4-experts", model, WHOLE_BLOCKS)
    theirs.llama_cpp("quantise", converted(model), file, "Q4_0")
    write_dequantised(file, tmp_path / "values.gguf")
    checkpoint = open_checkpoint(file)
    spec = PackSpec(formats=dict.fromkeys(PARTS, "keep"))
    with Artifact.open(pack(checkpoint, spec, tmp_path / "a.pi", recipe={}).path) as artifact:
        arrays = artifact.manifest.arrays
        blocks = [name for name, entry in arrays.items() if entry.format == "q4" and not name.endswith("ffn/rest")]
        assert {"attention/qkv", "attention/out", "ffn/first", *BESIDE} <= {name.split("/", 2)[-1] for name in blocks}
        for name in blocks:
            np.testing.assert_array_equal(artifact.values(name), checkpoint.values(name), name)
    ids = np.random.default_rng(0).integers(0, words, 24)
    theirs.assert_close(logits(checkpoint, ids), theirs.of_llama_cpp(tmp_path / "values.gguf", ids))


def made(case: str, folder: Path, sizes: Mapping[str, Any] = MappingProxyType({})) -> tuple[int, Any]:
    """Write a case's checkpoint; returns the words of its vocabulary, and the model."""
    folder.mkdir()
    write_byte_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = len(tokenizer["model"]["vocab"])
    fields = (FAMILIES | MORE)[case].fields
    usual = {key: value for key, value in USUAL.items() if key in fields or (key == "activation" and "falcon" in case)}
    # More rows than words: some tokenizers add words of their own. The converter cuts those of Gemma 3 off.
    rows = words + (len(tokenizer["added_tokens"]) if case.startswith("gemma") else 9)
    own = dict.fromkeys({"vocab_size", "vocab_size_per_layer_input"} & {"vocab_size", *fields}, rows)
    changes = {**own, **usual, **CHANGES.get(case, {}), **sizes}
    model = random_checkpoint(folder, case, tokenizer=False, sizes=changes)
    if case == "falcon-7b":
        edit_json(folder / "config.json", num_kv_heads=1)
    edit_json(
        folder / "config.json", *UNSAID.get(case, ()), **SAID.get(case, SAID.get((FAMILIES | MORE)[case].model, {}))
    )
    return words, model


def compare(case: str, folder: Path) -> None:
    words, model = made(case, folder)
    file = converted(folder)
    checkpoint = open_checkpoint(file)
    ids = np.random.default_rng(0).integers(0, words, min(24, checkpoint.decoder.context_length))
    found = logits(checkpoint, ids)
    with torch.no_grad():
        theirs.assert_close(found, model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy())
    if theirs.has_llama_cpp() and case not in OTHERWISE:
        theirs.assert_close(found, theirs.of_llama_cpp(file, ids), LOOSE.get(case, theirs.EXACT))
