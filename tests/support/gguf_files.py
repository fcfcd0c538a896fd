"""GGUF files as llama.cpp's converter writes them from a Hugging Face checkpoint, for tests."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from support import gguf_mixtures
from support.hf import edit_tensors, randomised, save

TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8": Type.Q8_0, "q4": Type.Q4_0}
TYPES |= {"q4_1": Type.Q4_1, "q5": Type.Q5_0}
_NAMES = {"lm_head": "output", "block_sparse_moe.gate": "ffn_gate_inp"} | {
    f"block_sparse_moe.experts.{theirs}": f"ffn_{own}_exps"
    for theirs, own in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
}
"""Names that llama.cpp's map of names does not have, relative to a layer."""
_ARCHITECTURES = {
    "mixtral": "llama",
    "phi": "phi2",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "gemma3_text": "gemma3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
_CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
_PERMUTED = ("arcee", "granite", "granitemoe", "llama", "mixtral", "smollm3")
_ROUTERS = ("block_sparse_moe.gate.", "block_sparse_moe.router.", "mlp.gate.weight", "ffn_gate_inp")
_ROUTERS += ("mlp.router.", "primary_router.")
# Rows of whole blocks of 32; heads that together are wider than the model.
LLAMA = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 40,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
FALCON = {
    **dict.fromkeys(("head_dim", "rms_norm_eps", "num_key_value_heads", "intermediate_size")),
    "ffn_hidden_size": 96,
    "activation": "gelu_pytorch_tanh",  # llama.cpp's only GELU
    "alibi": False,
    "bias": False,
    "parallel_attn": True,
}
GPT2 = {
    **dict.fromkeys(LLAMA),
    "vocab_size": 307,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "n_inner": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLMOE = {"hidden_size": 96, "head_dim": None, "num_key_value_heads": 4, "num_experts": 5, "num_experts_per_tok": 2}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {"hidden_size": 96, "head_dim": None, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", OLMOE | {"moe_intermediate_size": 64, "norm_topk_prob": True, "head_dim": 24}),
    "arcee": ("Arcee", {}),
    "olmo2": ("Olmo2", {"hidden_size": 96, "head_dim": None, "rope_parameters": YARN}),
    "olmoe": ("Olmoe", OLMOE),
    "granite": ("Granite", GRANITE | {"tie_word_embeddings": True}),
    "granitemoe": ("GraniteMoe", GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    **gguf_mixtures.CASES,
    "falcon-7b": ("Falcon", FALCON | {"new_decoder_architecture": False}),
    "falcon-40b": ("Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt2": ("GPT2", GPT2),
    "nemotron": ("Nemotron", {"head_dim": 16, "partial_rotary_factor": 0.5, "norm_eps": 1e-5, "rms_norm_eps": None}),
    "phi": (
        "Phi",
        {"head_dim": None, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5}
        | {"rms_norm_eps": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
}


def rounded_checkpoint(folder: Path, case: str, kind: str, **overrides: Any) -> Any:
    """Save a random model of a case whose weights a GGUF file of this kind holds exactly; returns the model."""
    name, fields = CASES[case]
    if name == "SmallThinker":
        return gguf_mixtures.rounded_smallthinker(folder, fields | overrides, lambda n, values: _held(n, values, kind))
    config = getattr(tf, f"{name}Config")(
        **{k: v for k, v in {**LLAMA, **fields, **overrides}.items() if v is not None}
    )
    model = randomised(getattr(tf, _CLASSES.get(name, f"{name}ForCausalLM"))(config))
    model.config._experts_implementation = "eager"
    save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    edit_tensors(
        folder, **{n.replace(".", "__"): torch.from_numpy(_held(n, t.numpy(), kind)) for n, t in tensors.items()}
    )
    loaded = type(model).from_pretrained(folder)
    loaded.config._experts_implementation = "eager"
    return loaded.eval()


def write_gguf(folder: Path, path: Path, kind: str, **changes: Any) -> None:
    """Convert a checkpoint folder. `changes` are metadata (`ARCH` in a key stands for the architecture, None takes it
    out), and tensors under `tensors`: array, raw type."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Any] = {n: (a, _kind(n, a, kind)) for n, a in _tensors(folder, config).items()}
    tensors |= changes.pop("tensors", {})
    metadata = _metadata(config) | _vocabulary(folder, config["vocab_size"]) | changes
    arch = metadata.pop("general.architecture", _ARCHITECTURES.get(config["model_type"], config["model_type"]))
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key.replace("ARCH", arch), value)
    for name, stored in tensors.items():
        if stored is not None:
            array, raw = stored
            writer.add_tensor(name, array if array.dtype == np.uint8 else gguf.quantize(array, raw), raw_dtype=raw)
    _close(writer)


def write_powerinfer(whole: Path, path: Path) -> None:
    """The same model as by PowerInfer's converter: down transposed, a predictor beside each FFN, a magic of its own."""
    found = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(path, "")
    _copy_metadata(found, writer)
    writer.add_float32("powerinfer.sparse_threshold", 0.0)
    for tensor in found.tensors:
        name, values = tensor.name, gguf.dequantize(np.array(tensor.data), tensor.tensor_type)
        if "ffn_down" in name:
            neurons, width = values.shape[::-1]
            writer.add_tensor(name.replace("ffn_down", "fc1"), np.ones((7, width), np.float16))
            writer.add_tensor(name.replace("ffn_down", "fc2"), np.ones((neurons, 7), np.float16))
            name, values = name.replace("ffn_down", "ffn_down_t"), np.ascontiguousarray(values.T)
        writer.add_tensor(name, gguf.quantize(values, tensor.tensor_type), raw_dtype=tensor.tensor_type)
    _close(writer)
    with path.open("r+b") as file:
        file.write(b"PWRI")


def write_parts(path: Path, folder: Path, tensors_a_part: int) -> list[Path]:
    """Split a file as `llama-gguf-split` does: all metadata are in the first part, which has its own `split.*` keys."""
    whole = gguf.GGUFReader(path)
    groups = [whole.tensors[n : n + tensors_a_part] for n in range(0, len(whole.tensors), tensors_a_part)]
    paths = [folder / f"{path.stem}-{n:05}-of-{len(groups):05}.gguf" for n in range(1, len(groups) + 1)]
    for number, (part, group) in enumerate(zip(paths, groups, strict=True)):
        writer = gguf.GGUFWriter(part, "")
        writer.kv_data[0].clear()
        if number == 0:
            _copy_metadata(whole, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(groups))
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for tensor in group:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        _close(writer)
    return paths


_SCALES: dict[Type, dict[int, float]] = {
    **{t: {0: 1.0} for t in (Type.Q5_0, Type.IQ4_NL, Type.IQ4_XS, Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S)},
    **{t: {0: 1.0} for t in (Type.IQ3_XXS, Type.IQ3_S)},
    **{t: {0: 1.0} for t in (Type.Q4_0, Type.Q8_0)},
    Type.Q4_1: {0: 1.0, 2: -7.5},
    Type.Q5_1: {0: 1.0, 2: -15.5},
    Type.Q2_K: {80: 1.0, 82: 1.5},
    Type.Q3_K: {108: 1.0},
    Type.Q4_K: {0: 1.0, 2: 7.5},
    Type.Q5_K: {0: 1.0, 2: 15.5},
    Type.Q6_K: {208: 1.0},
}
"""Place in a block of each binary16 scale → its size relative to the first, for values whose mean is about 0."""


def random_blocks(kind: Type, rows: int, columns: int, seed: int) -> np.ndarray:
    """Bytes of random blocks of a type, of values with the deviation of an initialised linear layer."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    if kind == Type.Q8_0:  # quantisers write no −128
        data[data == 128] = 129
    _set_scales(data, kind, np.ones(data.shape[:2]))
    deviation = gguf.dequantize(data.reshape(rows, -1), kind).std() * np.sqrt(columns)
    _set_scales(data, kind, rng.uniform(0.5, 1.5, data.shape[:2]) / deviation)
    return data.reshape(rows, -1)


def _set_scales(data: np.ndarray, kind: Type, scale: np.ndarray) -> None:
    if kind == Type.MXFP4:
        data[..., 0] = 127 + np.round(np.log2(scale)).astype(np.int64)
        return
    if kind == Type.NVFP4:
        data[..., :4] = gguf.quants.NVFP4.fp32_to_ue4m3(scale)[..., None]
        return
    if kind == Type.IQ1_M:  # four bits of it in each of the four last words
        words = data[..., 48:].view("<u2")
        bits = scale.astype("<f2").view("<u2")[..., None] >> np.arange(0, 16, 4)
        words[:] = (words & 0x0FFF) | ((bits & 0xF) << 12)
        return
    for place, ratio in _SCALES[kind].items():
        data[..., place : place + 2] = (scale * ratio).astype("<f2")[..., None].view(np.uint8)


def write_dequantised(quantised: Path, path: Path) -> None:
    """The same model with every tensor in F32."""
    found = gguf.GGUFReader(quantised)
    writer = gguf.GGUFWriter(path, "")
    _copy_metadata(found, writer)
    for tensor in found.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(np.array(tensor.data), tensor.tensor_type), raw_dtype=Type.F32)
    _close(writer)


def write_byte_tokenizer(folder: Path) -> None:
    """Byte-level BPE in tokenizer.json, as Qwen's but for its way to split; nothing before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["once upon a time there was a neuron, and it did not fire"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def _copy_metadata(file: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0].clear()
    for key, field in file.fields.items():
        if not key.startswith("GGUF."):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _held(name: str, values: np.ndarray, kind: str) -> np.ndarray:
    raw = _kind(name, values, kind)
    return np.ascontiguousarray(gguf.dequantize(gguf.quantize(values, raw), raw), np.float32)


def _kind(name: str, array: np.ndarray, kind: str) -> Type:
    small = array.ndim < 2 or name.endswith("bias") or any(router in name for router in _ROUTERS)
    return Type.F32 if small else TYPES[kind]


def _tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    stacked: dict[str, list[np.ndarray]] = {}
    loaded = _told_apart({n: t.numpy() for n, t in load_file(folder / "model.safetensors").items()})
    loaded = gguf_mixtures.heads_apart(loaded, config)
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    arch = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    names = gguf.get_tensor_name_map(known[arch], len(loaded))
    for name in sorted(loaded, key=lambda n: [int(p) if p.isdigit() else 0 for p in n.split(".")]):
        module, part = re.sub(r"experts\.\d+", "experts", name).rsplit(".", 1)
        layer = re.match(r"model\.layers\.(\d+)\.", module)
        own = _NAMES.get(module[layer.end() :] if layer else module)
        full = names.get_name(module) if own is None else f"blk.{layer[1]}.{own}" if layer else own
        assert full is not None, name
        stacked.setdefault(f"{full}.{part}", []).append(_as_llama_cpp_has_it(loaded[name], name, config))
    tensors = {n: np.stack(a) if "_exps." in n else a[0] for n, a in stacked.items()}
    return {**tensors, **_rope_divisors(config)}


def _told_apart(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with Mixtral's names and one tensor for each of an expert's matrices, where GraniteMoE joins them."""
    found: dict[str, np.ndarray] = {}
    for name, values in gguf_mixtures.told_apart(tensors).items():
        block = name.partition("block_sparse_moe.")[0] + "block_sparse_moe."
        if name.endswith("input_linear.weight"):
            for e, (gate, up) in enumerate(np.split(v, 2) for v in values):
                found |= {f"{block}experts.{e}.w1.weight": gate, f"{block}experts.{e}.w3.weight": up}
        elif name.endswith("output_linear.weight"):
            found |= {f"{block}experts.{e}.w2.weight": down for e, down in enumerate(values)}
        else:
            found[name.replace("router.layer", "gate")] = values
    return found


def _as_llama_cpp_has_it(values: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Permuted for the rotation (Llama), queries before keys (Falcon), transposed (GPT-2), plus 1 (Nemotron)."""
    family, module = config["model_type"], name.split(".")[-2]
    turned = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}.get(module)
    if turned and family in _PERMUTED:
        return values.reshape(turned, 2, len(values) // turned // 2, -1).swapaxes(1, 2).reshape(values.shape)
    if module == "query_key_value":
        groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
        width = config["hidden_size"] // config["num_attention_heads"]
        parts = values.reshape(groups, -1, width, values.shape[-1])
        queries, keys, values_ = (p.reshape(-1, values.shape[-1]) for p in np.split(parts, [-2, -1], axis=1))
        return np.concatenate([queries, keys, values_])
    if family == "gpt2" and module in ("c_attn", "c_proj", "c_fc") and name.endswith(".weight"):
        return np.ascontiguousarray(values.T)
    return values + 1 if family in ("nemotron", "gemma3_text") and name.endswith("norm.weight") else values


def _rope_divisors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        names = {"short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}
        return {name: np.array(rope[f"{kind}_factor"], np.float32) for kind, name in names.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    width, length = config["head_dim"], rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    rope, width = config.get("rope_parameters", {}), config.get("head_dim")
    rope = rope.get("full_attention", rope)
    heads = first("num_attention_heads", "n_head")
    rotated = int((width or first("hidden_size", "n_embd") // heads) * rope.get("partial_rotary_factor", 1))
    epsilon, norm = first("rms_norm_eps"), "layer_norm_rms"
    if epsilon is None:
        epsilon, norm = first("layer_norm_epsilon", "layer_norm_eps", "norm_eps"), "layer_norm"
    kv_heads = config.get("num_kv_heads") if config.get("new_decoder_architecture") else 1
    found = {
        "general.type": "model",
        "general.name": "random",
        "ARCH.vocab_size": config["vocab_size"],
        "ARCH.context_length": first("max_position_embeddings", "n_positions"),
        "ARCH.embedding_length": first("hidden_size", "n_embd"),
        "ARCH.block_count": first("num_hidden_layers", "n_layer"),
        "ARCH.feed_forward_length": first("intermediate_size", "ffn_hidden_size", "n_inner"),
        "ARCH.attention.head_count": heads,
        "ARCH.attention.head_count_kv": kv_heads if config["model_type"] == "falcon" else first("num_key_value_heads"),
        f"ARCH.attention.{norm}_epsilon": float(epsilon),
        "ARCH.attention.key_length": width,
        "ARCH.attention.value_length": width,
        "ARCH.rope.dimension_count": rotated if config["model_type"] not in ("gpt2", "qwen2", "qwen3") else None,
        "ARCH.rope.freq_base": float(rope["rope_theta"]) if rope else None,
        "ARCH.expert_count": first("num_local_experts", "num_experts"),
        "ARCH.expert_used_count": config.get("num_experts_per_tok"),
        "ARCH.expert_feed_forward_length": config.get("moe_intermediate_size"),
        "ARCH.attention.scale": config.get("attention_multiplier"),
        "ARCH.embedding_scale": config.get("embedding_multiplier"),
        "ARCH.residual_scale": config.get("residual_multiplier"),
        "ARCH.logit_scale": config.get("logits_scaling"),
    }
    found |= gguf_mixtures.metadata(config)
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"ARCH.rope.scaling.type": rope["rope_type"], "ARCH.rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        found["ARCH.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _vocabulary(folder: Path, vocab_size: int) -> dict[str, Any]:
    if not (folder / "tokenizer.json").is_file():
        return {"tokenizer.ggml.model": "none"}
    state = json.loads((folder / "tokenizer.json").read_text())
    names = [token for token, _ in sorted(state["model"]["vocab"].items(), key=lambda item: item[1])]
    names += [f"[PAD{n}]" for n in range(len(names), vocab_size)]
    special = {token["content"] for token in state["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3 if name in special else 1 for name in names],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
