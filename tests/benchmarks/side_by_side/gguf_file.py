"""A Llama of random weights as a GGUF file, for llama.cpp: same shape and bits as ours."""

import math
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from pi_runtime.artifact.decoder import Decoder

TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8": Type.Q8_0, "q4": Type.Q4_0}
_TILE_ROWS = 1024


def add_shape(writer: gguf.GGUFWriter, d: Decoder) -> None:
    """What every architecture says of its size."""
    writer.add_vocab_size(d.vocab_size)
    writer.add_context_length(d.context_length)
    writer.add_embedding_length(d.d_model)
    writer.add_block_count(d.n_layers)
    writer.add_feed_forward_length(d.d_ff)
    writer.add_head_count(d.n_heads)
    writer.add_head_count_kv(d.n_kv_heads)
    writer.add_layer_norm_rms_eps(d.norm_eps)


def write_gguf(
    path: Path, d: Decoder, format_name: str, *, has_tokenizer: bool = False, router_rows: np.ndarray | None = None,
    given: Mapping[str, np.ndarray] | None = None,
) -> None:  # fmt: skip
    """Write the file. Where tokens come and go as numbers it needs no tokenizer; else each token is its number.

    With experts it is a Qwen3-MoE; `router_rows` are factors of its routers' rows. Tensors that are
    `given` are not random.
    """
    writer = gguf.GGUFWriter(path, "llama" if d.n_experts == 1 else "qwen3moe")
    if d.n_experts > 1:
        writer.add_expert_count(d.n_experts)
        writer.add_expert_used_count(d.experts_per_token)
        writer.add_expert_feed_forward_length(d.d_ff)
    add_shape(writer, d)
    writer.add_key_length(d.head_dim)
    writer.add_value_length(d.head_dim)
    writer.add_rope_dimension_count(d.rotary_dim)
    # The second of J frequencies is base ** (-1 / J).
    writer.add_rope_freq_base(d.rotary_frequencies[1] ** -len(d.rotary_frequencies))
    if has_tokenizer:
        _add_tokenizer(writer, d.vocab_size)
    else:
        writer.add_tokenizer_model("none")
    rng, made = np.random.default_rng(0), {}
    for name, shape in _shapes(d):
        if given is not None and name in given:
            kind = Type.F32 if name.endswith("gate_inp.weight") else TYPES[format_name]
            writer.add_tensor(name, gguf.quantize(given[name], kind), raw_dtype=kind)
            continue
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        if name.endswith("gate_inp.weight"):
            values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))
            writer.add_tensor(name, values if router_rows is None else values * router_rows[:, None])
            continue
        if shape not in made:  # the same numbers for each layer; the file has them each time
            made[shape] = random_matrix(rng, shape, TYPES[format_name])
        writer.add_tensor(name, made[shape], raw_dtype=TYPES[format_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"{token:05d}" for token in range(3, size))])
    writer.add_token_scores([0.0] * size)
    special = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_token_types([*special, *[gguf.TokenType.NORMAL] * (size - 3)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def dense_bytes(path: Path) -> int:
    """Bytes that one token must read: all tensors but the embedding."""
    return sum(int(t.n_bytes) for t in gguf.GGUFReader(path).tensors if t.name != "token_embd.weight")


def _shapes(d: Decoder) -> list[tuple[str, tuple[int, ...]]]:
    heads, kv_heads = d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim
    layer = {
        "attn_norm": (d.d_model,),
        "attn_q": (heads, d.d_model),
        "attn_k": (kv_heads, d.d_model),
        "attn_v": (kv_heads, d.d_model),
        "attn_output": (d.d_model, heads),
        "ffn_norm": (d.d_model,),
    }
    if d.n_experts == 1:
        layer |= {"ffn_gate": (d.d_ff, d.d_model), "ffn_up": (d.d_ff, d.d_model), "ffn_down": (d.d_model, d.d_ff)}
    else:
        layer |= {"attn_q_norm": (d.head_dim,), "attn_k_norm": (d.head_dim,), "ffn_gate_inp": (d.n_experts, d.d_model)}
        layer |= {f"ffn_{part}_exps": (d.n_experts, d.d_ff, d.d_model) for part in ("gate", "up")}
        layer |= {"ffn_down_exps": (d.n_experts, d.d_model, d.d_ff)}
    table = (d.vocab_size, d.d_model)
    layers = [(f"blk.{n}.{name}.weight", shape) for n in range(d.n_layers) for name, shape in layer.items()]
    ends = [("token_embd.weight", table), ("output_norm.weight", (d.d_model,)), ("output.weight", table)]
    return [*ends, *layers]


def random_matrix(rng: np.random.Generator, shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """Random numbers in a format, of many rows the same ones again and again."""
    every = math.prod(shape[:-1])
    rows = min(_TILE_ROWS, every)
    values = rng.standard_normal((rows, shape[-1]), np.float32) / np.float32(np.sqrt(shape[-1]))
    tile = gguf.quantize(values, kind)
    return tile[np.arange(every) % rows].reshape(*shape[:-1], -1)
