"""Tensors in blocks that a number format holds are packed bit for bit."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type
from support.gguf_files import random_blocks, rounded_checkpoint, write_byte_tokenizer, write_gguf

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.packing import PackSpec, pack
from pi_runtime.artifact.quantisation import as_stored
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS

GRIDS = {Type.Q4_0: "q4", Type.Q4_1: "q4_1", Type.Q5_0: "q5"}
SHAPES = {
    **dict.fromkeys(("attn_q", "attn_output"), (256, 256)),
    **dict.fromkeys(("attn_k", "attn_v"), (128, 256)),
    **dict.fromkeys(("ffn_gate", "ffn_up"), (512, 256)),
    "ffn_down": (256, 512),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("grids")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
    rounded_checkpoint(found, "llama", "f16", **sizes)
    write_byte_tokenizer(found)
    return found


def opened(folder: Path, path: Path, kind: Type) -> Checkpoint:
    blocks = {f"blk.0.{n}.weight": (random_blocks(kind, *SHAPES[n], 0), kind) for n in SHAPES}
    write_gguf(folder, path, "f16", tensors=blocks)
    return open_checkpoint(path)


@pytest.mark.parametrize(("kind", "fmt"), GRIDS.items(), ids=GRIDS.values())
def test_blocks_are_taken_bit_for_bit(folder: Path, tmp_path: Path, kind: Type, fmt: str) -> None:
    """Random integers, of which few blocks use the ends, so that no search would find them all again."""
    checkpoint = opened(folder, tmp_path / "model.gguf", kind)
    formats = dict.fromkeys(PARTS, "keep") | {"attention": fmt, "ffn": fmt, "predictor": fmt}
    result = pack(checkpoint, PackSpec(formats=formats), output=tmp_path / "a.pi", recipe={})
    with Artifact.open(tmp_path / "a.pi") as artifact:
        for name in ("attention/qkv", "attention/out", "ffn/first"):
            meant = checkpoint.values(f"layers/0/{name}")
            np.testing.assert_array_equal(artifact.values(f"layers/0/{name}"), meant)
            if fmt == "q4_1":
                assert (as_stored(fmt, meant) != meant).any()
        found, meant = artifact.values("layers/0/ffn/rest"), checkpoint.values("layers/0/ffn/rest")
        np.testing.assert_array_equal(found[:, 0], meant[:, 0])
        np.testing.assert_array_equal(found[:, 1], as_stored(fmt, meant[:, 1]))  # its blocks lie along the neurons
    assert result.errors["attention"].largest == 0
    assert result.errors["ffn"].largest > 0


def test_other_formats_are_quantised(folder: Path, tmp_path: Path) -> None:
    checkpoint = opened(folder, tmp_path / "model.gguf", Type.Q4_1)
    formats = dict.fromkeys(PARTS, "q8")
    pack(checkpoint, PackSpec(formats=formats), output=tmp_path / "a.pi", recipe={})
    with Artifact.open(tmp_path / "a.pi") as artifact:
        meant = checkpoint.values("layers/0/ffn/first")
        np.testing.assert_array_equal(artifact.values("layers/0/ffn/first"), as_stored("q8", meant))
