"""Keys that are missing, null or changed mean what they mean to transformers, or the config is refused."""

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers as tf
from support.changed_configs import FAMILIES, MISSING, changed, drawn, fields_of, outcome, special
from support.families import CASES

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.registry import decoder_of
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.decoder import Decoder


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No warnings of transformers about each config, and one thread for models so small."""
    level, threads = tf.logging.get_verbosity(), torch.get_num_threads()
    tf.logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    yield
    tf.logging.set_verbosity(level)
    torch.set_num_threads(threads)


def decoder(fields: dict[str, Any]) -> Decoder | None:
    """None where the config is refused."""
    try:
        return decoder_of(Config(Path("config.json"), fields))
    except CheckpointError:
        return None


NO_DEFAULT = {
    "DeepseekV2": {"num_experts_per_tok": 6},
    "Glm4Moe": {"head_dim": 128},
    "GraniteMoeHybrid": {"layer_types": [*["linear_attention"] * 31, "full_attention"], "intermediate_size": 512},
}
"""Keys without which the defaults of a class make no model."""


def saved(config_class: Any, **fields: Any) -> dict[str, Any]:
    """What a class makes of some fields and of its defaults."""
    found = json.loads(config_class(**fields).to_json_string(use_diff=False))
    return {key: value for key, value in found.items() if not key.startswith("_")}


def of_class_with_null(config_class: Any, needed: dict[str, Any], key: str) -> dict[str, Any] | None:
    """What a class makes of a key that is null; None where it refuses null."""
    try:
        return saved(config_class, **needed | {key: None})
    except Exception:  # whatever its classes raise
        return None


@pytest.mark.parametrize("model", FAMILIES)
def test_a_missing_key_has_the_familys_default(model: str) -> None:
    """Whole configs of each class's defaults, of which one key is missing or null, as far as the class allows null."""
    config_class, needed = getattr(tf, f"{model}Config"), NO_DEFAULT.get(model, {})
    whole = saved(config_class, **needed)
    wanted, read = decoder(whole), 0
    assert wanted is not None
    for key in (f.name for f in dataclass_fields(config_class)):
        found = decoder(changed(whole, key, MISSING))
        assert found in (None, wanted), key
        read += found is not None
        of_null = of_class_with_null(config_class, needed, key)
        if of_null is not None:
            assert decoder(changed(whole, key, None)) in (None, decoder(of_null)), f"{key} = null"
    assert read > 10


@pytest.mark.parametrize("model", FAMILIES)
def test_changed_keys_compute_what_transformers_computes(model: str, tmp_path: Path, long: bool) -> None:
    """Logits of random models of configs with one or two changes, which are read or refused."""
    fields = fields_of(tmp_path / "base", FAMILIES[model]) | CASES[FAMILIES[model]].own
    counts: Counter[str] = Counter()
    for n, (said, new) in enumerate(drawn(fields, 240 if long else 6, random.Random(model).randrange(1 << 30))):
        found = outcome(tmp_path / str(n), new)
        assert "differ" not in found, f"{said}: {found}"
        counts[found] += 1
    assert not long or counts["equal"] > 30


@pytest.mark.parametrize("model", FAMILIES)
def test_special_sizes_compute_what_transformers_computes(model: str, tmp_path: Path, long: bool) -> None:
    """One layer, one neuron, one head, a window of one position, experts that all tokens go to …, a few at a time."""
    fields = fields_of(tmp_path / "base", FAMILIES[model]) | CASES[FAMILIES[model]].own
    found = Counter(outcome(tmp_path / str(n), new) for n, new in enumerate(special(fields, 60 if long else 4, 1)))
    assert found.keys() <= {"equal", "refused", "no model", "too large"}
    assert not long or found["equal"] > 9


