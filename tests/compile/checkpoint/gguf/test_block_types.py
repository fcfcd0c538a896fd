"""Files in blocks that no number format keeps: what is read, what `init` and `keep` do, and the loss that is stated."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
from gguf import GGMLQuantizationType as Type
from support.gguf_files import random_blocks, rounded_checkpoint, write_byte_tokenizer, write_gguf
from support.small_project import no_progress

from pi_compile.calibration.quantising import packed_values
from pi_compile.checkpoint import open_checkpoint
from pi_compile.checkpoint.gguf.file import BLOCK_TYPES
from pi_compile.errors import CheckpointError
from pi_compile.evaluation import evaluate
from pi_compile.pipeline.packed import pack_plain
from pi_compile.pipeline.recipe_checkpoint import create_recipe, recipe_checkpoint
from pi_compile.pipeline.rounding_check import RoundingCheck
from pi_compile.recipe import default_recipe, read_recipe
from pi_runtime.artifact.quantisation import as_stored
from pi_runtime.artifact.reader import Artifact

QUIET: dict[str, Any] = {"progress": no_progress, "notice": lambda _line: None}
KINDS = pytest.mark.parametrize("kind", sorted(BLOCK_TYPES), ids=lambda kind: kind.name)
SHAPES = {
    **dict.fromkeys(("attn_q", "attn_output"), (256, 256)),
    **dict.fromkeys(("attn_k", "attn_v"), (128, 256)),
    **dict.fromkeys(("ffn_gate", "ffn_up"), (512, 256)),
    "ffn_down": (256, 512),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("blocks")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
    rounded_checkpoint(found, "llama", "f16", **sizes)
    write_byte_tokenizer(found)
    return found


def written(folder: Path, path: Path, kinds: dict[str, Type]) -> Path:
    """A file with some tensors of the layer in random blocks, and embedding and head in F16."""
    blocks = {f"blk.0.{n}.weight": (random_blocks(kind, *SHAPES[n], 0), kind) for n, kind in kinds.items()}
    write_gguf(folder, path, "f16", tensors=blocks)
    return path


@pytest.fixture
def mixed(folder: Path, tmp_path: Path) -> Path:
    """As llama-quantize makes files: some tensors have more bits."""
    more = {"attn_v", "ffn_down"}
    kinds = {name: Type.Q3_K if name in more else Type.Q2_K for name in SHAPES}
    return written(folder, tmp_path / "model.gguf", kinds)


@KINDS
def test_every_value_is_read(kind: Type, folder: Path, tmp_path: Path) -> None:
    file = written(folder, tmp_path / "model.gguf", {"ffn_up": kind, "ffn_down": kind, "attn_v": kind})
    checkpoint = open_checkpoint(file)
    values = {name: gguf.dequantize(random_blocks(kind, *SHAPES[name], 0), kind) for name in SHAPES}
    rest = np.stack([values["ffn_up"], values["ffn_down"].T], axis=1)
    np.testing.assert_array_equal(checkpoint.values("layers/0/ffn/rest"), rest)
    np.testing.assert_array_equal(checkpoint.values("layers/0/attention/qkv")[384:], values["attn_v"])


def test_init_writes_q8_and_the_size_in_each_format(mixed: Path, tmp_path: Path) -> None:
    """Second rounding in q4 costs much, whatever blocks the values come from; `init` says what q8 takes instead."""
    notices: list[str] = []
    recipe = tmp_path / "r.toml"
    create_recipe(str(mixed), recipe, notice=notices.append)
    assert read_recipe(recipe).pack.model_dump() == {
        **dict.fromkeys(("embedding", "head", "predictor"), "keep"),
        **dict.fromkeys(("attention", "ffn"), "q8"),
    }
    assert any(line.startswith("ffn: Q2_K and Q3_K, 2.9 bits a value, is quantised again, to q8;") for line in notices)
    # Sizes alone are looked at: random weights lose 5 % in q4.
    recipe.write_text(recipe.read_text().replace("perplexity_increase", "rounding_increase = 0.0\nperplexity_increase"))
    line = next(line for line in notices if line.startswith("the artifact takes about "))
    sizes = re.findall(r"([\d.]+) (KiB|MiB) in (q8|q4|f32)", line)
    assert [name for *_, name in sizes] == ["q8", "q4", "f32"]
    for number, unit, name in sizes:
        recipe.write_text(recipe.read_text().replace('"q8"', f'"{name}"'))
        packed = pack_plain(recipe, tmp_path / "a.pi", **QUIET)
        recipe.write_text(recipe.read_text().replace(f'"{name}"', '"q8"'))
        told = float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]
        assert packed["bytes"] * 0.9 < told < packed["bytes"] + 0.1 * 2**20


def test_the_loss_is_stated(mixed: Path, tmp_path: Path) -> None:
    create_recipe(str(mixed), tmp_path / "r.toml")
    report = pack_plain(tmp_path / "r.toml", tmp_path / "a.pi", **QUIET)
    errors = {row["part"]: (row["format"], row["relative_rms_error"]) for row in report["quantisation"]}
    assert {part: fmt for part, (fmt, _) in errors.items()} == {"attention": "q8", "ffn": "q8"}
    assert all(0.001 < error < 0.02 for _, error in errors.values())
    text = (tmp_path / "r.toml").read_text().replace('"q8"', '"f32"')
    (tmp_path / "r.toml").write_text(text)
    exact = pack_plain(tmp_path / "r.toml", tmp_path / "b.pi", **QUIET)
    assert "quantisation" not in exact
    (tmp_path / "text.md").write_text("once upon a time there was a neuron, and it did not fire " * 4)
    lossy, without = (
        evaluate(tmp_path / name, [tmp_path / "text.md"], mixed, tokens=64, window=32) for name in ("a.pi", "b.pi")
    )
    assert without["perplexity"]["dense"] == pytest.approx(without["perplexity"]["checkpoint"], rel=1e-4)
    assert without["agreement"]["dense"] == 1
    assert lossy["perplexity"]["checkpoint"] == without["perplexity"]["checkpoint"]
    assert abs(lossy["perplexity"]["dense"] / lossy["perplexity"]["checkpoint"] - 1) > 1e-5


def test_keep_is_refused_before_any_stage(mixed: Path) -> None:
    recipe = default_recipe(mixed.name, corpus=["any"])
    with pytest.raises(CheckpointError, match=r"\[pack\] attention = .keep.: .* in Q2_K and Q3_K, which no") as caught:
        recipe_checkpoint(recipe, mixed.parent)
    assert '"q8" or "q4", with a loss that `pack` states' in str(caught.value)


def test_what_lies_on_a_grid_is_kept_and_not_measured(folder: Path, tmp_path: Path) -> None:
    """Whatever blocks hold: requantising random ones of Q4_1 changes some, and `keep` changes none."""
    attention = [name for name in SHAPES if name.startswith("attn")]
    file = written(folder, tmp_path / "model.gguf", {**dict.fromkeys(attention, Type.Q4_1), "ffn_gate": Type.Q5_0})
    checkpoint, name = open_checkpoint(file), "layers/0/attention/qkv"
    assert checkpoint.formats()["attention"] == "q4_1"
    assert not checkpoint.kept_rows(name, "q4").any()
    assert checkpoint.kept_rows("layers/0/ffn/first", "q5").all()
    values, formats = checkpoint.values(name), {**checkpoint.formats(), "ffn": "f16", "predictor": "f16", "head": "f16"}
    np.testing.assert_array_equal(packed_values(checkpoint, formats)(name, values), values)
    assert (as_stored("q4_1", values) != values).any()
    create_recipe(str(file), tmp_path / "r.toml")
    recipe = read_recipe(tmp_path / "r.toml")
    assert recipe.pack.attention == "keep"
    wanted = recipe.pack.model_dump() | {"ffn": "f16"}
    measured = RoundingCheck(checkpoint, recipe, wanted, QUIET["notice"], no_progress)
    assert measured.parts == {"ffn": ["f16"]}
    assert "attention" in replace(measured, wanted=wanted | {"attention": "q5"}).parts


def test_only_the_rows_of_a_block_are_dequantised(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, seen, dequantize = open_checkpoint(mixed), [], gguf.dequantize
    monkeypatch.setattr("pi_compile.checkpoint.checkpoint.BLOCK_BYTES", 4 * 256 * 10)
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: seen.append(len(data)) or dequantize(data, kind))
    for array in ("layers/0/attention/qkv", "layers/0/ffn/first"):
        list(checkpoint.blocks(array))
    assert max(seen) == 10


def test_a_packed_file_runs(mixed: Path, tmp_path: Path) -> None:
    create_recipe(str(mixed), tmp_path / "r.toml")
    pack_plain(tmp_path / "r.toml", tmp_path / "a.pi", **QUIET)
    with Artifact.open(tmp_path / "a.pi") as artifact:
        assert artifact.manifest.formats["ffn"] == "q8"
