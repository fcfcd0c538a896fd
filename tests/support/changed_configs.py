"""Configs of which one key is missing, null or another, and what transformers and we make of them."""

import json
import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.config import NEUTRAL, Config
from pi_compile.checkpoint.families.registry import adapters, find_adapter
from pi_compile.errors import CheckpointError
from pi_compile.torch_model import decoder as td
from support.families import CASES, random_checkpoint
from support.hf import randomised

FAMILIES = {
    CASES[name].model: name
    for name in reversed(CASES)
    if not (CASES[name].computes or CASES[name].made or "model_type" in CASES[name].own)
}
"""Class in transformers → its first case."""
MISSING = object()
_MOST_PARAMETERS = 1 << 22
_WORDS = {
    "hidden_act": ("relu", "gelu", "silu", "gelu_new"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("sigmoid", "softmax"),
}
_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 12}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"type": "default"},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "type": "default", "factor": 2.0},
    {"rope_type": "default", "factor": 3.0},
    {"rope_type": "default", "rope_theta": 77.0},
    _YARN,
    _YARN | {"attn_factor": 0.5},
    _YARN | {"attention_factor": 0.5},
    _YARN | {"rope_theta": 50.0, "truncate": False},
    _YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    _YARN | {"mscale_all_dim": 0.9},
    _YARN | {"factor": None},
    _YARN | {"original_max_position_embeddings": None},
    {"rope_type": "yarn", "factor": 3.0},
    {"rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 12},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": {"rope_type": "default", "rope_theta": 91.0}, "sliding_attention": None},
    {"full_attention": _YARN, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": _YARN, "sliding_attention": _YARN},
)


_SPECIAL: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1, 3),
    "num_attention_heads": (1, 2, 12),
    "num_key_value_heads": (1, 2, 6, None),
    "num_kv_heads": (1, 6),
    "head_dim": (2, 4, 34),
    "hidden_size": (12, 36, 60),
    "intermediate_size": (1, 7, 600),
    "ffn_hidden_size": (1, 600),
    "moe_intermediate_size": (1, 2),
    "vocab_size": (40, 1031),
    "max_position_embeddings": (1, 2, 600),
    "sliding_window": (1, 2, 39, 40, 41),
    "num_experts": (1, 2, 9),
    "num_local_experts": (1, 2, 9),
    "n_routed_experts": (2, 3, 12),
    "num_experts_per_tok": (1, 2, 3),
    "n_shared_experts": (0, 1, 3),
    "n_group": (1, 2, 3, 6),
    "topk_group": (1, 2, 3),
    "first_k_dense_replace": (0, 1, 2, 9),
    "q_lora_rank": (1, None),
    "kv_lora_rank": (2, 33),
    "qk_nope_head_dim": (2, 14),
    "qk_rope_head_dim": (2, 14),
    "v_head_dim": (1, 40),
    "rms_norm_eps": (1e-30, 0.3),
    "layer_norm_eps": (1e-30, 0.3),
    "rope_theta": (1.5, 1e9),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "partial_rotary_factor": (0.2, 0.5, 1.0),
    "layer_types": (None,),
    "n_embd": (3, 60),
    "n_head": (1, 3),
    "n_layer": (1, 3),
    "n_inner": (1, None),
    "n_positions": (1, 600),
    "word_embed_proj_dim": (1, 60),
    "ffn_dim": (1, 600),
}
"""Sizes at the ends of what there is, and others that models seldom have."""


