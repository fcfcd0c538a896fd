"""Dense decoding by transformers, the layers that do not fit offloaded by accelerate: what `device_map` does.

The model is transformers' Llama with the artifact's weights in f16. Whole layers stay on the GPU as long as the largest
one fits beside them, with embedding, final norm and head; hooks of accelerate copy the others up from pageable RAM for
every forward pass. `device_map="auto"` fills layers in the same order and leaves final norm and head in RAM too, so it
has no more on the GPU than this.
"""

import accelerate  # type: ignore[import-untyped]
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pi_runtime.artifact.decoder import Decoder
from support.gpu_bench.model import MemoryArtifact
from support.gpu_bench.offload import resident_layers

NAME = f"accelerate {accelerate.__version__} offload, dense"
StateDict = dict[str, torch.Tensor]


def named_weights(artifact: MemoryArtifact, device: torch.device) -> StateDict:
    """Every parameter in f16 under transformers' name, in RAM; biases of `first` are those of this artifact's curve.

    They are views of the artifact's arrays, but for up and down, whose rows alternate there.
    """
    found = {
        "model.embed_tokens.weight": _stored(artifact, "embedding"),
        "model.norm.weight": _stored(artifact, "final_norm/weight"),
        "lm_head.weight": _stored(artifact, "head"),
    }
    for n in range(artifact.manifest.decoder.n_layers):
        ours, theirs = f"layers/{n}", f"model.layers.{n}"
        rest = _stored(artifact, f"{ours}/ffn/rest").to(device)
        qkv = _stored(artifact, f"{ours}/attention/qkv").chunk(3)
        found |= {f"{theirs}.self_attn.{name}_proj.weight": w for name, w in zip("qkv", qkv, strict=True)}
        found |= {
            f"{theirs}.self_attn.o_proj.weight": _stored(artifact, f"{ours}/attention/out"),
            f"{theirs}.input_layernorm.weight": _stored(artifact, f"{ours}/attention/norm/weight"),
            f"{theirs}.post_attention_layernorm.weight": _stored(artifact, f"{ours}/ffn/norm/weight"),
            f"{theirs}.mlp.gate_proj.weight": _stored(artifact, f"{ours}/ffn/first"),
            f"{theirs}.mlp.up_proj.weight": rest[:, 0].contiguous().cpu(),
            f"{theirs}.mlp.down_proj.weight": rest[:, 1].T.contiguous().cpu(),
            f"{theirs}.mlp.up_proj.bias": _stored(artifact, f"{ours}/ffn/up_bias"),
            f"{theirs}.mlp.down_proj.bias": _stored(artifact, f"{ours}/ffn/down_bias"),
        }
    return found | _thresholds(artifact)


class Accelerated:
    """One sequence."""

    def __init__(
        self, artifact: MemoryArtifact, weights: StateDict, budget: int, context: int, device: torch.device
    ) -> None:
        """`weights` are `named_weights` of this artifact under any curve."""
        d = artifact.manifest.decoder
        self.resident, self.device = resident_layers(artifact.manifest, budget, context), device
        with accelerate.init_empty_weights():
            model = LlamaForCausalLM(_config(d)).eval()
        model.load_state_dict(weights | _thresholds(artifact), assign=True)
        ends = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
        places: dict[str, str | torch.device] = dict.fromkeys(ends, device)
        places |= {f"model.layers.{n}": device if n < self.resident else "cpu" for n in range(d.n_layers)}
        self.model = accelerate.dispatch_model(model, places, main_device=device, skip_keys="past_key_values")
        self.cache = None

    @torch.inference_mode()
    def read(self, ids: np.ndarray) -> torch.Tensor:
        """Logits (V,) after the last of these tokens."""
        ids_BT = torch.from_numpy(ids)[None].to(self.device)
        found = self.model(input_ids=ids_BT, past_key_values=self.cache, use_cache=True)
        self.cache = found.past_key_values
        logits_V: torch.Tensor = found.logits[0, -1].float()
        return logits_V


def _config(d: Decoder) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=d.vocab_size, hidden_size=d.d_model, intermediate_size=d.d_ff, num_hidden_layers=d.n_layers,
        num_attention_heads=d.n_heads, num_key_value_heads=d.n_kv_heads, hidden_act=d.activation, mlp_bias=True,
        max_position_embeddings=d.context_length, rms_norm_eps=d.norm_eps, tie_word_embeddings=False,
    )  # fmt: skip


def _thresholds(artifact: MemoryArtifact) -> StateDict:
    layers = range(artifact.manifest.decoder.n_layers)
    return {f"model.layers.{n}.mlp.gate_proj.bias": _stored(artifact, f"layers/{n}/ffn/first_bias") for n in layers}


def _stored(artifact: MemoryArtifact, name: str) -> torch.Tensor:
    return torch.from_numpy(artifact.array(name)).to(torch.float16)
