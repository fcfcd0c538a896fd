"""Architectures of GGUF files that are more than a Llama with differences: their decoders are those of their families.

Their metadata are told in the words of the family's config.json, and what llama.cpp takes for a key that is missing is
said there too. Sources: the files of these names in llama.cpp's `src/models`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import (
    deepseek,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    lfm2,
    mamba,
    mistral,
    nemotron_h,
    olmo,
    phi,
    qwen3_next,
    smallthinker,
)
from pi_compile.checkpoint.families.adapter import Adapter, FusedRows, SourceTensor, Table, cut_ffn, stored
from pi_compile.checkpoint.families.rope import KINDS
from pi_compile.checkpoint.gguf.file import GgufFile
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.decoder import Decoder

_SOFTMAX, _SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
_WINDOW, _PERIOD = 4096, 4
"""What llama.cpp takes for SmallThinker, whatever the file says: every fourth layer, from the first, has no window."""
_LONGEST_GEMMA = 62
"""Layers of the one size of Gemma 3 whose scores llama.cpp divides by the root of the model's width over the heads."""
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""LongRoPE's divisors of angles, within the original context and behind it."""
MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Granite's, and its config keys."""
_Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OfFamily:
    """How an architecture's metadata become the config of its family, and where its tensors differ from Llama's."""

    adapter: Adapter
    """The family's; its decoder is taken, not its tensors."""
    required: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Metadata keys that it must have besides the usual ones → the family's config keys."""
    fields: Callable[[GgufFile, _Fields, _Fields], _Fields] = field(default=lambda _file, _keys, _fields: {})
    """Makes further config fields of a file's metadata keys, which it takes out, and of the fields so far."""
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Usual config keys → the family's."""
    ffn_norm: str = "ffn_norm"
    norm_key: str = "attention.layer_norm_rms_epsilon"
    """The metadata key of the norms' epsilon."""
    final_norm: str = "output_norm"
    attention: Callable[[Decoder, Collection[str]], Table] = field(default=lambda _d, _names: {})
    """Makes the arrays of a layer's attention and norms that differ, of the names of a file's tensors."""
    partly_rotated: bool = False
    unrotated: bool = False
    """Whether attention has no positions, whatever the file says of angles."""
    permuted: bool = False
    """See `architectures.Architecture`."""
    notices: tuple[str, ...] = ()


def family_layer(d: Decoder, usual: Table) -> Table:
    """The tensors of one layer, whose FFN may be dense, or have shared experts, or biases of each expert."""
    if d.n_experts == 1 or not d.has_ffn:
        return usual
    if d.experts_per_token == d.experts_shared:
        return {**usual, **cut_ffn(_parts(d, ""), d.dense_ff, d.d_ff, d.n_experts)}
    always = (
        cut_ffn(_parts(d, "_shexp"), d.experts_shared * d.d_ff, d.d_ff, d.experts_shared) if d.experts_shared else {}
    )
    of_layer = {"beside_first": "up_shexp", "beside_down": "down_shexp"}
    of_layer |= {"experts_in": "latent_down", "experts_out": "latent_up"}
    return {
        **{f"ffn/{array}": stored(f"blk.{{n}}.ffn_{name}.weight") for array, name in of_layer.items()},
        **usual,
        "attention/sinks": stored("blk.{n}.attn_sinks.weight"),
        "ffn/router_bias": stored("blk.{n}.ffn_gate_inp.bias"),
        "ffn/router_choice_bias": stored("blk.{n}.exp_probs_b.bias"),
        "ffn/first_bias": (SourceTensor("blk.{n}.ffn_gate_exps.bias", stacked=d.n_experts),),
        "ffn/up_bias": (SourceTensor("blk.{n}.ffn_up_exps.bias", stacked=d.n_experts),),
        "ffn/expert_bias": stored("blk.{n}.ffn_down_exps.bias"),
        **{array: usual[array] + tensors for array, tensors in always.items()},
    }


def _parts(d: Decoder, ending: str) -> list[str]:
    parts = ("gate", "up", "down") if d.ffn == "gated" else ("up", "down")
    return [f"blk.{{n}}.ffn_{part}{ending}.weight" for part in parts]


def _glm(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    _take_gating(file, keys, (0, _SIGMOID))
    return {
        **_routed(file, keys, fields),
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in file.tensors),
        "attention_bias": any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in file.tensors),
        "partial_rotary_factor": 1.0,
    }


