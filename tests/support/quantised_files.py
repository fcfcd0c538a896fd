"""Quantised checkpoints as GPTQ, AWQ and compressed-tensors write them, made of a float one.

Integers, scales and zeros are random; `quantise` returns the float32 values that they mean. Each integer is put into
its word by itself, from the description of the form, so that this shares nothing with the reader.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from support.hf import edit_json

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Form:
    """How a checkpoint is quantised."""

    config: Mapping[str, Any]
    bits: int = 4
    groups: int = 4
    """Groups of columns; one is a scale for each row, and 0 one for the matrix."""
    permuted: bool = False
    has_zeros: bool = True
    packed: bool = True
    packed_zeros: bool = True
    scale: torch.dtype = torch.float16


def _compressed(
    form: str, strategy: str, bits: int, symmetric: bool = False, order: str | None = None, **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": 8,
        "dynamic": False,
        "actorder": order,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False, "desc_act": False}
PACKED, PLAIN = "pack-quantized", "int-quantized"
FORMS = {
    "gptq": Form(GPTQ),
    "gptq-v2": Form({**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-v2-by-format": Form({**GPTQ, "format": "gptq_v2"}),
    "gptq-v2-twice": Form({**GPTQ, "checkpoint_format": "gptq_v2", "format": "GPTQ_V2"}),
    "gptq-8-bits": Form({**GPTQ, "bits": 8}, bits=8),
    "gptq-act-order": Form({**GPTQ, "desc_act": True}, permuted=True),
    "gptq-one-group": Form({**GPTQ, "group_size": -1}, groups=1),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}),
    "packed": Form(_compressed(PACKED, "group", 4, True), has_zeros=False, scale=torch.bfloat16),
    "packed-zeros": Form(_compressed(PACKED, "group", 4)),
    "packed-old-zeros": Form(_compressed(PACKED, "group", 4), packed_zeros=False),
    "packed-8-bits": Form(_compressed(PACKED, "channel", 8), bits=8, groups=1),
    "packed-act-order": Form(_compressed(PACKED, "group", 4, True, "group"), permuted=True, has_zeros=False),
    "int8": Form(_compressed(PLAIN, "channel", 8, True), bits=8, groups=1, has_zeros=False, packed=False),
    "int8-one-scale": Form(_compressed(PLAIN, "tensor", 8, True), bits=8, groups=0, has_zeros=False, packed=False),
    "int8-zeros": Form(
        _compressed(PLAIN, "channel", 8, input_activations={"num_bits": 8, "dynamic": True}),
        bits=8,
        groups=1,
        packed=False,
        scale=torch.float32,
    ),
}


def quantise(folder: Path, name: str, *, zero_biases: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """Quantise the linear layers of a folder in place; returns what its tensors mean, by the model's names."""
    form, rng = FORMS[name], np.random.default_rng(seed)
    tensors = load_file(folder / "model.safetensors")
    meant, stored = dict(tensors), dict(tensors)
    for weight in [key for key in tensors if key.endswith("_proj.weight")]:
        layer = weight.removesuffix(".weight")
        rows, columns = tensors[weight].shape
        if columns % max(1, form.groups) and not form.permuted:
            raise AssertionError(f"{columns} columns in {form.groups} groups")
        parts, meant[weight] = layer_tensors(form, rng, rows, columns)
        del stored[weight]
        stored |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
        if zero_biases and f"{layer}.bias" not in tensors:
            stored[f"{layer}.bias"] = torch.zeros(rows, dtype=torch.float16)
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config=json.loads(json.dumps(form.config)))
    return meant


def layer_tensors(
    form: Form, rng: np.random.Generator, rows: int, columns: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of a layer, and the weight [rows, columns] that they mean."""
    method, top, groups = form.config["quant_method"], 1 << form.bits, max(1, form.groups)
    q = rng.integers(0, top, (rows, columns))
    scale = torch.from_numpy(rng.uniform(0.001, 0.02, (rows, groups))).to(form.scale)
    if form.groups == 0:
        scale = scale[:1].expand(rows, 1)
    zero = rng.integers(1, top, (rows, groups)) if form.has_zeros else np.full((rows, groups), top // 2)
    group = np.arange(columns) * groups // columns
    if form.permuted:
        group = rng.permutation(group)
    meant = scale.float()[:, group] * torch.from_numpy(q - zero[:, group]).float()
    match method:
        case "gptq":
            said = {form.config.get(key, "gptq").lower() for key in ("checkpoint_format", "format")}
            less = 0 if "gptq_v2" in said else 1
            parts = {
                "qweight": _words(q.T, form.bits, axis=0),
                "qzeros": _words((zero - less).T, form.bits, axis=1),
                "scales": scale.T,
                "g_idx": torch.from_numpy(group.astype(np.int32)),
            }
        case "awq":
            parts = {
                "qweight": _words(q.T, 4, axis=1, order=AWQ_COLUMNS),
                "qzeros": _words(zero.T, 4, axis=1, order=AWQ_COLUMNS),
                "scales": scale.T,
            }
        case _:
            parts = _compressed_layer(form, q, zero, scale[:1] if form.groups == 0 else scale, group)
    return parts, meant


def _compressed_layer(
    form: Form, q: np.ndarray, zero: np.ndarray, scale: torch.Tensor, group: np.ndarray
) -> dict[str, torch.Tensor]:
    middle = 1 << form.bits - 1
    parts = {"weight_scale": scale}
    if form.packed:
        parts |= {"weight_packed": _words(q, form.bits, axis=1), "weight_shape": torch.tensor(q.shape)}
    else:
        parts["weight"] = torch.from_numpy((q - middle).astype(np.int8))
    if form.has_zeros:
        plain = torch.from_numpy((zero - middle).astype(np.int8))
        is_packed = form.packed and form.packed_zeros
        parts["weight_zero_point"] = _words(zero, form.bits, axis=0) if is_packed else plain
    if form.permuted:
        parts["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
    return parts


def _words(values: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Integers along an axis in words of 32 bits; place i of a word holds its column `order[i]`."""
    along, per_word = np.moveaxis(values, axis, 0), 32 // bits
    words = np.zeros((-(-len(along) // per_word), *along.shape[1:]), np.uint32)
    for word in range(len(words)):
        for place in range(per_word):
            index = word * per_word + (place if order is None else order[place])
            if index < len(along):
                words[word] |= along[index].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32))
