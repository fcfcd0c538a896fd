"""Nemotron-H, Nemotron Nano v2 and Nemotron 3: a layer is one mixer or one FFN, with its norm.

Mixers are Mamba-2 and attention without positions. FFNs are plain, with squared ReLU: dense ones, or experts chosen as
GLM's are, beside a shared one of its own width. It stands behind the others, cut into experts; beside those of latents,
which are narrower, it stays whole.
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import glm, llama, mamba, mixtral
from pi_compile.checkpoint.families.adapter import SourceTensor, Table, cut_ffn, stored
from pi_compile.checkpoint.families.fields import experts, usual_decoder
from pi_runtime.artifact.decoder import Decoder

_EXPERTS, _DENSE = "moe", "mlp"
_KINDS = mamba.KINDS | {_EXPERTS: _EXPERTS, _DENSE: _DENSE}
_SIGNS = {"M": mamba.STATES, "*": mamba.ATTENTION, "E": _EXPERTS, "-": _DENSE}
"""Kinds of layers in `hybrid_override_pattern`, which older configs have."""
_NAMES = {"hidden_act": "mlp_hidden_act", "rms_norm_eps": "layer_norm_epsilon"}
_SIZES = {
    "state_heads": (("mamba_num_heads",), 128),
    "state_value_dim": (("mamba_head_dim",), 64),
    "state_key_heads": (("mamba_n_groups", "n_groups"), 8),
    "state_key_dim": (("ssm_state_size",), 128),
    "state_columns": (("mamba_d_conv", "conv_kernel"), 4),
}
"""The decoder's field → the config's keys, the older one first, and what stands for a missing one."""


def _key(config: Config, *names: str) -> str:
    """The first of some keys that a config has, or the last."""
    return next((name for name in names if name in config.fields), names[-1])


def _layers(config: Config) -> list[str]:
    key, allowed = _key(config, "layers_block_type", "layer_types", "hybrid_override_pattern"), _KINDS
    named = config.get(key)
    if key == "hybrid_override_pattern":
        named, allowed = [*named] if isinstance(named, str) else named, _SIGNS
    found = mamba.kinds(config, key, named, allowed)
    if not {*found} & {_EXPERTS, _DENSE}:
        raise config.error(key, named, expected="any layer with an FFN")
    return found


def _experts(config: Config, kinds: list[str]) -> dict[str, Any]:
    """The fields of FFNs, and the neurons of one, or of an expert."""
    dense = tuple(n for n, kind in enumerate(kinds) if kind == _DENSE)
    if _EXPERTS not in kinds:
        return {"d_ff": config.size("intermediate_size", 21504)}
    neurons, together = (config.size(f"moe_{part}intermediate_size", 7688) for part in ("", "shared_expert_"))
    latents = 0 if config.get("moe_latent_size") is None else config.size("moe_latent_size")
    if latents and (dense or latents > config.size("hidden_size")):
        expected = "null, or at most hidden_size beside layers whose FFNs all have experts"
        raise config.error("moe_latent_size", latents, expected=expected)
    whole = bool(latents or together % neurons)
    shared = 0 if whole else together // neurons
    names = {"num_local_experts": _key(config, "num_local_experts", "n_routed_experts")}
    routed = experts(config.renamed(names), "num_local_experts", 8, per_token=2)
    return {
        "d_ff": neurons,
        "expert_width": latents,
        "beside_ff": together if whole else 0,
        "experts_shared": shared,
        **{name: number + shared for name, number in routed.items()},
        "router_scale": config.number("routed_scaling_factor", 1.0),
        **glm.by_sigmoid(config),
        **({"dense_layers": dense, "dense_ff": config.size("intermediate_size", 21504)} if dense else {}),
    }


def _decoder(config: Config) -> Decoder:
    kinds = _layers(config)
    sizes: dict[str, Any] = {
        field: config.size(_key(config, *names), default) for field, (names, default) in _SIZES.items()
    }
    sizes["state_least_step"] = config.number(_key(config, "mamba_dt_min", "time_step_min"), 0.001)
    found = usual_decoder(
        config.with_fields({"intermediate_size": 1, **config.fields, "num_hidden_layers": len(kinds)}),
        "nemotron_h",
        names=_NAMES,
        context=4096,
        n_kv_heads=8,
        head_width=128,
        hidden_act="relu2",
        norm_eps=1e-5,
        theta=None,
        positions="none",
        ffn="plain",
        mixer_only_layers=tuple(n for n, kind in enumerate(kinds) if kind in mamba.KINDS),
        ffn_only_layers=tuple(n for n, kind in enumerate(kinds) if kind not in mamba.KINDS),
        **mamba.recurrence(kinds, **sizes),
        **_experts(config, kinds),
    )
    glm.check(config, found)
    config.check_derived("attention_head_dim", found.head_dim, "head_dim, or its default")
    mamba.check_groups(config, _key(config, "mamba_n_groups", "n_groups"), found)
    return found


def _layer(d: Decoder, *, stacked: bool = False) -> Table:
    """A layer's mixer or its FFN; experts are stored apart, or `stacked` in tensors of all."""
    block, norm = "layers.{n}.mixer", stored("layers.{n}.norm.weight")
    if d.has_ffn:
        return {"ffn/norm/weight": norm, **_ffn(d, block, stacked=stacked)}
    if d.recurs:
        return {"attention/norm/weight": norm, **mamba.mixer(d, block)}
    return {
        "attention/norm/weight": norm,
        "attention/qkv": stored(*(f"{block}.{part}_proj.weight" for part in "qkv")),
        "attention/out": stored(f"{block}.o_proj.weight"),
    }


