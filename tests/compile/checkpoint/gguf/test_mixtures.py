"""Mixtures of experts in GGUF: what their files may not say, layers that draft, and MXFP4 as in a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import torch
from gguf import GGMLQuantizationType as Type
from support.gguf_files import rounded_checkpoint, write_byte_tokenizer, write_gguf
from support.hf import edit_json, edit_tensors
from support.small_project import no_progress

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.packing import ALL_KEPT, PackSpec, pack
from pi_compile.pipeline.packed import pack_model
from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS, WHOLE
from pi_runtime.kernels import reference

CASES = ("gpt-oss", "glm4-moe", "smallthinker")
BIAS = (np.zeros(64, np.float32), Type.F32)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt-oss", {"ARCH.attention.sliding_window": None}, "no gpt-oss.attention.sliding_window"),
    ("gpt-oss", {"ARCH.attention.sliding_window": 0}, "sliding_window"),
    ("gpt-oss", {"ARCH.attention.sliding_window_pattern": 4}, "gpt-oss.attention.sliding_window_pattern"),
    ("gpt-oss", {"ARCH.rope.freq_base_swa": 10.0}, "gpt-oss.rope.freq_base_swa"),
    ("gpt-oss", {"ARCH.expert_gating_func": 2}, "expert_gating_func would change"),
    ("gpt-oss", {"ARCH.expert_weights_scale": 2.0}, "expert_weights_scale would change"),
    ("gpt-oss", {"ARCH.rope.dimension_count": 12}, "whole heads"),
    ("gpt-oss", {"tensors": {"blk.1.attn_sinks.weight": None}}, "blk.1.attn_sinks.weight"),
    ("gpt-oss", {"tensors": {"blk.0.ffn_up_exps.bias": (np.zeros((4, 96), np.float32), Type.F32)}}, "the shape"),
    ("gpt-oss", {"tensors": {"blk.0.ffn_down_exps.bias": None}}, "blk.0.ffn_down_exps.bias"),
    ("glm4-moe", {"ARCH.expert_shared_count": None}, "no glm4moe.expert_shared_count"),
    ("glm4-moe", {"ARCH.expert_shared_count": 2**31 - 1}, "glm4moe.expert_shared_count"),
    ("glm4-moe", {"ARCH.expert_shared_count": "many"}, "glm4moe.expert_shared_count"),
    ("glm4-moe", {"ARCH.expert_shared_count": 0}, "glm4moe.expert_shared_count"),
    ("glm4-moe", {"ARCH.expert_count": 2**31 - 1}, "expert_count does not fit its tensors"),
    ("glm4-moe", {"ARCH.expert_gating_func": 1}, "glm4moe.expert_gating_func"),
    ("glm4-moe", {"ARCH.expert_group_count": 4}, "n_group"),
    ("glm4-moe", {"ARCH.expert_group_count": 3, "ARCH.expert_group_used_count": 4}, "topk_group"),
    ("gpt-oss", {"ARCH.expert_group_count": 5}, "expert_group_count would change"),
    ("glm4-moe", {"ARCH.leading_dense_block_count": 0}, "missing"),
    ("glm4-moe", {"ARCH.leading_dense_block_count": 2**31 - 1}, "blk.1.ffn_gate.weight"),
    ("glm4-moe", {"ARCH.feed_forward_length": 2**31 - 1}, "intermediate_size"),
    ("glm4-moe", {"ARCH.nextn_predict_layers": 3}, "glm4moe.nextn_predict_layers"),
    ("glm4-moe", {"ARCH.nextn_predict_layers": 1}, "its metadata does not account for"),
    ("glm4-moe", {"ARCH.rope.dimension_count": 5}, "an even number of 12 columns"),
    ("glm4-moe", {"ARCH.rope.dimension_sections": [2, 2, 2, 0]}, "glm4moe.rope.dimension_sections"),
    ("glm4-moe", {"tensors": {"blk.1.exp_probs_b.bias": None}}, "blk.1.exp_probs_b.bias"),
    ("glm4-moe", {"tensors": {"blk.0.attn_output.bias": BIAS}}, "blk.0.attn_output.bias"),
    ("smallthinker", {"ARCH.expert_gating_func": None}, "smallthinker.expert_gating_func"),
    ("smallthinker", {"ARCH.attention.sliding_window": 128}, "smallthinker.attention.sliding_window"),
    ("smallthinker", {"ARCH.attention.sliding_window_pattern": 2}, "smallthinker.attention.sliding_window_pattern"),
    ("smallthinker", {"ARCH.expert_weights_norm": False}, "expert_weights_norm would change"),
    ("smallthinker", {"ARCH.expert_used_count": 6}, "moe_num_active_primary_experts"),
    ("smallthinker", {"ARCH.expert_shared_count": 1}, "expert_shared_count would change"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {case: tmp_path_factory.mktemp("mixtures") / case for case in CASES}
    for case, folder in found.items():
        rounded_checkpoint(folder, case, "f16")
    return found


@pytest.mark.parametrize(("case", "changes", "word"), REFUSED)
def test_what_is_refused(
    case: str, changes: dict[str, Any], word: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    write_gguf(folders[case], tmp_path / "model.gguf", "f16", **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in str(caught.value)
    assert word in str(caught.value)


def test_what_llama_cpp_takes_for_missing_keys(folders: dict[str, Path], tmp_path: Path) -> None:
    keys = ("leading_dense_block_count", "expert_weights_scale", "expert_weights_norm", "expert_gating_func")
    rounded_checkpoint(tmp_path / "hf", "glm4-moe", "f16", first_k_dense_replace=0)
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", "f16", **{f"ARCH.{key}": None for key in keys})
    found = open_checkpoint(tmp_path / "model.gguf").decoder
    assert (found.dense_layers, found.router_scale, found.router_normalised) == ((), 1.0, False)


def test_layers_that_draft_are_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    behind = {f"blk.3.{name}": BIAS for name in ("nextn.eh_proj.weight", "nextn.enorm.weight", "attn_norm.weight")}
    joined = {"blk.3.ffn_up_exps.weight": (np.zeros((6, 64, 64), np.float32), Type.F32)}
    layers = {"ARCH.block_count": 4, "ARCH.nextn_predict_layers": 1}
    write_gguf(folders["glm4-moe"], tmp_path / "drafts.gguf", "f16", tensors=behind | joined, **layers)
    write_gguf(folders["glm4-moe"], tmp_path / "model.gguf", "f16")
    found = open_checkpoint(tmp_path / "drafts.gguf")
    assert found.decoder == open_checkpoint(tmp_path / "model.gguf").decoder
    assert any("draft further tokens" in line for line in found.notices)


def test_the_ends_of_yarns_ramp_are_llama_cpps(folders: dict[str, Path], tmp_path: Path) -> None:
    """llama.cpp rounds them always; gpt-oss is published with `truncate` false, which no key of a file says."""
    write_gguf(folders["gpt-oss"], tmp_path / "model.gguf", "f16")
    assert any("YaRN's ramp are rounded" in line for line in open_checkpoint(tmp_path / "model.gguf").notices)


def test_a_missing_factor_is_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """So llama.cpp takes it; transformers takes the context over the original one."""
    for name, factor in (("none", None), ("one", 1.0), ("four", 4.0)):
        write_gguf(folders["gpt-oss"], tmp_path / f"{name}.gguf", "f16", **{"ARCH.rope.scaling.factor": factor})
    none, one, four = (open_checkpoint(tmp_path / f"{name}.gguf").decoder for name in ("none", "one", "four"))
    assert none == one != four


def both_in_mxfp4(folder: Path, file: Path, largest: int = 126) -> None:
    """A random gpt-oss with the same random blocks of experts in a checkpoint and in a file."""
    rounded_checkpoint(folder, "gpt-oss", "f16")
    write_byte_tokenizer(folder)
    rng, changes, stored = np.random.default_rng(0), {}, {}
    for layer in range(3):
        for part, rows, groups in (("gate_up", 192, 2), ("down", 64, 3)):
            block = rng.integers(0, 256, (5, rows, groups, 16), np.uint8)
            scale = rng.integers(largest - 6, largest, (5, rows, groups), np.uint8)
            name = f"model__layers__{layer}__mlp__experts__{part}_proj"
            changes |= {f"{name}_blocks": torch.from_numpy(block), f"{name}_scales": torch.from_numpy(scale)}
            parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if part == "gate_up" else {"down": slice(None)}
            for own, taken in parts.items():
                raw = as_llama_cpp_has_it(block[:, taken], scale[:, taken])
                stored[f"blk.{layer}.ffn_{own}_exps.weight"] = raw, Type.MXFP4
    write_gguf(folder, file, "f16", tensors=stored)
    gone = [f"model.layers.{n}.mlp.experts.{part}_proj" for n in range(3) for part in ("gate_up", "down")]
    edit_tensors(folder, *gone, **changes)
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})


def as_llama_cpp_has_it(block: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Blocks of 17 bytes: the exponent, and numbers 0 … 15 in the lower halves, 16 … 31 in the upper ones."""
    numbers = np.stack([block & 15, block >> 4], -1).reshape(*block.shape[:-1], 32)
    joined = np.concatenate([scale[..., None], numbers[..., :16] | numbers[..., 16:] << 4], -1)
    return np.ascontiguousarray(joined.reshape(*block.shape[:2], -1))


