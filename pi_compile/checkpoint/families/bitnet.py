"""BitNet b1.58: Llama with squared ReLU, and a norm before the last matrix of attention and of the FFN.

Its linear layers are −1, 0 and 1 times one scale (`quantised.layouts`). Its makers round their inputs to 8 bits too.
"""

from dataclasses import replace

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.adapter import stored
from pi_compile.checkpoint.families.fields import biases, usual_decoder
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    attention = config.flag("attention_bias", default=False)
    return usual_decoder(
        config,
        "bitnet",
        n_kv_heads=5,
        hidden_act="relu2",
        norm_eps=1e-5,
        theta=500000.0,
        inner_norms=True,
        **biases(attention=attention, ffn=False),
    )


_LAYER = llama.LAYER | {
    "attention/inner_norm": stored("layers.{n}.self_attn.attn_sub_norm.weight"),
    "ffn/inner_norm": stored("layers.{n}.mlp.ffn_sub_norm.weight"),
}
ADAPTER = replace(
    llama.ADAPTER,
    family="bitnet",
    architectures=("BitNetForCausalLM", "BitNetModel"),
    layer_tensors=lambda _: _LAYER,
    read_keys=llama.KEYS | {"attention_bias"},
    decoder=_decoder,
)