OF_WINDOW = {"sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}
WITH_OTHERS = {
    "a window in all layers of Qwen3's mixture": (
        "Qwen3Moe",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        "equal",
    ),
    "a window in some layers of Qwen3": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "layer_types": None},
        "refused",
    ),
    "a window in some layers of Qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "layer_types": None},
        "refused",
    ),
    "a window in layers of SmolLM3": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": None},
        "refused",
    ),
    "YaRN in one kind of Gemma 3's layers": (
        "Gemma3Text",
        {"rope_scaling": {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 12}},
        "equal",
    ),
    "YaRN in both": (
        "Gemma3Text",
        {
            "rope_parameters": {
                kind: {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 12}
                for kind in ("full_attention", "sliding_attention")
            }
        },
        "equal",
    ),
    "a base beside nested parameters of Gemma 3": (
        "Gemma3Text",
        {
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": None},
            "rope_theta": 55.0,
            "rope_local_base_freq": 33.0,
        },
        "equal",
    ),
    "an older scaling beside nested parameters of Gemma 3": (
        "Gemma3Text",
        {
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 50.0}},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        "equal",
    ),
    "another type of another time": ("Gemma3Text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "refused"),
    "parameters of no kind": ("Gemma3Text", {"rope_parameters": {"rope_type": "default", "rope_theta": 9}}, "refused"),
    "a default of the published checkpoints": ("GptOss", {"rope_parameters": None}, "equal"),
    "a null fraction, and none in the parameters": (
        "Glm4Moe",
        {"partial_rotary_factor": None, "rope_parameters": {"rope_type": "default"}},
        "equal",
    ),
    "no fraction at all": ("Glm4Moe", {"rope_parameters": {"rope_type": "default"}}, "equal"),
    "scores that nothing multiplies": ("GraniteMoe", {"attention_multiplier": None}, "equal"),
    "a width of heads that is not that of their rotated part": ("DeepseekV3", {"head_dim": 2}, "refused"),
    "that of their rotated part": ("DeepseekV3", {"head_dim": 6}, "equal"),
    "heads of Gemma 4 by layer, in two digits": (
        "Gemma4Text",
        {"per_layer_config": {n: {"head_dim": 20, "num_key_value_heads": 1} for n in ("01",)}},
        "equal",
    ),
    "heads of no layer": ("Gemma4Text", {"per_layer_config": None}, "equal"),
    "their width alone": ("Gemma4Text", {"per_layer_config": {"1": {"head_dim": 20}}}, "equal"),
    "heads of layers with a window too": (
        "Gemma4Text",
        {"per_layer_config": {n: {"head_dim": 20} for n in "01"}},
        "refused",
    ),
    "no angles of Gemma 4": ("Gemma4Text", {"rope_parameters": None}, "equal"),
    "angles of another kind": (
        "Gemma4Text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
                **OF_WINDOW,
            }
        },
        "equal",
    ),
    "a fraction of no pair": (
        "Gemma4Text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.01, "rope_theta": 50.0},
                **OF_WINDOW,
            }
        },
        "refused",
    ),
    "embeddings of each layer": (
        "Gemma4Text",
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131},
        "equal",
    ),
    "more of these than words": (
        "Gemma4Text",
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 140},
        "refused",
    ),
    "keys of no layer": ("Gemma4Text", {"num_kv_shared_layers": 1}, "no model"),
    "text that sees what follows": ("Gemma4Text", {"use_bidirectional_attention": "all"}, "refused"),
    "pictures that do": ("Gemma4Text", {"use_bidirectional_attention": "vision"}, "equal"),
    "a single expert of Gemma 4": (
        "Gemma4Text",
        {"enable_moe_block": True, "num_experts": 1, "top_k_experts": 1, "moe_intermediate_size": 9},
        "refused",
    ),
    "a linear scale beside that of scores": (
        "DeepseekV3",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "mscale_all_dim": 0.7}},
        "equal",
    ),
}


@pytest.mark.parametrize("case", WITH_OTHERS)
def test_keys_that_mean_something_together(case: str, tmp_path: Path) -> None:
    model, new, wanted = WITH_OTHERS[case]
    fields = fields_of(tmp_path / "base", FAMILIES[model]) | new
    assert outcome(tmp_path / "changed", fields) == wanted
