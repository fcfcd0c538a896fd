"""Architectures of GGUF files with more experts' facts than Mixtral's: their decoders are those of their families.

Their metadata are told in the words of the family's config.json, and what llama.cpp takes for a key that is missing is
said there too. Sources: `openai-moe`, `glm4-moe` and `smallthinker` in llama.cpp's `src/models`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pi_compile.checkpoint.families import glm, gpt_oss, smallthinker
from pi_compile.checkpoint.families.adapter import Adapter, SourceTensor, Table, cut_ffn, stored
from pi_compile.checkpoint.gguf.file import GgufFile
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.decoder import Decoder

_SOFTMAX, _SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
_WINDOW, _PERIOD = 4096, 4
"""What llama.cpp takes for SmallThinker, whatever the file says: every fourth layer, from the first, has no window."""
_Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How an architecture's metadata become the config of its family, and where its tensors differ."""

    adapter: Adapter
    """The family's; its decoder is taken, not its tensors."""
    required: Mapping[str, str]
    """Metadata keys that it must have besides the usual ones → the family's config keys."""
    fields: Callable[[GgufFile, _Fields, _Fields], _Fields]
    """Makes further config fields of a file's metadata keys, which it takes out, and of the fields so far."""
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Usual config keys → the family's."""
    ffn_norm: str = "post_attention_norm"
    partly_rotated: bool = False
    notices: tuple[str, ...] = ()


def mixture_layer(d: Decoder, usual: Table) -> Table:
    """The tensors of one layer, whose FFN may be dense, or have shared experts, or biases of each expert."""
    if d.experts_per_token == d.experts_shared:
        return {**usual, **cut_ffn(_parts(""), d.dense_ff, d.d_ff, d.n_experts)}
    biases = {f"ffn/{array}_bias": f"blk.{{n}}.ffn_{part}_exps.bias" for array, part in _BIASED.items()}
    always = cut_ffn(_parts("_shexp"), d.experts_shared * d.d_ff, d.d_ff, d.experts_shared) if d.experts_shared else {}
    return {
        **usual,
        "attention/sinks": stored("blk.{n}.attn_sinks.weight"),
        "ffn/router_bias": stored("blk.{n}.ffn_gate_inp.bias"),
        "ffn/router_choice_bias": stored("blk.{n}.exp_probs_b.bias"),
        **{array: (SourceTensor(name, stacked=d.n_experts),) for array, name in biases.items()},
        "ffn/expert_bias": stored("blk.{n}.ffn_down_exps.bias"),
        **{array: usual[array] + tensors for array, tensors in always.items()},
    }


_BIASED = {"first": "gate", "up": "up"}


def _parts(ending: str) -> list[str]:
    return [f"blk.{{n}}.ffn_{part}{ending}.weight" for part in ("gate", "up", "down")]


def _gpt_oss(_file: GgufFile, _keys: _Fields, _fields: _Fields) -> _Fields:
    return {}


def _glm(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    _take_gating(file, keys, (0, _SIGMOID))
    layers, drafting = fields["num_hidden_layers"], keys.pop("nextn_predict_layers", 0)
    if type(drafting) is not int or not 0 <= drafting < layers:
        raise _error(file, "nextn_predict_layers", f"fewer than {layers}", drafting)
    shared, of_expert = fields["n_shared_experts"], fields["moe_intermediate_size"]
    rows = next((file.shape(name)[:1] for name in file.tensors if name.endswith(".ffn_gate_shexp.weight")), (0,))
    if not type(shared) is type(of_expert) is int or (shared * of_expert,) != rows:
        raise _error(file, "expert_shared_count", f"experts of {of_expert} neurons, {rows[0]} together", shared)
    return {
        "num_hidden_layers": layers - drafting,
        "first_k_dense_replace": keys.pop("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.pop("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": keys.pop("expert_weights_norm", False),
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in file.tensors),
        "attention_bias": any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in file.tensors),
        "partial_rotary_factor": 1.0,
    }


def _smallthinker(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    gating = _take_gating(file, keys, (_SOFTMAX, _SIGMOID))
    window, layers = keys.pop("attention.sliding_window", 0), range(fields["num_hidden_layers"])
    if window not in (0, _WINDOW):
        raise _error(file, "attention.sliding_window", f"0 or {_WINDOW}, which llama.cpp takes for any other", window)
    marks = [int(n % _PERIOD != 0) for n in layers]
    windowed = {"rope_layout": marks, "sliding_window_layout": marks, "sliding_window_size": _WINDOW}
    return {"moe_primary_router_apply_softmax": gating == _SOFTMAX, **(windowed if window else {})}


def _take_gating(file: GgufFile, keys: _Fields, allowed: tuple[int, ...]) -> int:
    found: int = keys.pop("expert_gating_func", 0)
    if found not in allowed:
        raise _error(file, "expert_gating_func", " or ".join(map(str, allowed)), found)
    return found


def _error(file: GgufFile, key: str, expected: str, found: object) -> CheckpointError:
    return CheckpointError(f"{file.path}: {file.architecture}.{key}", expected=expected, found=found)


MIXTURES = {
    "gpt-oss": Mixture(
        adapter=gpt_oss.ADAPTER,
        required={"attention.sliding_window": "sliding_window"},
        fields=_gpt_oss,
        notices=(
            "the ends of YaRN's ramp are rounded, as llama.cpp rounds them; the published config of gpt-oss keeps them",
        ),
    ),
    "glm4moe": Mixture(
        adapter=glm.ADAPTER,
        required={"expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts"},
        fields=_glm,
        partly_rotated=True,
    ),
    "smallthinker": Mixture(
        adapter=smallthinker.ADAPTER,
        required={},
        fields=_smallthinker,
        names=smallthinker.NAMES,
        ffn_norm="ffn_norm",
    ),
}
"""The architectures, by llama.cpp's names."""
