"""Published EAGLE-3 heads: a folder with `config.json` and weights, in the layout of SpecForge, vLLM and SGLang.

    fc.weight [D, 3D]   midlayer.{input_layernorm, hidden_norm, post_attention_layernorm}.weight
    midlayer.self_attn.{q,k,v}_proj.weight [·, 2D], o_proj   midlayer.mlp.{gate,up,down}_proj   norm.weight
    lm_head.weight [S, D]   d2t [S]: token i of the short list is token i + d2t[i] of the model

`layers.0.` may stand for `midlayer.`, and `model.` before any name. `t2d` says the same as `d2t`, and `embed_tokens` is
the model's. A head reads what enters layers 2, L / 2 and L − 3 of a model with L layers, unless its config names others
(`eagle_config.eagle_aux_hidden_state_layer_ids`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint.config import Config, read_json
from pi_compile.checkpoint.families.rope import rotary
from pi_compile.checkpoint.folder import CONFIG_FILE
from pi_compile.checkpoint.tensors import FolderTensors
from pi_compile.errors import CheckpointError
from pi_compile.files import file_digest, json_digest
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.guess_head import PREFIX, GuessHead

Array = npt.NDArray[Any]

_TENSORS = {
    "fc": ("fc",),
    "embedding_norm": ("midlayer.input_layernorm",),
    "hidden_norm": ("midlayer.hidden_norm",),
    "qkv": tuple(f"midlayer.self_attn.{part}_proj" for part in "qkv"),
    "out": ("midlayer.self_attn.o_proj",),
    "ffn_norm": ("midlayer.post_attention_layernorm",),
    "gate": ("midlayer.mlp.gate_proj",),
    "up": ("midlayer.mlp.up_proj",),
    "down": ("midlayer.mlp.down_proj",),
    "norm": ("norm",),
    "head": ("lm_head",),
}
"""Our arrays, and the tensors whose rows they are, one after the other."""
_LEFT_OUT = ("t2d", "embed_tokens.weight")


HEAD_FORMAT = "q8"
"""Number format of a head's matrices in an artifact."""


@dataclass(frozen=True, eq=False)
class PublishedHead:
    """A head that others trained, with its weights in float32."""

    head: GuessHead
    arrays: Mapping[str, Array]
    """By their names in the artifact, without `guess/`."""
    digest: str
    """Digest of its files."""


def read_head(folder: Path, d: Decoder) -> PublishedHead:
    """A published head for a model.

    Raises CheckpointError for a head of another kind, or of another model.
    """
    config, source = Config(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE)), FolderTensors(folder)
    names = {name.removeprefix("model.").replace("layers.0.", "midlayer."): name for name in source.names}
    wanted = [f"{name}.weight" for parts in _TENSORS.values() for name in parts]
    missing, others = sorted(set(wanted) - names.keys()), sorted(names.keys() - {*wanted, "d2t", *_LEFT_OUT})
    if missing or others:
        raise CheckpointError(
            f"{folder}: not an EAGLE-3 head that is read",
            expected=f"also {', '.join(missing)}" if missing else "no other tensors",
            found=", ".join(others) or f"{len(names)} tensors",
        )
    arrays = {
        ours: np.concatenate([source.rows(names[f"{part}.weight"])[:] for part in parts])
        for ours, parts in _TENSORS.items()
    }
    ids = np.arange(len(arrays["head"]))
    if "d2t" in names:
        ids = ids + np.asarray(source.tensor(names["d2t"])).astype(np.int64)
    order = np.argsort(ids, kind="stable")
    arrays["head"], arrays["ids"] = arrays["head"][order], ids[order]
    head = _shape(config, d, len(ids))
    _check(folder, head, d, arrays)
    digest = json_digest([file_digest(folder / name) for name in (CONFIG_FILE, *source.files)])
    return PublishedHead(head, arrays, digest)


def _shape(config: Config, d: Decoder, shortlist: int) -> GuessHead:
    for key in ("norm_before_residual", "attention_bias", "mlp_bias"):
        if config.get(key):
            raise config.error(key, config.get(key), expected="false")
    config.choice("hidden_act", "silu", {"silu": "silu"})
    heads = config.size("num_attention_heads")
    width = config.size("head_dim", d.d_model // heads)
    named = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    angles = rotary(config, width)
    return GuessHead(
        states=tuple(named or (2, d.n_layers // 2, d.n_layers - 3)),
        format=HEAD_FORMAT,
        shortlist=shortlist,
        n_heads=heads,
        n_kv_heads=config.size("num_key_value_heads", heads),
        head_dim=width,
        d_ff=config.size("intermediate_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rotary_frequencies=angles["rotary_frequencies"],
        rotary_scale=angles["rotary_scale"],
    )


def _check(folder: Path, head: GuessHead, d: Decoder, arrays: dict[str, Array]) -> None:
    """Raise CheckpointError where a head does not fit a model."""
    problems = list(head.problems(d))
    for name, spec in head.arrays(d):
        shape = arrays[name.removeprefix(PREFIX)].shape
        if shape != spec.shape:
            problems.append(f"{name}: {list(shape)} instead of {list(spec.shape)}")
    ids = arrays["ids"]
    if len(set(ids.tolist())) < len(ids) or ids[0] < 0 or ids[-1] >= d.vocab_size:
        problems.append(f"d2t: not tokens of a vocabulary of {d.vocab_size}, each once")
    if problems:
        raise CheckpointError(f"{folder}: the head is of another model", found="; ".join(problems))
