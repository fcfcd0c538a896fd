"""transformers' Llama on the CPU as an engine, in bf16; random weights, never stored."""

import time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from side_by_side.process import threads

_models: list[LlamaForCausalLM] = []
_caches: list[DynamicCache] = []


def describe() -> dict[str, str]:
    """The torch that it computes with."""
    return {"build": f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"}


def open_model(shape: dict[str, Any]) -> None:
    """`shape`: fields of `Decoder`."""
    torch.set_num_threads(threads())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["d_model"],
        intermediate_size=shape["d_ff"],
        num_hidden_layers=shape["n_layers"],
        num_attention_heads=shape["n_heads"],
        num_key_value_heads=shape["n_kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=shape["context_length"],
        tie_word_embeddings=False,
    )
    with no_init_weights():
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        for parameter in model.parameters():
            # Written, because pages that never were all map to one page of zeros, which no memory need deliver.
            parameter.uniform_(-0.03, 0.03) if parameter.dim() > 1 else parameter.fill_(1)
    _models.append(model)


def decode(context: int, tokens: int) -> dict[str, Any]:
    """Single tokens after a context: seconds of each, without the first."""
    model = _models[0]
    with torch.inference_mode():
        if not _caches or _caches[0].get_seq_length() != context:
            _caches[:] = [DynamicCache(config=model.config)]
            model(input_ids=_ids(model, context), past_key_values=_caches[0])
        seconds = []
        for _ in range(tokens + 1):
            ids = _ids(model, 1)
            began = time.perf_counter()
            model(input_ids=ids, past_key_values=_caches[0])
            seconds.append(time.perf_counter() - began)
        _caches[0].crop(-(tokens + 1))
    embedding = model.get_input_embeddings().weight
    nbytes = sum(p.nbytes for p in model.parameters()) - embedding.nbytes
    c = model.config
    row = 2 * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim  # keys and values in bf16
    held = row * (context + tokens / 2)
    return {"seconds": seconds[1:], "read": 1.0, "density": 1.0, "bytes_per_token": nbytes, "cache_bytes": held}


def _ids(model: LlamaForCausalLM, tokens: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (1, tokens))


HANDLERS = {f.__name__: f for f in (describe, open_model, decode)}
