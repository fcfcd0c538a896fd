"""`config.json`, read strictly: every key is known, harmless, or has a value without effect."""

import difflib
import json
import math
import shlex
from collections.abc import Collection, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from pi_compile.errors import CheckpointError
from pi_runtime.errors import Setting, Text, UsageError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_GGUF_SUFFIX = ".gguf"
MAGICS = MAGIC, POWERINFER_MAGIC = b"GGUF", b"PWRI"
"""The first bytes, of llama.cpp's files and of PowerInfer's."""
_VERSION_BYTES = 4
"""Bytes of the version behind them, a small number."""


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises CheckpointError if the file cannot be read or holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON", found=error, remedy=remedy_for(path)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object", found=type(value).__name__)
    return value


def remedy_for(path: Path) -> str:
    """What to do about a file of a checkpoint that cannot be read."""
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        pointer = False
    if pointer:
        return "this is a Git LFS pointer, not the file: run `git lfs pull` in the checkpoint's folder"
    return "the file is damaged or was not fetched whole: fetch it again"


def is_gguf(path: Path) -> bool:
    """Whether a file begins like a GGUF file, or is at least named like one, so that its faults are looked for."""
    if not path.is_file():
        return False
    if path.suffix == _GGUF_SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC) + _VERSION_BYTES)
    except OSError:  # a folder may have other files that are not for everybody
        return False
    return head.startswith(MAGICS) and 0 in head[len(MAGIC) :]  # a text may begin with the same letters


_HARMLESS_KEYS = """
    _name_or_path architectures auto_map dtype model_type name_or_path torch_dtype transformers_version
    unsloth_version unsloth_fixed model_name tokenizer_class prefix model_max_length max_sequence_length
    internal_version is_llama_config transformers.js_config custom_pipelines
    attention_dropout activation_dropout dropout embd_pdrop resid_pdrop attn_pdrop hidden_dropout attn_dropout layerdrop
    initializer_range init_std gradient_checkpointing use_cache output_past use_bfloat16 torchscript return_dict
    output_attentions output_hidden_states output_scores return_dict_in_generate keys_to_ignore_at_inference
    attn_implementation _attn_implementation _attn_implementation_autoset use_flash_attn use_flash_attention_2
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id forced_bos_token_id
    forced_eos_token_id bad_words_ids suppress_tokens begin_suppress_tokens num_labels _num_labels id2label label2id
    problem_type finetuning_task task_specific_params pretraining_tp _commit_hash _flax_dtype tf_legacy_loss
    max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups
    num_return_sequences diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size remove_invalid_values exponential_decay_length_penalty
"""
HARMLESS = frozenset(_HARMLESS_KEYS.split())
"""Keys of any family that do not change the function: they are about files, training, tokens or generation."""

_OFF = """
    add_cross_attention is_encoder_decoder tie_encoder_decoder use_bidirectional_attention use_sliding_window
    quantization
    attention_bias mlp_bias qkv_bias use_bias bias use_qk_norm qk_layernorm use_mrope rope_interleaved
    apply_residual_connection_post_layernorm scale_attn_by_inverse_layer_idx residual_in_fp32
    output_router_logits flash_attn flash_rotary fused_dense fp16 bf16 fp32
"""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF.split(), (False,)),
    "attention_multiplier": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_soft_cap": (),
    "clip_qkv": (),
    "is_causal": (True,),
    "is_decoder": (True, False, None),
    "layer_types": (),
}
"""Keys that change the function unless they hold one of these values. Null is one more, except where true is one: there
it is taken for false."""


