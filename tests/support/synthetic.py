"""Small artifacts made of numbers from nowhere: for tests that need an artifact and no model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.guess_head import GuessHead, guess_layer_arrays
from pi_runtime.artifact.schema import Layer, Manifest, Plan, Text
from pi_runtime.artifact.sizes import (
    APART,
    BY_NEURON,
    PARTS,
    WHOLE,
    ArraySpec,
    array_specs,
    is_scales,
    layer_layouts,
    with_scales,
)
from pi_runtime.artifact.writer import ArtifactWriter
from support.paths import GOLDEN

END_ID = 256
_SHAPE = {
    "vocab_size": 257,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 40,
    "context_length": 64,
    "norm_eps": 1e-5,
    "activation": "relu",
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "norm": "rms",
        "positions": "rope",
        "position_offset": 0,
        "ffn": "gated",
        "tied_head": False,
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": False,
    },
    "opt": {
        "norm": "layer",
        "positions": "learned",
        "position_offset": 2,
        "ffn": "plain",
        "tied_head": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
    },
}


FACTS: dict[str, dict[str, Any]] = {
    "norms after each part": {"block": "reordered", "qk_norm": True, "joint_qk_norm": True},
    "scaled, capped, not rotated": {
        "embedding_scale": 3.0, "embedding_norm": True, "logit_scale": 0.7, "logit_softcap": 0.9,
        "unrotated_layers": (1,),
    },
    "windows, experts by sigmoid of what enters": {
        "n_experts": 3, "experts_per_token": 2, "router_score": "sigmoid", "router_early": True, "window": 7,
        "windowed_layers": (1,), "query_growth": 0.4, "query_period": 3,
    },
    "norms before and after, two kinds of angles": {
        "block": "sandwich", "window": 9, "windowed_layers": (0,),
        "windowed_frequencies": (1.0, 0.5, 0.25, 0.125), "windowed_scale": 1.3,
    },
    "heads of two sizes": {
        "window": 9, "windowed_layers": (0,), "windowed_head_dim": 12, "windowed_kv_heads": 4, "qk_norm": True,
        "windowed_frequencies": (1.0, 0.5, 0.25, 0.125, 0.1), "rotary_frequencies": (1.0, 0.1, 0.0, 0.0),
        "v_norm": True, "keys_as_values": True, "block_scale": True,
    },
    "an FFN beside experts, whose router has a norm and which have numbers": {
        "block": "sandwich", "n_experts": 5, "experts_per_token": 2, "router_norm": True, "expert_scale": True,
        "beside_ff": 37, "activation": "gelu_tanh",
    },
    "keys of earlier layers, a wider FFN there, an embedding of each layer": {
        "n_layers": 3, "block": "sandwich", "tied_head": True, "layer_embedding": 37, "shared_key_layers": (2,),
        "narrow_ff": 23, "window": 9, "windowed_layers": (0, 2), "windowed_head_dim": 12, "qk_norm": True,
        "v_norm": True, "keys_as_values": True, "activation": "gelu_tanh",
    },
    "narrower experts, whose router reads the FFN's input, with a plain FFN beside them": {
        "n_experts": 5, "experts_per_token": 2, "expert_width": 13, "beside_ff": 37, "activation": "relu2",
        "ffn": "plain", "router_score": "sigmoid", "router_choice_bias": True,
    },
    "shared experts, dense layers, a bias for choosing in groups": {
        "n_experts": 5, "experts_per_token": 3, "experts_shared": 1, "dense_layers": (0,), "dense_ff": 130,
        "router_score": "sigmoid", "router_choice_bias": True, "router_groups": 2, "router_scale": 1.5,
    },
    "sinks, a window, clamped experts with biases": {
        "n_experts": 3, "experts_per_token": 2, "router_bias": True, "expert_bias": True, "ffn_bias": True,
        "activation": "clamped_swiglu", "attention_sinks": True, "window": 11, "windowed_layers": (0,),
    },
    "latents of keys and of queries, experts of groups by their largest": {
        "n_kv_heads": 1, "latent_rank": 19, "query_rank": 13, "value_dim": 6, "rotary_frequencies": (1.0, 0.2),
        "score_scale": 1.2, "n_experts": 4, "experts_per_token": 2, "router_normalised": False, "router_groups": 4,
        "router_groups_taken": 2, "router_group_top": 1,
    },
    "norms of what the last matrices read": {"inner_norms": True, "activation": "relu2"},
    "states, gated attention, a shared expert with a gate": {
        "recurrence": "gated_delta", "recurrent_layers": (0,), "state_heads": 4, "state_key_heads": 2,
        "state_key_dim": 7, "state_value_dim": 9, "state_columns": 4, "state_heads_tiled": True, "output_gate": True,
        "qk_norm": True, "n_experts": 4, "experts_per_token": 3, "experts_shared": 1, "shared_gate": True,
    },
    "a mixer or an FFN alone, states of Mamba-2 without positions": {
        "recurrence": "mamba2", "recurrent_layers": (0,), "state_heads": 4, "state_key_heads": 2,
        "state_key_dim": 7, "state_value_dim": 9, "state_columns": 4, "state_least_step": 0.6, "state_norm_eps": 1e-3,
        "mixer_only_layers": (0,), "ffn_only_layers": (2,), "n_layers": 3, "n_experts": 3, "experts_per_token": 2,
        "activation": "relu2", "ffn": "plain", "positions": "none", "score_scale": 0.7,
    },
    "a short convolution": {
        "recurrence": "short_conv", "recurrent_layers": (0,), "state_heads": 4, "state_value_dim": 9,
        "state_columns": 3, "qk_norm": True,
    },
    "experts weighed among all": {"n_experts": 3, "experts_per_token": 2, "router_normalised": False},
}  # fmt: skip
"""What a decoder of two layers or more may have beside the usual."""


def small_decoder(family: str = "llama", **overrides: Any) -> Decoder:
    """A decoder of a few thousand weights: `llama` (gated, RMSNorm, rope) or `opt` (plain, LayerNorm, learned)."""
    fields = {"family": family, **_SHAPE, **_FAMILIES[family], **overrides}
    fields.setdefault("d_embedding", fields["d_model"])
    if fields["positions"] == "rope":
        fields.setdefault("rotary_frequencies", frequencies(fields["head_dim"]))
    return Decoder(**fields)


def frequencies(rotary_dim: int, theta: float = 10000.0) -> tuple[float, ...]:
    """Plain rotary angles for one position."""
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return tuple((np.float32(1) / np.float32(theta) ** exponent).tolist())


def random_artifact(
    path: Path,
    decoder: Decoder,
    *,
    format: str = "f32",  # noqa: A002
    seed: int = 0,
    ranks: Sequence[int | None] | None = None,
    profiled: bool = False,
    scale: float = 1.0,
    files: Mapping[str, bytes] | None = None,
    matrices: Mapping[str, str] | None = None,
    router_rows: Array | None = None,
    **manifest_fields: Any,
) -> Path:
    """Write an artifact of normally distributed weights: `scale` / √columns for matrices, norms around 1.

    A layer with a rank takes the rung `predicted`, another one `gate`, or `dense` where nothing is sparse. `files`
    come beside a tokenizer of bytes, or instead of it; `matrices` have formats of their own; `router_rows` are factors
    of the routers' rows; `manifest_fields` (text, generation, …) replace the usual ones.
    """
    rng = np.random.default_rng(seed)
    ranks = ranks or [None] * decoder.n_layers
    formats = {**dict.fromkeys(PARTS, format), **(matrices or {})}
    manifest = bare_manifest(decoder, formats, ranks, 1000 if profiled else 0)
    layout = manifest_fields.get("ffn_layout", BY_NEURON)
    layers = manifest_fields.get("layers", manifest.layers)
    layouts = layer_layouts(layout, (layer.rung for layer in layers))
    specs = array_specs(decoder, manifest.formats, ranks, profiled, layouts)
    if (guess := manifest_fields.get("guess")) is not None:
        specs |= with_scales(guess.arrays(decoder))
    if manifest_fields.get("guess_layers"):
        specs |= with_scales(guess_layer_arrays(decoder, formats, layout))
    with ArtifactWriter(path) as writer:
        for name, spec in specs.items():
            if not is_scales(name):
                values = random_values(name, spec, rng, scale)
                is_scaled = router_rows is not None and name.endswith("ffn/router")
                writer.add_array(name, spec, [values * router_rows[:, None] if is_scaled else values])
        for name, data in {"tokenizer.json": byte_tokenizer(), **(files or {})}.items():
            writer.add_file(name, data)
        writer.finish(replace(manifest, **manifest_fields))
    return path


def golden_artifact(path: Path) -> Path:
    """The artifact whose bytes are pinned: every kind of array and entry, weights from integer arithmetic alone.

    A change of format replaces the pinned file: `PYTHONPATH=tests python tests/support/synthetic.py`.
    """
    decoder = small_decoder(d_model=72, n_heads=3, n_kv_heads=1)
    formats = {"embedding": "bf16", "attention": "q8", "ffn": "q4", "head": "f16", "predictor": "f32"}
    ranks = (3, None)
    plans = (
        stored_plan((8, 0), 1 << 15, 20000, objective="hot-mass"),
        stored_plan((40, 40), 1 << 16, 50000, attention=("gpu", "cpu"), head="gpu"),
    )
    with ArtifactWriter(path) as writer:
        for number, (name, spec) in enumerate(array_specs(decoder, formats, ranks, True).items()):
            if not is_scales(name):
                writer.add_array(name, spec, [_counted_values(name, spec, number)])
        writer.add_file("tokenizer.json", byte_tokenizer())
        writer.add_file("chat_template.jinja", "{{ messages[-1].content }} →".encode())
        writer.finish(bare_manifest(decoder, formats, ranks, 1 << 20, plans))
    return path


def counted_artifact(path: Path, decoder: Decoder, format: str) -> Path:  # noqa: A002
    """An artifact with a predictor in each layer, whose weights come from integer arithmetic alone.

    In a format whose rows are not summed it has matrices as checkpoints have them, and no predictors.
    """
    formats, ranks, layout = dict.fromkeys(PARTS, format), [40] * decoder.n_layers, BY_NEURON
    if not FORMATS[format].summed:
        layout, ranks = WHOLE, [None] * decoder.n_layers
        formats |= {f"layers/0/{name}": format for name in APART}
    manifest = replace(bare_manifest(decoder, formats, ranks), ffn_layout=layout)
    if layout == WHOLE:
        manifest = replace(manifest, layers=(Layer(rung="dense"),) * decoder.n_layers)
    with ArtifactWriter(path) as writer:
        for number, (name, spec) in enumerate(array_specs(decoder, formats, ranks, False, layout).items()):
            if not is_scales(name):
                writer.add_array(name, spec, [_counted_values(name, spec, number)])
        writer.add_file("tokenizer.json", byte_tokenizer())
        writer.finish(manifest)
    return path


def stored_plan(cuts: tuple[int, ...], vram_bytes: int, used_bytes: int, **fields: Any) -> Plan:
    """A plan as artifacts hold it; everything but its cuts on the CPU unless `fields` say otherwise."""
    usual: dict[str, Any] = {
        "objective": "time",
        "ram_bytes": 70000,
        "context": 64,
        "attention": ("cpu",) * len(cuts),
        "embedding": "cpu",
        "head": "cpu",
        "predicted_ns": 1000,
        "digest": "0" * 64,
    }
    return Plan(vram_bytes=vram_bytes, used_bytes=used_bytes, cuts=cuts, **{**usual, **fields})


def _counted_values(name: str, spec: ArraySpec, number: int) -> Array:
    """Values that any platform computes alike: a 32-bit mix of the index, as multiples of 2⁻²⁶ in ±1/8."""
    n = int(np.prod(spec.shape))
    if name.endswith("order"):
        return np.arange(n) * 7 % n  # 7 and 40 share no divisor
    if name.endswith("counts"):
        return (1 << 20) // (1 + np.arange(n))
    x = (np.arange(n, dtype=np.uint64) + (number << 20)) * 2654435761 % 2**32
    x = (x ^ (x >> np.uint64(15))) * 2246822519 % 2**32
    values = ((x >> np.uint64(8)).astype(np.float32) - np.float32(2**23)) / np.float32(2**26)
    return (values + np.float32(name.endswith("norm/weight"))).reshape(spec.shape)


def bare_manifest(
    decoder: Decoder,
    formats: Mapping[str, str],
    ranks: Sequence[int | None],
    profiled_tokens: int = 0,
    plans: tuple[Plan, ...] = (),
) -> Manifest:
    """A manifest without arrays and files, as `ArtifactWriter.finish` takes it."""
    plain = "gate" if decoder.sparse else "dense"
    return Manifest(
        decoder=decoder,
        formats=formats,
        layers=tuple(Layer(rung=plain if rank is None else "predicted", rank=rank) for rank in ranks),
        profiled_tokens=profiled_tokens,
        plans=plans,
        text=Text(prefix_ids=(), end_ids=(END_ID,), eos_token="<|end|>"),  # noqa: S106
        generation={"temperature": 1.0, "do_sample": False},
        recipe={},
        provenance={"made_by": "tests/synthetic.py"},
        arrays={},
        files={},
    )


def random_values(name: str, spec: ArraySpec, rng: np.random.Generator, scale: float = 1.0) -> Array:
    """Values for one array, in its logical shape."""
    if name.endswith("order"):
        return rng.permutation(spec.shape[0])
    if name.endswith("counts"):
        return np.sort(rng.integers(0, 1000, spec.shape))[::-1]
    if name.endswith("ids"):
        return np.arange(spec.shape[0]) * 2
    values = rng.standard_normal(spec.shape, np.float32) * np.float32(scale / np.sqrt(spec.shape[-1]))
    if name.endswith("attention/decay"):
        return np.abs(values)
    if name.endswith("attention/conv"):  # as large as what it reads
        return values * np.float32(np.sqrt(spec.shape[-1] / spec.shape[0]))
    return values + np.float32(1) if name.endswith(("norm/weight", "_norm", "guess/norm")) else values


def small_guess_head(decoder: Decoder, **fields: Any) -> GuessHead:
    """A guess head that reads every second layer and drafts every second token."""
    usual: dict[str, Any] = {
        "states": tuple(range(0, decoder.n_layers + 1, 2)),
        "format": "f32",
        "shortlist": (decoder.vocab_size + 1) // 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 16,
        "d_ff": 48,
        "norm_eps": 1e-5,
        "rotary_frequencies": frequencies(16),
    }
    return GuessHead(**usual | fields)


def byte_tokenizer() -> bytes:
    """A `tokenizer.json` whose token i is the byte i, and token 256 the end of text."""
    return _tokenizer({letter: byte for byte, letter in enumerate(byte_letters())})


def number_tokenizer(size: int) -> bytes:
    """A `tokenizer.json` for models that are only timed: the text of token i is i, in five digits."""
    return _tokenizer({f"{token:05d}": token for token in range(size) if token != END_ID})


def _tokenizer(vocab: Mapping[str, int]) -> bytes:
    """A `tokenizer.json` without merges, with the end of text beside these tokens."""
    end = {"id": END_ID, "content": "<|end|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **flags}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {**vocab, "<|end|>": END_ID}, "merges": []},
    }
    return json.dumps(tokenizer, ensure_ascii=False, indent=1).encode()


def byte_letters() -> Iterator[str]:
    """The letter that stands for each byte in byte-level BPE: itself if printable, else the next one from 256 on."""
    others = iter(range(256, 512))
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        yield chr(byte if printable else next(others))


if __name__ == "__main__":
    golden_artifact(GOLDEN)
