"""What `quantization_config` in a config says: how the linear layers of a checkpoint are stored.

It is read strictly. A key that is not known here, or a value that is not, might change the weights and is refused.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pi_compile.checkpoint.config import Config, is_neutral, short
from pi_compile.errors import CheckpointError

KEY = "quantization_config"
BITS = (4, 8)
"""Bits of an integer weight that are read."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Quantised layers that are stored alike."""

    targets: tuple[str, ...] = ()
    """Names of layers, `re:` and a pattern of their beginnings, or classes of layers."""
    permuted: bool = False
    """Whether the columns of a group need not lie side by side, so that the group of each must be stored."""
    has_zeros: bool = False
    """Whether zero points must be stored where a layer may lack them."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the quantised layers of a checkpoint are stored."""

    method: str
    """gptq, awq, compressed-tensors, mxfp4, bitnet or bitnet online."""
    bits: int = 0
    """Of a weight; 0 where each layer's tensors say it."""
    stored_zero: int = 0
    """What is added to a stored zero point: GPTQ's first form stores one less."""
    divides: bool = False
    """Whether integers are divided by their scale."""
    layers: tuple[Layers, ...] = (Layers(),)
    """All layers are the first's unless another names them."""
    notices: tuple[str, ...] = ()
    """Lines for the user."""

    def of(self, name: str) -> "Scheme":
        """The scheme of one layer alone: a name counts before a pattern, and a pattern before a class."""
        patterns = [(layers, target) for layers in self.layers for target in layers.targets]
        named = [layers for layers, target in patterns if target == name]
        alike = [layers for layers, t in patterns if t.startswith("re:") and re.match(t.removeprefix("re:"), name)]
        of_class = [layers for layers, target in patterns if not target.startswith("re:") and "." not in target]
        return replace(self, layers=(*named, *alike, *of_class, *self.layers)[:1])

    @property
    def name(self) -> str:
        """The method as messages name it."""
        return f"{self.method}, {self.bits} bits" if self.bits else self.method


def read_scheme(config: Config) -> Scheme | None:
    """The scheme of a config; None where its weights are not quantised.

    Raises CheckpointError for a method, and for anything in it, that is not read.
    """
    fields = config.get(KEY)
    if fields is None or fields is False:
        return None
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    if not isinstance(method, str) or method not in _READERS:
        raise _refused(config, "quant_method", method, f"one of {', '.join(_READERS)}")
    return _READERS[method](config, fields)


