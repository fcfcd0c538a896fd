"""What profiling announces is what it takes, for each kind of attention and of FFN: the default number of workers
follows from it."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.families import random_checkpoint
from support.profile_memory import profile_in_child

SIZES = {"hidden_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 512, "vocab_size": 2000}
LATENTS = SIZES | {
    "intermediate_size": 1024, "moe_intermediate_size": 128, "num_attention_heads": 16, "num_key_value_heads": 16,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
HEADS = SIZES | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
OPT = {"hidden_size": 512, "ffn_dim": 2048, "num_hidden_layers": 2, "num_attention_heads": 16, "vocab_size": 2000}
KINDS = {
    "llama-relu": HEADS | {"intermediate_size": 2048},
    "gemma3": HEADS | {"num_attention_heads": 8, "head_dim": 128, "intermediate_size": 1024, "sliding_window": 128},
    "opt": OPT | {"max_position_embeddings": 512},
    "olmoe": SIZES
    | {"intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 16}
    | {"num_experts_per_tok": 4},
    "gpt-oss": HEADS
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 32, "intermediate_size": 256}
    | {"num_local_experts": 8, "sliding_window": 128},
    "deepseek-v2": LATENTS | {"kv_lora_rank": 512},
    "deepseek-v3": LATENTS | {"q_lora_rank": 256, "kv_lora_rank": 256, "n_group": 4, "topk_group": 2},
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_announced_is_taken(tmp_path: Path, kind: str) -> None:
    random_checkpoint(tmp_path, kind, sizes=KINDS[kind], tokenizer=False)
    found = profile_in_child(tmp_path)
    assert 0.7 < found.ratio < 1.3, found
