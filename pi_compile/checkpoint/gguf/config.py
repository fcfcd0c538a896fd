"""The metadata of a GGUF file as the fields of a Llama's config.json, whatever its architecture.

A key that llama.cpp does not read has no effect. Of the others, every key is known or refused. Source: llama.cpp's
`convert_hf_to_gguf.py`, which writes these keys from the config, and `llama-model.cpp`, which reads them.
"""

from collections.abc import Mapping
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.gguf.architectures import ACTIVATION_KEY, EXPERTS, Architecture, architecture
from pi_compile.checkpoint.gguf.file import GgufFile
from pi_compile.checkpoint.gguf.of_families import MULTIPLIERS
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.formats import FORMATS

_REQUIRED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that change the function unless they hold one of these values."""
_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout")
_NORM_KEYS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
"""Of which an architecture has one; what the converter writes for the other is not read."""
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def gguf_config(file: GgufFile) -> Config:
    """The config that the file was written from, as far as its metadata show it.

    Raises CheckpointError naming a key that is missing, contradictory or not supported.
    """
    found = architecture(file)
    prefix = f"{file.architecture}."
    keys = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    of_family = found.of_family
    required = {**_REQUIRED, found.norm_key: "rms_norm_eps", **(of_family.required if of_family else {})}
    missing = [prefix + key for key in required if key not in keys]
    if missing:
        raise CheckpointError(f"{file.path}: no {', '.join(missing)}", remedy="convert the model again")
    fields: dict[str, Any] = {name: keys.pop(key) for key, name in required.items()}
    fields |= _heads(file, fields, keys) | _vocabulary(file, keys)
    fields |= {name: keys.pop(key) for key, name in EXPERTS.items() if keys.get(key)}
    if found.multiplied:
        fields |= {name: keys.pop(key) for key, name in MULTIPLIERS.items() if keys.get(key)}
    fields["intermediate_size"] = keys.pop("expert_feed_forward_length", fields["intermediate_size"])
    _check_counts(file, fields)
    fields |= _rope(file, found, fields, keys)
    if of_family:
        fields = {of_family.names.get(name, name): value for name, value in fields.items()}
        fields |= of_family.fields(file, keys, fields)
    _refuse_changes(file, found, fields, keys)
    # Other keys are unknown, and refused like unknown keys of a config.json.
    config = Config(file.path, fields | {prefix + key: value for key, value in keys.items()})
    config.notices += _notices(file)
    return config


def _notices(file: GgufFile) -> list[str]:
    notices = []
    down = [file.format(name) for name in file.tensors if "ffn_down" in name and "ffn_down_t" not in name]
    if any(name in FORMATS and FORMATS[name].quantised for name in down):
        notices.append(
            "blocks of ffn_down are along the neurons, blocks in an artifact along the width: `keep` rounds it again, "
            '[pack] ffn = "f32" does not'
        )
    return notices


def _rows(file: GgufFile, name: str) -> int | None:
    return file.shape(name)[0] if name in file.tensors and file.shape(name) else None


def _check_counts(file: GgufFile, fields: Mapping[str, Any]) -> None:
    """Refuse numbers of layers and experts that do not fit the tensors, before anything is made for each of them."""
    layers, experts, used = (fields.get(name) for name in ("num_hidden_layers", *EXPERTS.values()))
    routers = (name for name in file.tensors if name.endswith(".ffn_gate_inp.weight"))
    routed = _rows(file, next(routers, ""))
    counts = {
        "block_count": (layers, type(layers) is int and layers <= len(file.tensors), f"at most {len(file.tensors)}"),
        "expert_count": (experts, experts in (None, routed), routed),
        "expert_used_count": (used, experts is None or used is not None, f"how many of {experts} a token goes to"),
    }
    for key, (found, fits, expected) in counts.items():
        if not fits:
            raise CheckpointError(
                f"{file.path}: {file.architecture}.{key} does not fit its tensors", expected=expected, found=found
            )


def _heads(file: GgufFile, fields: Mapping[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The number of heads and their width, whose defaults in llama.cpp are not those of the families."""
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    found = {"num_key_value_heads": keys.pop("attention.head_count_kv", heads)}
    if "attention.key_length" in keys:
        found["head_dim"] = keys.pop("attention.key_length")
    elif type(heads) is int and type(width) is int and heads > 0 and width % heads == 0:
        found["head_dim"] = width // heads
    value_width = keys.pop("attention.value_length", found.get("head_dim"))
    if value_width != found.get("head_dim"):
        raise CheckpointError(
            f"{file.path}: heads whose values are {value_width} wide are not supported",
            expected=f"{found.get('head_dim')}, as the keys",
        )
    return found


def _vocabulary(file: GgufFile, keys: dict[str, Any]) -> dict[str, Any]:
    stored = _rows(file, "token_embd.weight")
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_TOKENS]
    sampling = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    return {
        "vocab_size": keys.pop("vocab_size", stored),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(dict.fromkeys(i for i in ends if type(i) is int and (stored is None or 0 <= i < stored))),
        **sampling,
        **({"do_sample": True} if sampling.get("temperature") else {}),
    }


def _rope(file: GgufFile, found: Architecture, fields: Mapping[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    scaling = {name: keys.pop(key) for key, name in _SCALING.items() if key in keys}
    rope_type = keys.pop("rope.scaling.type", "linear" if scaling.get("factor") else "none")
    scaling.setdefault("factor", 1.0)  # what llama.cpp takes for a missing one
    if found.of_family and found.of_family.unrotated:
        for key in ("rope.dimension_count", "rope.freq_base"):
            keys.pop(key, None)
        return {}
    width = fields.get("head_dim")
    rotated = keys.pop("rope.dimension_count", width)
    partly = found.partly_rotated and type(rotated) is type(width) is int and 2 <= rotated < width and rotated % 2 == 0
    if rotated != width and not partly:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.rope.dimension_count",
            expected=f"an even number of {width} columns"
            if found.partly_rotated
            else f"{width}: whole heads are rotated",
            found=rotated,
        )
    theta = keys.pop("rope.freq_base", 10000.0)
    if rope_type == "none":
        rope_type, scaling = "default", {}
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **scaling}}


def _refuse_changes(file: GgufFile, found: Architecture, fields: Mapping[str, Any], keys: dict[str, Any]) -> None:
    """Remove the keys without effect from `keys`; raise CheckpointError for a value that has an effect."""
    context, window = fields["max_position_embeddings"], "attention.sliding_window"
    neutral = {**_NEUTRAL, **({"rope.scaling.finetuned": (True,)} if found.multiplied else {})}  # Granite's switch
    neutral |= {"use_parallel_residual": (found.differences.get("block") == "parallel",)}
    without_effect = (*_HARMLESS, *_NORM_KEYS, ACTIVATION_KEY, *(key for key in EXPERTS if keys.get(key) == 0))
    for key in without_effect:
        if key not in neutral:
            keys.pop(key, None)
    if keys.get(window) == 0 or (type(keys.get(window)) is type(context) is int and keys[window] >= context):
        del keys[window]
    for key in [key for key in keys if key in (*neutral, window)]:
        value = keys.pop(key)
        allowed = neutral.get(key, (0, f"{context} or more"))
        if value not in allowed:
            raise CheckpointError(
                f"{file.path}: {file.architecture}.{key} would change the function, and this is not supported",
                expected=" or ".join(str(v) for v in allowed),
                found=value,
                remedy="use another model, or its Hugging Face checkpoint, of which more keys are known",
            )