class Config:
    """The fields of one `config.json`; its error messages name the file."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path, self.fields = path, fields
        self.names: Mapping[str, str] = {}
        """Usual name of a key → the name that it has in this config."""
        self.notices: list[str] = []
        """Lines for the user about things that are no errors."""

    def renamed(self, names: Mapping[str, str]) -> "Config":
        """The same config, whose keys are asked for by their usual names; messages have the config's own."""
        found = copy(self)
        found.names = names
        return found

    def with_fields(self, fields: Mapping[str, Any]) -> "Config":
        """The same config with these fields in place of its own."""
        found = copy(self)
        found.fields = fields
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; `default` where it is missing or null."""
        value = self.fields.get(self.names.get(key, key))
        return default if value is None else value

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """The value of a key that must be an integer in `least` (1 or 0) … 2³¹ − 1."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value < 2**31:
            raise self.error(key, value, expected="a positive integer" if least else "an integer, 0 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The value of a key that must be a positive finite number."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, value, expected="a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """The value of a switch, which null puts off: code that asks for it takes null for false."""
        value = self.fields.get(self.names.get(key, key), default)
        value = False if value is None else value
        if type(value) is not bool:
            raise self.error(key, value, expected="true or false")
        return value

    def choice(self, key: str, default: str | None, allowed: Mapping[str, str]) -> str:
        """The value of a key that must be one of `allowed`, translated by it."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, value, expected=f"one of {', '.join(allowed)}", remedy="no other is supported yet")
        return allowed[value]

    def check_derived(self, key: str, derived: float, source: str) -> None:
        """Refuse a redundant key whose value does not follow from other keys; `source` says how it does."""
        value = self.get(key)
        if value is not None and (type(value) not in (int, float) or value != derived):
            raise self.error(
                key,
                value,
                expected=f"{source} = {derived:g}",
                remedy=f"correct {key}, or the keys that it follows from",
            )

    def error(self, key: str, value: object, *, expected: object = None, remedy: str | None = None) -> CheckpointError:
        key = self.names.get(key, key)
        found = f"{value!r}" if value is not None or key in self.fields else "no such key"
        return CheckpointError(f"{self.path}: {key}", expected=expected, found=found, remedy=remedy)


def check_keys(
    config: Config,
    read: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    ignore: Collection[str],
    *,
    in_recipe: bool = False,
) -> list[str]:
    """Refuse keys that might change the function; return the unknown keys that are ignored on request.

    `read` has the keys that the family reads, `neutral` its additions to `NEUTRAL`. `ignore` has the keys that, as the
    user says, have no effect: in a recipe, or by `ignore_config`, which must name keys that are there. Raises
    CheckpointError naming every key that is refused, and UsageError.
    """
    fields = config.fields
    if not in_recipe:
        _refuse_missing(config, [key for key in ignore if key not in fields])
    _refuse_ignoring(config, sorted(set(ignore) & (set(read) | {"model_type"})), in_recipe)
    refuse_changes(config, read, neutral)
    unknown = _open_keys(config, read, neutral)
    refused = [key for key in unknown if key not in ignore]
    if refused:
        raise CheckpointError(
            f"{config.path}: {', '.join(refused)} {'is' if len(refused) == 1 else 'are'} not understood",
            expected="keys whose meaning is known, so that the artifact computes the checkpoint's function",
            found=", ".join(f"{key} = {short(fields[key])}" for key in refused),
            remedy=("if this does not change the function, ", _way_out(refused, in_recipe)),
        )
    return [key for key in unknown if key in ignore]


def refuse_changes(config: Config, read: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CheckpointError for keys that are known to change the function in a way that is not supported."""
    allowed = {**NEUTRAL, **neutral}
    changing = [key for key in _open_keys(config, read, neutral) if key in allowed or key == "sliding_window"]
    if changing:
        raise CheckpointError(
            f"{config.path}: {', '.join(changing)} would change the function, and this is not supported",
            expected=f"{_neutral_text(allowed, changing[0])}",
            found=", ".join(f"{key} = {short(config.fields[key])}" for key in changing),
            remedy="use another checkpoint of the model; a quantised one can be replaced by the one it was made from",
        )


def ignored_notices(config: Config, ignored: Collection[str]) -> list[str]:
    """Lines for the user about the keys that `check_keys` returned."""
    return [f"config.json: {key} = {short(config.fields[key])} is ignored, as asked" for key in ignored]


def _open_keys(config: Config, read: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Keys that are neither understood nor without effect, sorted."""
    allowed = {**NEUTRAL, **neutral}
    return [
        key
        for key, value in sorted(config.fields.items())
        if key not in read
        and key not in HARMLESS
        and not is_neutral(value, allowed.get(key, ()))
        and not _without_effect(config, key)
    ]


def is_neutral(value: object, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is one of those without effect; null is one more, except where true is one."""
    if value is None:
        return None in allowed or not any(v is True for v in allowed)
    return any(value == v and isinstance(value, bool) is isinstance(v, bool) for v in allowed)


def _without_effect(config: Config, key: str) -> bool:
    value = config.fields[key]
    if key == "sliding_window":
        # A window as long as the context, or switched off, is no window.
        context = config.size("max_position_embeddings", 2048)
        return config.fields.get("use_sliding_window") is False or (type(value) is int and value >= context)
    if key == "use_sliding_window":
        return "sliding_window" in config.fields
    if key == "layer_types":
        return isinstance(value, list) and all(kind in ("full_attention", "attention") for kind in value)
    return False


def _refuse_missing(config: Config, keys: list[str]) -> None:
    if keys:
        near = difflib.get_close_matches(keys[0], config.fields, cutoff=0.5)
        raise UsageError(
            f"{config.path} has no such key",
            setting=Setting("ignore_config", keys[0]),
            expected=f"a key of it, such as {', '.join(near)}" if near else "a key of it",
            remedy="correct the name, or leave it out",
        )


def _refuse_ignoring(config: Config, keys: list[str], in_recipe: bool) -> None:
    if keys:
        raise CheckpointError(
            f"{config.path}: {', '.join(keys)} cannot be ignored: the model is read with it",
            remedy=("take it out of ", "[model] ignore_config" if in_recipe else Setting("ignore_config")),
        )


def _way_out(keys: list[str], in_recipe: bool) -> Text:
    if in_recipe:
        return f"write in the recipe: [model] ignore_config = {json.dumps(keys)}"
    return ("add", *((" ", Setting("ignore_config", shlex.quote(key))) for key in keys))


def _neutral_text(allowed: Mapping[str, tuple[Any, ...]], key: str) -> str:
    if key == "sliding_window":
        return "sliding_window no shorter than max_position_embeddings"
    values = allowed[key] if None in allowed[key] or not is_neutral(None, allowed[key]) else (*allowed[key], None)
    return f"{key} = {' or '.join(map(repr, values))}"


def short(value: object) -> str:
    """A value as messages show it: its first 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