def _routed(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """The fields of routed and shared experts, and of layers that have none or that draft."""
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
        **_grouped_routing(keys),
    }


def _grouped_routing(keys: _Fields) -> _Fields:
    """How experts are weighed that are chosen among groups."""
    return {
        "routed_scaling_factor": keys.pop("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": keys.pop("expert_weights_norm", False),
        "n_group": keys.pop("expert_group_count", 0) or 1,
        "topk_group": keys.pop("expert_group_used_count", 0) or 1,
    }


def _deepseek(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """DeepSeek V2 and V3, and GLM-4.7-Flash. Heads of a file are those of its latent, one for keys and values."""
    gating = _take_gating(file, keys, (0, _SOFTMAX, _SIGMOID))
    whole, value = keys.pop("attention.key_length_mla", 0), keys.pop("attention.value_length_mla", 0)
    stored_key, stored_value = fields.pop("key_length"), fields.pop("value_length")
    if not whole:  # files of older versions of llama.cpp have whole heads
        whole, value = stored_key, stored_value
    rotated, weight = fields["qk_rope_head_dim"], keys.pop("rope.scaling.yarn_log_multiplier", 0.0)
    if not type(whole) is type(rotated) is int or whole <= rotated:
        raise _error(file, "attention.key_length_mla", f"more than {rotated} rotated columns", whole)
    parameters = fields["rope_parameters"]
    if parameters["rope_type"] == "yarn":
        if not weight:
            raise _error(file, "rope.scaling.yarn_log_multiplier", "a number beside YaRN", weight)
        # llama.cpp's converter writes a tenth of it.
        parameters |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * weight)
    fields.pop("head_dim", None)
    return {
        **_routed(file, keys, fields),
        "scoring_func": "sigmoid" if gating == _SIGMOID or (not gating and _is_glm(fields)) else "softmax",
        "num_key_value_heads": fields["num_attention_heads"],
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": value,
        "q_lora_rank": keys.pop("attention.q_lora_rank", None),
    }


def _is_glm(fields: _Fields) -> bool:
    """Whether llama.cpp takes a file without a gating function for GLM-4.7-Flash."""
    return fields["num_hidden_layers"] in (47, 48) and fields["vocab_size"] == 154880


def _deepseek_decoder(config: Config) -> Decoder:
    if config.get("scoring_func") == "sigmoid":
        return deepseek.DEEPSEEK_V3.decoder(config)
    groups = config.size("n_group", 1)
    if groups > 1:
        line = "groups of experts are chosen by their largest, as the published code of DeepSeek V2 does;"
        config.notices.append(f"{line} llama.cpp chooses them by the sum of their two largest")
    found = replace(
        deepseek.DEEPSEEK_V2.decoder(config),
        router_normalised=config.flag("norm_topk_prob", default=False),
        router_groups=groups,
        router_group_top=1 if groups > 1 else 2,
        router_groups_taken=config.size("topk_group", 1),
    )
    glm.check(config, found)
    return found


_DEEPSEEK_NAMES = {
    "layers.{n}.input_layernorm": "attn_norm",
    "layers.{n}.self_attn.q_proj": "attn_q",
    "layers.{n}.self_attn.q_a_proj": "attn_q_a",
    "layers.{n}.self_attn.q_a_layernorm": "attn_q_a_norm",
    "layers.{n}.self_attn.q_b_proj": "attn_q_b",
    "layers.{n}.self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "layers.{n}.self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "layers.{n}.self_attn.kv_b_proj": "attn_kv_b",
    "layers.{n}.self_attn.o_proj": "attn_output",
}


def _deepseek_attention(d: Decoder, names: Collection[str]) -> Table:
    """The family's, by llama.cpp's names. Newer files have a tensor for keys and one for values of `kv_b_proj`."""
    found: dict[str, tuple[SourceTensor, ...]] = {}
    for array, tensors in deepseek.layer_tensors(d).items():
        if array.startswith("attention/"):
            parts = [tensor.name.rpartition(".") for tensor in tensors]
            found[array] = tuple(
                replace(tensor, name=f"blk.{{n}}.{_DEEPSEEK_NAMES[name]}.{kind}")
                for tensor, (name, _, kind) in zip(tensors, parts, strict=True)
                if name in _DEEPSEEK_NAMES
            )
    if "blk.0.attn_k_b.weight" in names:
        for array, part in (("k_up", "k"), ("v_up", "v")):
            found[f"attention/{array}"] = stored(*(f"blk.{{n}}.attn_{part}_b.{h}.weight" for h in range(d.n_heads)))
    return found


def _gemma3(_file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """The window is of five layers of six; they have a base of their own, and no scaling."""
    window, layers = keys.pop("attention.sliding_window", 0), fields["num_hidden_layers"]
    base = keys.pop("rope.freq_base_swa", 10000.0)
    width = fields.get("head_dim")
    if layers == _LONGEST_GEMMA:
        width = fields["hidden_size"] // fields["num_attention_heads"]
    parameters = fields.pop("rope_parameters")
    return {
        "rope_parameters": dict(zip(KINDS, (parameters, {"rope_type": "default", "rope_theta": base}), strict=True)),
        "query_pre_attn_scalar": width,
        "final_logit_softcapping": keys.pop("final_logit_softcapping", 0.0) or None,
        "layer_types": None if window else [KINDS[False]] * layers,
        "sliding_window": window or None,
    }


def _olmo3(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """Layers with a window, every fourth one without unless the file says which; those angles are not scaled."""
    window, marks = keys.pop("attention.sliding_window"), keys.pop("attention.sliding_window_pattern", _PERIOD)
    parameters = fields["rope_parameters"]
    base = keys.pop("rope.freq_base_swa", parameters["rope_theta"])
    if parameters["rope_type"] == "yarn":
        parameters["attention_factor"] = keys.pop("rope.scaling.yarn_attn_factor", None)
    if not isinstance(marks, list):
        marks = [(n + 1) % marks != 0 for n in range(fields["num_hidden_layers"])]
    return {
        "rope_parameters": dict(zip(KINDS, (parameters, {"rope_type": "default", "rope_theta": base}), strict=True)),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "layer_types": [KINDS[bool(mark)] for mark in marks],
        "sliding_window": window,
    }


def _mistral3(_file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """Ministral 3, or a Mistral without YaRN. llama.cpp's `mscale` is 1 where there is one."""
    parameters, beta = fields["rope_parameters"], keys.pop("attention.temperature_scale", 0.0)
    if weight := keys.pop("rope.scaling.yarn_log_multiplier", 0.0):
        parameters |= {"mscale": 1.0, "mscale_all_dim": weight}
    return {"rope_parameters": parameters | ({mistral.BETA: beta} if beta else {}), "sliding_window": None}


def _mistral3_decoder(config: Config) -> Decoder:
    grows = mistral.BETA in config.fields["rope_parameters"]
    return (mistral.MINISTRAL3 if grows else mistral.ADAPTER).decoder(config)


def _gemma3_attention(_d: Decoder, _names: Collection[str]) -> Table:
    return {
        "attention/out_norm/weight": stored("blk.{n}.post_attention_norm.weight"),
        "ffn/out_norm/weight": stored("blk.{n}.post_ffw_norm.weight"),
    }


def _gemma4(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """Numbers of keys' heads by layer; angles of layers without a window are whole, and divided by a tensor."""
    marks, layers, groups = fields.pop("marks"), fields["num_hidden_layers"], fields["num_key_value_heads"]
    groups = groups if isinstance(groups, list) else [groups] * layers
    if not isinstance(marks, list) or not len(marks) == len(groups) == layers or marks[-1]:
        raise _error(file, "attention.sliding_window_pattern", f"{layers} marks, the last of them false", marks)
    width = fields.pop("windowed_width")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (found := keys.pop(key, width)) != width:
            raise _error(file, key, str(width), found)
    of_kind = {bool(mark): count for mark, count in zip(marks, groups, strict=True)}
    if [of_kind[bool(mark)] for mark in marks] != groups:
        raise _error(file, "attention.head_count_kv", "one number for layers with a window, and one for others", groups)
    own = {"head_dim": fields["head_dim"], "num_key_value_heads": of_kind[False]}
    neurons, shared = file.metadata[f"{file.architecture}.feed_forward_length"], _shared_layers(file, keys, layers)
    narrow = neurons[0] if isinstance(neurons, list) and neurons else neurons
    if isinstance(neurons, list) and neurons != [narrow] * (layers - shared) + [2 * narrow] * shared:
        raise _error(file, "feed_forward_length", f"twice as many in the last {shared} layers", neurons)
    last = max((n for n in range(layers - shared) if not marks[n]), default=layers - 1)
    base = {"rope_type": "default", "rope_theta": fields.pop("windowed_base")}
    return {
        "rope_parameters": dict(zip(KINDS, (fields.pop("rope_parameters"), base), strict=True)),
        "layer_types": [KINDS[bool(mark)] for mark in marks],
        "head_dim": width,
        "num_key_value_heads": of_kind.get(True, of_kind[False]),
        "per_layer_config": {str(n): own for n, mark in enumerate(marks) if not mark},
        "attention_k_eq_v": not {f"blk.{last}.attn_{name}.weight" for name in ("v", "qkv")} & {*file.tensors},
        "hidden_size_per_layer_input": keys.pop("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": next(
            (file.shape(name)[0] for name in file.tensors if name == "per_layer_token_embd.weight"), 262144
        ),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": isinstance(neurons, list),
        "final_logit_softcapping": keys.pop("final_logit_softcapping", 0.0) or None,
        "enable_moe_block": "num_experts" in fields,
        "moe_intermediate_size": fields["intermediate_size"],
        "intermediate_size": narrow,
    }


def _shared_layers(file: GgufFile, keys: _Fields, layers: int) -> int:
    """How many of the last layers read the keys and values of others."""
    found = keys.pop("attention.shared_kv_layers", 0)
    if type(found) is not int or not 0 <= found < layers:
        raise _error(file, "attention.shared_kv_layers", f"fewer than {layers}", found)
    return found


def _gemma4_arrays(d: Decoder, names: Collection[str]) -> Table:
    layer, qkv = "blk.{n}.", "q" if d.shares_keys else "qk" if d.keys_as_values else "qkv"
    has_scale = "blk.0.layer_output_scale.weight" in names
    found: dict[str, tuple[SourceTensor, ...]] = {
        **_gemma3_attention(d, names),
        "attention/qkv": stored(*(f"{layer}attn_{part}.weight" for part in qkv)),
        "attention/v_norm": (),
        "ffn/block_scale": stored(f"{layer}layer_output_scale.weight") if has_scale else (),
        "ffn/embedding_gate": stored(f"{layer}inp_gate.weight"),
        "ffn/embedding_out": stored(f"{layer}proj.weight"),
        "ffn/embedding_norm/weight": stored(f"{layer}post_norm.weight"),
        **(cut_ffn(_parts(d, ""), d.whole_ff, d.d_ff, 1) if d.whole_ff < d.d_ff else {}),
    }
    if d.n_experts > 1:
        scale = SourceTensor(f"{layer}ffn_gate_inp.scale", factor=d.d_model**-0.5)
        arrays = {
            "beside_norm": "ffn_norm",
            "beside_out_norm": "post_ffw_norm_1",
            "experts_out_norm": "post_ffw_norm_2",
        }
        arrays |= {"norm/weight": "pre_ffw_norm_2"}
        arrays |= {"beside_first": "ffn_gate", "beside_up": "ffn_up", "beside_down": "ffn_down"}
        found |= {f"ffn/{array}": stored(f"{layer}{name}.weight") for array, name in arrays.items()}
        found |= {"ffn/router_norm": (scale,), "ffn/expert_scale": stored(f"{layer}ffn_down_exps.scale")}
    return found


def _phi3(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """The window is the family's, though llama.cpp passes it over. LongRoPE's divisors are tensors."""
    parameters, short = fields["rope_parameters"], LONG_FACTORS[0]
    if parameters["rope_type"] == "longrope" or short in file.tensors:
        rotated = file.metadata.get(f"{file.architecture}.rope.dimension_count", fields.get("head_dim"))
        length = file.metadata.get(f"{file.architecture}.rope.scaling.original_context_length")
        if short not in file.tensors or type(rotated) is not int:
            raise _error(file, "rope.scaling.type", f"a tensor {short} beside longrope", parameters["rope_type"])
        parameters |= {"rope_type": "longrope", "short_factor": rope_divisors(file, short, rotated // 2)}
        fields["original_max_position_embeddings"] = length
        parameters["attention_factor"] = keys.pop("rope.scaling.attn_factor", 1.0)
    return {"sliding_window": keys.pop("attention.sliding_window", 0) or None}


def _states(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """Layers with a state; those that draft are behind the others. Sections of angles are those of pictures."""
    layers = fields["num_hidden_layers"] - keys.pop("nextn_predict_layers", 0)
    every, heads = keys.pop("full_attention_interval", 4), fields["linear_num_value_heads"]
    marks = keys.pop("attention.recurrent_layers", None)
    keys.pop("rope.dimension_sections", None)
    if not type(every) is type(heads) is type(layers) is int or min(every, heads, layers) < 1:
        raise _error(file, "full_attention_interval", "a number of layers, and of heads", every)
    if marks is None:
        marks = [(n + 1) % every != 0 for n in range(layers)]
    found = {
        "num_hidden_layers": layers,
        "layer_types": [qwen3_next.KINDS[not mark] for mark in marks[:layers]],
        "linear_value_head_dim": fields.pop("inner_size") // heads,
        "partial_rotary_factor": 1.0,
    }
    shared = keys.pop("expert_shared_feed_forward_length", None)
    return found if shared is None else {**found, "shared_expert_intermediate_size": shared}


def _states_attention(d: Decoder, names: Collection[str]) -> Table:
    layer, width = "blk.{n}.", d.head_dim
    router = {"ffn/router": stored(f"{layer}ffn_gate_inp.weight", f"{layer}ffn_gate_inp_shexp.weight")}
    found: Table = router if d.shared_gate else {}
    if not d.recurs:
        q, gate = qwen3_next.parts_of_groups(f"{layer}attn_q.weight", d.n_heads, width, width)
        return {
            **found,
            "attention/qkv": (q, *stored(*(f"{layer}attn_{part}.weight" for part in "kv"))),
            "attention/gate": (gate,),
        }
    shared = d.state_heads // d.state_key_heads
    gates = stored(f"{layer}ssm_beta.weight", f"{layer}ssm_alpha.weight")
    if any(name.endswith(".ssm_ba.weight") for name in names):
        gates = qwen3_next.parts_of_groups(f"{layer}ssm_ba.weight", d.state_key_heads, shared, shared)
    conv = FusedRows(1, d.qkv_width, 0, d.qkv_width, transposed=True)
    return {
        **found,
        "attention/qkv": stored(f"{layer}attn_qkv.weight"),
        "attention/gate": stored(f"{layer}attn_gate.weight"),
        "attention/gates": gates,
        "attention/conv": (SourceTensor(f"{layer}ssm_conv1d.weight", rows=conv),),
        "attention/decay": (SourceTensor(f"{layer}ssm_a", function="negative"),),
        "attention/decay_bias": stored(f"{layer}ssm_dt.bias"),
        "attention/state_norm": stored(f"{layer}ssm_norm.weight"),
        "attention/out": stored(f"{layer}ssm_out.weight"),
    }


_OF_MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "inner_size",
}


def _mamba(d: Decoder, _names: Collection[str]) -> Table:
    if not d.recurs:
        return {}
    layer = "blk.{n}.ssm_"
    return {
        **mamba.of_tensors(d, f"{layer}in.weight", f"{layer}conv1d.weight"),
        "attention/conv_bias": stored(f"{layer}conv1d.bias"),
        "attention/decay": (SourceTensor(f"{layer}a", function="negative", stacked=d.state_heads),),
        "attention/decay_bias": stored(f"{layer}dt.bias"),
        "attention/skip": (SourceTensor(f"{layer}d", stacked=d.state_heads),),
        "attention/state_norm": (SourceTensor(f"{layer}norm.weight", stacked=d.state_key_heads),),
        "attention/out": stored(f"{layer}out.weight"),
    }


def _layer_kinds(file: GgufFile, fields: _Fields) -> list[str]:
    """The kind of each layer, by the tensors that it has."""
    kinds = {"ssm_in": "mamba", "attn_output": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    layers = range(fields["num_hidden_layers"])
    return [next((k for t, k in kinds.items() if f"blk.{n}.{t}.weight" in file.tensors), "") for n in layers]


def _largest(value: object) -> object:
    """A number that a file has for each layer, 0 where the layer has none of the kind."""
    return max(value, default=0) if isinstance(value, list) else value


def _nemotron_h(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """The least step of Mamba-2 is in no file: the family's is taken."""
    keys.pop("expert_shared_count", None)
    latents = keys.pop("moe_latent_size", 0) or None
    inner, neurons = fields.pop("inner_size"), file.metadata[f"{file.architecture}.feed_forward_length"]
    return {
        "layers_block_type": _layer_kinds(file, fields),
        "num_key_value_heads": _largest(fields["num_key_value_heads"]),
        "mamba_head_dim": inner // fields["mamba_num_heads"],
        "moe_intermediate_size": fields["intermediate_size"],
        "intermediate_size": _largest(neurons),
        "moe_shared_expert_intermediate_size": keys.pop("expert_shared_feed_forward_length", 0),
        "moe_latent_size": latents,
        **_grouped_routing(keys),
    }


def _granite_hybrid(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    kinds, inner = _layer_kinds(file, fields), fields.pop("inner_size")
    shared = keys.pop("expert_shared_feed_forward_length", 0)
    rotated = keys.pop("rope.scaling.finetuned", True)
    if rotated:
        raise _error(file, "rope.scaling.finetuned", "false: attention without positions", rotated)
    found = {name: keys.pop(key, 0.0) for key, name in MULTIPLIERS.items()}
    return {
        "layer_types": [kind if kind == "mamba" else "attention" for kind in kinds],
        "num_key_value_heads": _largest(fields["num_key_value_heads"]),
        "mamba_expand": inner // fields["hidden_size"],
        "num_local_experts": fields.get("num_local_experts", 0),
        "shared_intermediate_size": shared or fields["intermediate_size"],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        **{name: value for name, value in found.items() if value},
        "attention_multiplier": found["attention_multiplier"] or None,
    }


def _lfm2(file: GgufFile, keys: _Fields, fields: _Fields) -> _Fields:
    """Layers without heads of keys have a convolution; the width of the others' FFN is that of the tensors."""
    layers, heads = fields["num_hidden_layers"], fields["num_key_value_heads"]
    heads = heads if isinstance(heads, list) else layers * [heads]
    if len(heads) != layers or len({*heads} - {0}) != 1:
        raise _error(file, "attention.head_count_kv", f"0 or one number for each of {layers} layers", heads)
    _take_gating(file, keys, (0, _SIGMOID))
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [lfm2.KINDS[n > 0] for n in heads],
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": keys.pop("leading_dense_block_count", 0),
    }


def _lfm2_attention(d: Decoder, _names: Collection[str]) -> Table:
    if not d.recurs:
        return {}
    block, conv = "blk.{n}.shortconv", FusedRows(1, d.qkv_width, 0, d.qkv_width, transposed=True)
    return {
        **lfm2.in_proj(f"{block}.in_proj.weight", d),
        "attention/conv": (SourceTensor(f"{block}.conv.weight", rows=conv),),
        "attention/out": stored(f"{block}.out_proj.weight"),
    }


_OF_LFM2: dict[str, Any] = {"fields": _lfm2, "attention": _lfm2_attention, "final_norm": "token_embd_norm"}


def _tiled(adapter: Adapter) -> Adapter:
    """The family as llama.cpp's converter writes it: heads with a state stand in another order."""

    def decoder(config: Config) -> Decoder:
        found = adapter.decoder(config)
        return replace(found, state_heads_tiled=found.state_heads > found.state_key_heads)

    return replace(adapter, decoder=decoder)


_WITH_STATES: dict[str, Any] = {
    "required": {
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.inner_size": "inner_size",
    },
    "fields": _states,
    "ffn_norm": "post_attention_norm",
    "attention": _states_attention,
    "partly_rotated": True,
}
_OF_EXPERT = {"intermediate_size": "moe_intermediate_size"}


def rope_divisors(file: GgufFile, name: str, count: int) -> list[float]:
    """The numbers by which angles are divided. Raises CheckpointError for others than `count` positive ones."""
    tensor = file.tensors[name]
    data = tensor.data
    if tensor.tensor_type != Type.F32 or data.shape != (count,) or not np.all((data > 0) & (data < np.inf)):
        raise CheckpointError(
            f"{file.path}: {name}",
            expected=f"{count} positive numbers, F32",
            found=f"{tensor.tensor_type.name} {data.shape}",
        )
    return [float(number) for number in data]


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


_NEMOTRON_H = OfFamily(
    adapter=nemotron_h.NEMOTRON_H,
    norm_key="attention.layer_norm_epsilon",
    required=_OF_MAMBA | {"ssm.time_step_rank": "mamba_num_heads", "ssm.state_size": "ssm_state_size"},
    fields=_nemotron_h,
    ffn_norm="attn_norm",
    attention=_mamba,
    unrotated=True,
    notices=(
        "the least step of Mamba-2 is that of the published configs, 0.001, below which llama.cpp lets steps fall",
    ),
)
OF_FAMILIES = {
    "gpt-oss": OfFamily(
        adapter=gpt_oss.ADAPTER,
        ffn_norm="post_attention_norm",
        required={"attention.sliding_window": "sliding_window"},
        notices=(
            "the ends of YaRN's ramp are rounded, as llama.cpp rounds them; the published config of gpt-oss keeps them",
        ),
    ),
    "glm4moe": OfFamily(
        adapter=glm.ADAPTER,
        required={"expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts"},
        fields=_glm,
        ffn_norm="post_attention_norm",
        partly_rotated=True,
    ),
    "deepseek2": OfFamily(
        adapter=replace(
            deepseek.DEEPSEEK_V3,
            family="deepseek2",
            decoder=_deepseek_decoder,
            read_keys=deepseek.DEEPSEEK_V3.read_keys | {"scoring_func", "norm_topk_prob"},
        ),
        required={
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.key_length": "key_length",
            "attention.value_length": "value_length",
            "rope.dimension_count": "qk_rope_head_dim",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "n_shared_experts",
        },
        fields=_deepseek,
        attention=_deepseek_attention,
    ),
    "gemma3": OfFamily(adapter=gemma.ADAPTER, fields=_gemma3, attention=_gemma3_attention),
    "gemma4": OfFamily(
        adapter=gemma4.GEMMA4,
        required={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "marks",
            "attention.key_length_swa": "windowed_width",
            "rope.freq_base_swa": "windowed_base",
        },
        names={"num_local_experts": "num_experts", "num_experts_per_tok": "top_k_experts"},
        fields=_gemma4,
        attention=_gemma4_arrays,
    ),
    "lfm2": OfFamily(
        adapter=replace(lfm2.LFM2, read_keys=lfm2.LFM2.read_keys | {"num_dense_layers"}),
        required={"shortconv.l_cache": "conv_L_cache"},
        names=lfm2.NAMES,
        **_OF_LFM2,
    ),
    "lfm2moe": OfFamily(
        adapter=lfm2.LFM2_MOE,
        required={"shortconv.l_cache": "conv_L_cache", "expert_feed_forward_length": "moe_intermediate_size"},
        names=lfm2.NAMES,
        **_OF_LFM2,
    ),
    "mistral3": OfFamily(
        adapter=replace(mistral.MINISTRAL3, decoder=_mistral3_decoder), fields=_mistral3, permuted=True
    ),
    "phi3": OfFamily(adapter=phi.PHI3, fields=_phi3, partly_rotated=True),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "granitehybrid": OfFamily(
        adapter=granite.GRANITEMOEHYBRID,
        required=_OF_MAMBA | {"ssm.time_step_rank": "mamba_n_heads", "ssm.state_size": "mamba_d_state"},
        fields=_granite_hybrid,
        attention=_mamba,
        unrotated=True,
        permuted=True,
    ),
    "qwen3next": OfFamily(adapter=qwen3_next.QWEN3_NEXT, names=_OF_EXPERT, **_WITH_STATES),
    "qwen35": OfFamily(adapter=_tiled(qwen3_next.QWEN3_5), **_WITH_STATES),
    "qwen35moe": OfFamily(adapter=_tiled(qwen3_next.QWEN3_5_MOE), names=_OF_EXPERT, **_WITH_STATES),
    "smallthinker": OfFamily(adapter=smallthinker.ADAPTER, fields=_smallthinker, names=smallthinker.NAMES),
}
"""The architectures, by llama.cpp's names."""
WITH_WINDOWS = {"olmo2": OfFamily(adapter=olmo.OLMO3, fields=_olmo3, ffn_norm="post_ffw_norm")}
"""Those of files with a window, where such a file is another family's."""