@pytest.mark.parametrize("kind", ["q5", "f16"])
def test_mxfp4_is_read_and_packed_as_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    both_in_mxfp4(tmp_path / "hf", tmp_path / "model.gguf")
    theirs, ours = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "model.gguf")
    assert (ours.format("ffn"), ours.bits("ffn")) == ("MXFP4", 4.25)
    packed = []
    for checkpoint in (theirs, ours):
        path, formats = tmp_path / f"{len(packed)}.pi", dict.fromkeys(PARTS, "f16") | {"ffn": kind}
        pack(checkpoint, PackSpec(formats=formats), path, recipe={})
        with Artifact.open(path) as artifact:
            packed.append({name: np.array(artifact.array(name)) for name in artifact.manifest.arrays})
            for layer in range(3):
                for name, rows in (("first", slice(None)), ("rest", (slice(None), 0))):
                    exact = theirs.values(f"layers/{layer}/ffn/{name}")[rows]
                    np.testing.assert_array_equal(artifact.values(f"layers/{layer}/ffn/{name}")[rows], exact)
    assert list(packed[1]) == list(packed[0])
    for name, wanted in packed[0].items():
        np.testing.assert_array_equal(packed[1][name], wanted, err_msg=name)


def test_experts_stay_as_they_are_published(tmp_path: Path) -> None:
    """Gate, up and down, from a checkpoint and from a file, bit for bit, where nothing says that neurons are apart."""
    both_in_mxfp4(tmp_path / "hf", tmp_path / "model.gguf")
    meant, packed = open_checkpoint(tmp_path / "hf").in_layout(WHOLE), []
    for source in (tmp_path / "hf", tmp_path / "model.gguf"):
        path, said = tmp_path / f"{len(packed)}.pi", list[str]()
        pack_model(str(source), path, progress=no_progress, notice=said.append)
        assert ALL_KEPT in said
        with Artifact.open(path) as artifact:
            assert artifact.manifest.formats["ffn"] == "mxfp4"
            for layer in range(3):
                for name in ("first", "up", "down"):
                    array = f"layers/{layer}/ffn/{name}"
                    np.testing.assert_array_equal(artifact.values(array), meant.values(array))
            packed.append(
                {name: np.array(artifact.array(name)) for name in artifact.manifest.arrays if "/ffn/" in name}
            )
            wanted_TV = reference.forward(artifact, [1, 5, 9, 11], "dense")
        with load(path, device="cpu") as model:
            assert np.abs(model.logits([1, 5, 9, 11]) - wanted_TV).max() < 2e-3 * np.abs(wanted_TV).max()
    for name, wanted in packed[0].items():
        np.testing.assert_array_equal(packed[1][name], wanted, err_msg=name)


def test_exponents_that_no_float_holds_are_refused(tmp_path: Path) -> None:
    both_in_mxfp4(tmp_path / "hf", tmp_path / "model.gguf", 256)
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        open_checkpoint(tmp_path / "model.gguf").check_values()