def fields_of(folder: Path, name: str) -> dict[str, Any]:
    """The config of a case, as transformers saves it."""
    random_checkpoint(folder, name, tokenizer=False)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def changes(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every change of one key that is tried: its name and its value, `MISSING` for none."""
    adapter = find_adapter(Config(Path("config.json"), fields))
    config_class = tf.CONFIG_MAPPING[fields["model_type"]]
    others = {key for other in adapters().values() for key in other.neutral_keys}
    known = {
        *fields,
        *adapter.read_keys,
        *(f.name for f in dataclass_fields(config_class)),
        *NEUTRAL,
        *others,
        "is_causal",
    }
    known -= {"model_type", "architectures", "transformers_version", "dtype", "id2label", "label2id"}
    return [(key, value) for key in sorted(known) for value in _values(key, fields.get(key))]


def _values(key: str, value: Any) -> Iterator[Any]:
    yield from (MISSING, None, False, True)
    if key in ("rope_parameters", "rope_scaling"):
        yield from deepcopy(_ROPES)
        for inner in value or {}:
            yield {name: of for name, of in value.items() if name != inner}
            yield value | {inner: None}
    elif isinstance(value, list):
        yield from ([], value[:-1], value[::-1], [*value, *value[-1:]])
    elif isinstance(value, str) or key in _WORDS:
        yield from _WORDS.get(key, _WORDS["hidden_act"])
    elif isinstance(value, float):
        yield from (value * 2, value / 3, 1, 1.0)
    else:
        number = value if isinstance(value, int) else 1
        yield from (0, 1, 2, number + 1, 2 * number, 5, 0.7, 40)


def changed(fields: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    found = {name: of for name, of in fields.items() if name != key} | ({} if value is MISSING else {key: value})
    copied: dict[str, Any] = json.loads(json.dumps(found))
    return copied


def outcome(folder: Path, fields: Mapping[str, Any]) -> str:
    """`equal`, `refused` (by us), `no model` (in transformers), or how the logits differ."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    try:
        model = _model(fields)
        if model is None:
            return "too large"
        model.save_pretrained(folder)
    except Exception:  # whatever its classes raise
        return "no model"
    (folder / "config.json").write_text(json.dumps(fields))
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError:
        return "refused"
    length = min(24, checkpoint.decoder.context_length)
    ids = np.random.default_rng(0).integers(0, checkpoint.decoder.vocab_size, length)
    try:
        with torch.no_grad():
            wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    except Exception:
        return "no model"
    difference = float(np.abs(logits(checkpoint, ids) - wanted).max() / np.abs(wanted).max())
    # Of states transformers computes prompts in chunks: at a width of 12 its rounding and ours make 2e-4.
    allowed = 1e-3 if checkpoint.decoder.recurs else 1e-4
    return "equal" if difference < allowed else f"logits differ by {difference:.2g} of the largest"


def _model(fields: Mapping[str, Any]) -> Any:
    config = tf.CONFIG_MAPPING[fields["model_type"]].from_dict(deepcopy(dict(fields)))
    model_class = getattr(tf, fields["architectures"][0])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(deepcopy(config)).parameters())
    if size > _MOST_PARAMETERS:
        return None
    model = randomised(model_class(config))
    model.config._experts_implementation = "eager"
    return model


def logits(checkpoint: Checkpoint, ids: np.ndarray) -> np.ndarray:
    """Ours, from the decoder of profiling and training."""
    d, ends = checkpoint.decoder, td.global_weights(checkpoint, "cpu")
    x = td.embed(d, ends, torch.from_numpy(ids)[None])
    *_, (x,) = td.layers(d, td.stored_layers(checkpoint, "cpu"), [x])
    found: np.ndarray = td.logits(d, ends, x)[0].detach().numpy()
    return found


def drawn(fields: Mapping[str, Any], count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Draw configs with a change, or with two of them: a description of each, and its fields.

    Most are of keys that the family reads: one may change what another means.
    """
    rng, possible = random.Random(seed), changes(fields)
    read = find_adapter(Config(Path("config.json"), fields)).read_keys
    known = [change for change in possible if change[0] in read]
    for _ in range(count):
        found, said = dict(fields), []
        for key, value in rng.sample(rng.choice((possible, known, known)), rng.choice((1, 2, 2))):
            found = changed(found, key, value)
            said.append(f"no {key}" if value is MISSING else f"{key} = {value!r}")
        yield ", ".join(said), found


def special(fields: Mapping[str, Any], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Draw configs with two to five special values."""
    rng, read = random.Random(seed), find_adapter(Config(Path("config.json"), fields)).read_keys
    possible = sorted(key for key in _SPECIAL if key in fields or (key in read and key != "head_dim"))
    for _ in range(count):
        chosen = {key: rng.choice(_SPECIAL[key]) for key in rng.sample(possible, rng.randint(2, 5))}
        yield {**fields, **chosen}
