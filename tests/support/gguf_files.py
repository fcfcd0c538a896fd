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

from support.hf import edit_tensors, randomised, save

TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8": Type.Q8_0, "q4": Type.Q4_0}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
}
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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {"hidden_size": 96, "head_dim": None, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
}


def rounded_checkpoint(folder: Path, case: str, kind: str, **overrides: Any) -> Any:
    """Save a random model of a case whose weights a GGUF file of this kind holds exactly; returns the model."""
    name, fields = CASES[case]
    config = getattr(tf, f"{name}Config")(
        **{k: v for k, v in {**LLAMA, **fields, **overrides}.items() if v is not None}
    )
    model = randomised(getattr(tf, f"{name}ForCausalLM")(config))
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
    arch = "llama" if config["model_type"] == "mixtral" else config["model_type"]
    metadata = _metadata(config) | _vocabulary(folder, config["vocab_size"]) | changes
    writer = gguf.GGUFWriter(path, str(metadata.pop("general.architecture", arch)))
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key.replace("ARCH", arch), value)
    for name, stored in tensors.items():
        if stored is not None:
            array, raw = stored
            writer.add_tensor(name, array if array.dtype == np.uint8 else gguf.quantize(array, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def _held(name: str, values: np.ndarray, kind: str) -> np.ndarray:
    raw = _kind(name, values, kind)
    return np.ascontiguousarray(gguf.dequantize(gguf.quantize(values, raw), raw), np.float32)


def _kind(name: str, array: np.ndarray, kind: str) -> Type:
    small = array.ndim < 2 or "block_sparse_moe.gate." in name or "ffn_gate_inp" in name
    return Type.F32 if small else TYPES[kind]


def _tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    stacked: dict[str, list[np.ndarray]] = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    loaded = {n: t.numpy() for n, t in load_file(folder / "model.safetensors").items()}
    for name in sorted(loaded, key=lambda n: [int(p) if p.isdigit() else 0 for p in n.split(".")]):
        module, part = re.sub(r"experts\.\d+", "experts", name).rsplit(".", 1)
        layer = re.match(r"model\.layers\.(\d+)\.", module)
        own = _NAMES[module[layer.end() :] if layer else module]
        values = loaded[name]
        turned = heads.get(module.rsplit(".", 1)[-1])
        if turned and config["model_type"] in ("llama", "mixtral"):
            values = values.reshape(turned, 2, len(values) // turned // 2, -1).swapaxes(1, 2).reshape(values.shape)
        stacked.setdefault(f"blk.{layer[1]}.{own}.{part}" if layer else f"{own}.{part}", []).append(values)
    tensors = {n: np.stack(a) if n.endswith("_exps.weight") else a[0] for n, a in stacked.items()}
    return {**tensors, **_rope_divisors(config)}


def _rope_divisors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return {}
    width, length = config["head_dim"], rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    rope, width = config["rope_parameters"], config.get("head_dim")
    found = {
        "general.type": "model",
        "general.name": "random",
        "ARCH.vocab_size": config["vocab_size"],
        "ARCH.context_length": config["max_position_embeddings"],
        "ARCH.embedding_length": config["hidden_size"],
        "ARCH.block_count": config["num_hidden_layers"],
        "ARCH.feed_forward_length": config["intermediate_size"],
        "ARCH.attention.head_count": config["num_attention_heads"],
        "ARCH.attention.head_count_kv": config["num_key_value_heads"],
        "ARCH.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "ARCH.attention.key_length": width,
        "ARCH.attention.value_length": width,
        "ARCH.rope.dimension_count": width if config["model_type"] in ("llama", "mixtral") else None,
        "ARCH.rope.freq_base": float(rope["rope_theta"]),
        "ARCH.expert_count": config.get("num_local_experts"),
        "ARCH.expert_used_count": config.get("num_experts_per_tok"),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"ARCH.rope.scaling.type": rope["rope_type"], "ARCH.rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
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