def _ffn(d: Decoder, block: str, *, stacked: bool) -> Table:
    if d.n_experts == 1:
        down = SourceTensor(f"{block}.down_proj.weight", transposed=True)
        return {"ffn/first": stored(f"{block}.up_proj.weight"), "ffn/rest": (down,)}
    if d.experts_per_token == d.experts_shared:
        return cut_ffn(_names(block), d.dense_ff, d.d_ff, d.n_experts)
    every, each = f"{block}.experts", range(d.experts_routed)

    def routed(part: str, *, turned: bool) -> tuple[SourceTensor, ...]:
        if stacked:
            whole = SourceTensor(f"{every}.{part}_proj", turned, stacked=len(each))
            return tuple(replace(whole, item=e) for e in each)
        return tuple(SourceTensor(f"{every}.{e}.{part}_proj.weight", turned) for e in each)

    names, always = _names(f"{block}.shared_experts"), dict[str, tuple[SourceTensor, ...]]()
    if d.experts_shared:
        always = cut_ffn(names, d.experts_shared * d.d_ff, d.d_ff, d.experts_shared)
    return {
        **dict(zip(("ffn/beside_first", "ffn/beside_down"), map(stored, names), strict=True)),
        "ffn/experts_in": stored(f"{block}.fc1_latent_proj.weight"),
        "ffn/experts_out": stored(f"{block}.fc2_latent_proj.weight"),
        "ffn/router": stored(f"{block}.gate.weight"),
        "ffn/router_choice_bias": stored(f"{block}.gate.e_score_correction_bias"),
        "ffn/first": routed("up", turned=False) + always.get("ffn/first", ()),
        "ffn/rest": routed("down", turned=True) + always.get("ffn/rest", ()),
    }


def _names(block: str) -> list[str]:
    return [f"{block}.{part}_proj.weight" for part in ("up", "down")]


_KEYS = """
    layers_block_type layer_types hybrid_override_pattern mamba_num_heads mamba_head_dim mamba_n_groups n_groups
    ssm_state_size mamba_d_conv conv_kernel mamba_dt_min time_step_min mlp_hidden_act layer_norm_epsilon
    n_routed_experts num_local_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size
    routed_scaling_factor norm_topk_prob n_group topk_group n_shared_experts moe_latent_size
    attention_head_dim
"""
_TRAINING = """
    num_logits_to_keep use_mamba_kernels chunk_size expand mamba_expand mamba_chunk_size mamba_ssm_cache_dtype
    time_step_max time_step_floor time_step_limit mamba_dt_max mamba_dt_limit mamba_dt_init_floor
    rescale_prenorm_residual hidden_dropout moe_shared_expert_overlap num_nextn_predict_layers
    mtp_layers_block_type mtp_hybrid_override_pattern norm_eps rms_norm_eps time_step_rank
"""
"""Keys that change nothing here: of training, of kernels, of layers that draft, and what transformers does not read."""
NEMOTRON_H = replace(
    llama.ADAPTER,
    family="nemotron_h",
    architectures=("NemotronHForCausalLM", "NemotronHModel"),
    prefixes=("backbone.", "model.", ""),
    global_tensors={"embedding": stored("embeddings.weight"), "final_norm/weight": stored("norm_f.weight")},
    layer_tensors=_layer,
    other_layers=(lambda d: _layer(d, stacked=True),),
    read_keys=llama.KEYS | mixtral.TRAINING_KEYS | {*_KEYS.split(), *_TRAINING.split()},
    neutral_keys={
        **dict.fromkeys(("use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias"), (False,)),
        **dict.fromkeys(("use_conv_bias", "mamba_conv_bias"), (True,)),
        "mamba_hidden_act": ("silu", "swish"),
        "sliding_window": (None,),
    },
    unused_tensors={r"^mtp\.": "mtp.*: the layers that draft further tokens are left out"},
    decoder=_decoder,
)
