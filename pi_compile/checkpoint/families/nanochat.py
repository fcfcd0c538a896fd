"""nanochat: squared ReLU without a gate, norms without weights, also of the embedding, and capped logits.

Queries and keys are normed after their rotation, which is the same before: a rotation keeps the length. They turn the
other way round than Llama's.
"""

from dataclasses import replace

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.adapter import plain_ffn, stored
from pi_compile.checkpoint.families.fields import biases, softcap, usual_decoder
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    found = usual_decoder(
        config,
        "nanochat",
        hidden_act="relu2",
        ffn="plain",
        embedding_norm=True,
        qk_norm=True,
        logit_softcap=softcap(config, "final_logit_softcapping", 15.0),
        **biases(attention=config.flag("attention_bias", default=False), ffn=False),
    )
    if found.rotary_scale != 1:
        raise config.error("rope_parameters", config.get("rope_parameters"), expected="angles without a scale")
    return replace(found, rotary_frequencies=tuple(-f for f in found.rotary_frequencies))


_NORMS = ("attention/norm/weight", "attention/q_norm", "attention/k_norm", "ffn/norm/weight")
_LAYER = {**llama.ATTENTION, **plain_ffn("layers.{n}.mlp.fc1", "layers.{n}.mlp.fc2"), **dict.fromkeys(_NORMS, ())}

ADAPTER = replace(
    llama.ADAPTER,
    family="nanochat",
    architectures=("NanoChatForCausalLM", "NanoChatModel"),
    global_tensors={"embedding": stored("embed_tokens.weight"), "embedding_norm/weight": (), "final_norm/weight": ()},
    layer_tensors=lambda _: _LAYER,
    read_keys=llama.KEYS | {"attention_bias", "final_logit_softcapping"},
    decoder=_decoder,
)