def _gptq(config: Config, fields: Mapping[str, Any]) -> Scheme:
    _check_keys(config, fields, _PACKED)
    bits = _one_of(config, fields, "bits", BITS)
    form = _form(config, fields, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    permuted = _one_of(config, fields, "desc_act", (False, True), missing=False)
    return Scheme(method="gptq", bits=bits, stored_zero=form == "gptq", layers=(Layers(permuted=permuted),))


def _awq(config: Config, fields: Mapping[str, Any]) -> Scheme:
    _check_keys(config, fields, _PACKED | {"desc_act": (False,)})  # no group of each column is stored
    bits = _one_of(config, fields, "bits", (4,), missing=fields.get("w_bit"))
    _form(config, fields, ("version", "checkpoint_format", "format"), ("gemm",))
    return Scheme(method="awq", bits=bits)


def _compressed_tensors(config: Config, fields: Mapping[str, Any]) -> Scheme:
    _check_keys(config, fields, _COMPRESSED)
    _one_of(config, fields, "format", _FORMATS)
    sparsity = fields.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise _refused(config, "sparsity_config", sparsity, "none, or the format 'dense'")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused(config, "config_groups", groups, "at least one group of layers")
    rounded, layers = False, []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _refused(config, f"config_groups {name} weights", weights, "how its weights are quantised")
        _check_keys(config, group, _GROUP)
        _check_keys(config, weights, _WEIGHTS)
        _one_of(config, weights, "num_bits", BITS)
        _one_of(config, weights, "strategy", ("tensor", "channel", "group"))
        symmetric = _one_of(config, weights, "symmetric", (True, False), missing=True)
        order = repr(weights.get("actorder"))
        if order not in _ORDERS:
            raise _refused(config, "actorder", weights["actorder"], " or ".join(_ORDERS))
        targets = _targets(config, group)
        layers.append(Layers(targets=targets, permuted=_ORDERS[order], has_zeros=not symmetric))
        rounded |= bool(group.get("input_activations") or group.get("output_activations"))
    line = "config.json: activations are quantised too where the checkpoint was made; here they are not rounded to it"
    return Scheme(method="compressed-tensors", layers=tuple(layers), notices=(line,) if rounded else ())


def _targets(config: Config, group: Mapping[str, Any]) -> tuple[str, ...]:
    targets = group.get("targets", [])
    try:
        for target in targets:
            re.compile(target)
    except (TypeError, re.error):
        targets = None
    if not isinstance(targets, list):
        raise _refused(config, "targets", group["targets"], "names, patterns and classes of layers")
    return tuple(targets)


def _mxfp4(config: Config, fields: Mapping[str, Any]) -> Scheme:
    _check_keys(config, fields, _MXFP4)
    return Scheme(method="mxfp4", bits=4)


def _bitnet(config: Config, fields: Mapping[str, Any]) -> Scheme:
    _check_keys(config, fields, _BITNET)
    kind = _one_of(config, fields, "linear_class", ("bitlinear", "autobitlinear"), missing="bitlinear")
    mode = _one_of(config, fields, "quantization_mode", ("offline", "online"), missing="offline")
    is_online = kind == "autobitlinear" and mode == "online"
    kept = fields.get("modules_to_not_convert") or []
    if is_online and kept != ["lm_head"] * len(kept):
        raise _refused(config, "modules_to_not_convert", kept, "none but lm_head: all linear layers are rounded alike")
    line = "config.json: inputs of linear layers are rounded to 8 bits too, each token's by its largest one;"
    return Scheme(
        method="bitnet online" if is_online else "bitnet",
        divides=kind == "bitlinear",
        notices=(f"{line} here as the format of weights says: in block formats by 32 columns, else not",),
    )


_READERS: Mapping[str, Callable[[Config, Mapping[str, Any]], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "bitnet": _bitnet,
}

_ORDERS = dict.fromkeys(("None", "False", "'weight'", "'static'"), False)
_ORDERS |= dict.fromkeys(("True", "'group'", "'dynamic'"), True)
"""How columns were ordered for compressed-tensors → whether those of a group need not lie side by side."""

Keys = Mapping[str, tuple[Any, ...] | None]
"""Keys of an object → the values at which weights mean what they mean without; None for any value. Null always does."""


def _about(words: str) -> dict[str, tuple[Any, ...] | None]:
    """Keys that are read above, or that say how the integers were found and not what they mean."""
    return dict.fromkeys(words.split())


_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
# transformers writes GPTQ's keys for AWQ too.
_PACKED = _about("""
    quant_method bits w_bit group_size q_group_size sym zero_point desc_act checkpoint_format format version method
    lm_head pack_dtype meta damp_percent damp_auto_increment static_groups true_sequential mse act_group_aware hyb_act
    model_name_or_path model_file_base_name dataset tokenizer batch_size cache_block_outputs block_name_to_quantize
    module_name_preceding_first_block modules_in_block_to_quantize modules_to_not_convert model_seqlen pad_token_id
    use_cuda_fp16 max_input_length use_exllama exllama_config disable_exllama backend offload_to_disk do_fuse
    fuse_max_seq_len modules_to_fuse
""")
_PACKED |= {"is_marlin_format": (False,), "dynamic": ({}, False), "extension": ({}, False)}
_BITNET = _about("quant_method linear_class quantization_mode rms_norm_eps modules_to_not_convert")
_BITNET |= {"use_rms_norm": (False,)}
_MXFP4 = _about("quant_method modules_to_not_convert dequantize")
_COMPRESSED = _about("""
    quant_method format config_groups ignore sparsity_config quantization_status global_compression_ratio version
    run_compressed
""")
_COMPRESSED |= {"kv_cache_scheme": ({},), "transform_config": ({},)}
_GROUP = _about("targets weights input_activations output_activations") | {"format": _FORMATS}
_WEIGHTS = _about("""
    num_bits symmetric group_size strategy actorder observer observer_kwargs scale_dtype zp_dtype
""")
_WEIGHTS |= {"type": ("int",), "dynamic": (False,)}


def _check_keys(config: Config, fields: Mapping[str, Any], known: Keys) -> None:
    for key, value in sorted(fields.items()):
        neutral = known.get(key, ())
        if neutral is not None and not is_neutral(value, neutral):
            expected = " or ".join(map(repr, (*neutral, None))) if neutral else "keys whose meaning is known"
            raise _refused(config, key, value, expected)


def _form(config: Config, fields: Mapping[str, Any], names: tuple[str, ...], allowed: tuple[str, ...]) -> str:
    """The form of the tensors: by the first of some keys that is there, which the others must not contradict."""
    said = {name: fields[name] for name in names if fields.get(name) is not None}
    values = [value.lower() if isinstance(value, str) else value for value in said.values()]
    for name, value in zip(said, values, strict=True):
        if value not in allowed or value != values[0]:
            expected = " or ".join(map(repr, allowed))
            raise _refused(config, name, fields[name], f"{expected}, and the same in {', '.join(said)}")
    return values[0] if values else allowed[0]


def _one_of(
    config: Config, fields: Mapping[str, Any], key: str, allowed: tuple[Any, ...], *, missing: object = None
) -> Any:
    """The value of a key; `missing` where it is missing or null."""
    value = missing if fields.get(key) is None else fields[key]
    if type(value) is type(allowed[0]) and value in allowed:
        return value
    raise _refused(config, key, value, " or ".join(map(repr, allowed)))


def _refused(config: Config, key: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{config.path}: {KEY} would change the function, and this is not supported",
        expected=f"{key}: {expected}",
        found=f"{key} = {short(value)}",
        remedy="use another checkpoint of the model, such as the one that this one was made from",
    )
