"""Tensors in blocks that a number format holds are packed bit for bit."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
from gguf import GGMLQuantizationType as Type
from support.gguf_files import random_blocks, rounded_checkpoint, write_byte_tokenizer, write_gguf
from support.small_project import no_progress

from pi_compile.checkpoint import Checkpoint, open_checkpoint, stored_blocks
from pi_compile.checkpoint.gguf.blocks import taken
from pi_compile.errors import CheckpointError
from pi_compile.packing import ALL_KEPT, PackSpec, pack
from pi_compile.pipeline.packed import pack_model, pack_plain
from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.pipeline.recipe_checkpoint import create_recipe
from pi_compile.pipeline.stages import train_spec
from pi_runtime import load
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.quantisation import as_stored, dequantise, pack_rows
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS, WHOLE
from pi_runtime.kernels import reference

GRIDS = {Type.Q4_0: "q4", Type.Q4_1: "q4_1", Type.Q5_0: "q5", Type.Q8_0: "q8", Type.Q5_1: "q5_1"}
GROUPED = {Type.Q4_K: "q4_k", Type.Q5_K: "q5_k", Type.Q6_K: "q6_k"}
TABLES = {kind: kind.name.lower() for kind in (Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4, Type.NVFP4)}
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


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_formats_with_more_bits_hold_the_same(folder: Path, tmp_path: Path, kind: Type) -> None:
    checkpoint, name = opened(folder, tmp_path / "model.gguf", kind), "layers/0/attention/qkv"
    own, meant = FORMATS[GRIDS[kind]], checkpoint.values(name)
    for fmt in (FORMATS[name] for name in WEIGHT_FORMATS if FORMATS[name].quantised):
        wider = fmt.bits >= own.bits and fmt.offset == own.offset and fmt.summed
        assert checkpoint.keeps(name, fmt.name) == wider, fmt.name
        if wider:
            np.testing.assert_array_equal(
                np.concatenate(list(stored_blocks.as_stored(checkpoint, name, fmt.name))), meant
            )


def test_a_byte_without_a_counterpart_is_rounded(folder: Path, tmp_path: Path) -> None:
    """No quantiser writes −128, which q8 does not have."""
    blocks = random_blocks(Type.Q8_0, 256, 256, 0)
    tensors = {"blk.0.attn_output.weight": (blocks, Type.Q8_0)}
    write_gguf(folder, tmp_path / "model.gguf", "f16", tensors=tensors)
    assert open_checkpoint(tmp_path / "model.gguf").keeps("layers/0/attention/out", "q8")
    blocks[77, 34 * 3 + 2 + 5] = 128
    write_gguf(folder, tmp_path / "model.gguf", "f16", tensors=tensors)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert not checkpoint.keeps("layers/0/attention/out", "q8")
    pack(checkpoint, PackSpec(formats=dict.fromkeys(PARTS, "q8")), output=tmp_path / "a.pi", recipe={})
    with Artifact.open(tmp_path / "a.pi") as artifact:
        meant = checkpoint.values("layers/0/attention/out")
        np.testing.assert_array_equal(artifact.values("layers/0/attention/out"), as_stored("q8", meant))


MIXED = {
    "attention": ({"attn_q": Type.Q5_0, "attn_k": Type.Q4_0, "attn_v": Type.Q8_0, "attn_output": Type.Q5_0}, "q8"),
    "ffn": ({"ffn_gate": Type.Q4_1, "ffn_up": Type.Q4_0, "ffn_down": Type.Q8_0}, "q8"),
}


def test_each_matrix_keeps_the_least_that_holds_its_tensors(folder: Path, tmp_path: Path) -> None:
    """What llama.cpp's quantiser mixes within a part: nothing is rounded, and that is said."""
    kinds = {name: kind for part, _ in MIXED.values() for name, kind in part.items()}
    blocks = {f"blk.0.{n}.weight": (random_blocks(kind, *SHAPES[n], 0), kind) for n, kind in kinds.items()}
    write_gguf(folder, tmp_path / "model.gguf", "f16", tensors=blocks)
    said: list[str] = []
    pack_model(str(tmp_path / "model.gguf"), tmp_path / "a.pi", progress=no_progress, notice=said.append)
    assert ALL_KEPT in said
    assert not any("measuring" in line for line in said)
    checkpoint = open_checkpoint(tmp_path / "model.gguf").in_layout(WHOLE)
    with Artifact.open(tmp_path / "a.pi") as artifact:
        formats = artifact.manifest.formats
        assert {part: formats[part] for part in MIXED} == {part: fmt for part, (_, fmt) in MIXED.items()}
        assert {name: fmt for name, fmt in formats.items() if "/" in name} == {
            "layers/0/attention/out": "q5",
            "layers/0/ffn/first": "q4_1",
            "layers/0/ffn/up": "q4",
        }
        for name in checkpoint.array_shapes:
            np.testing.assert_array_equal(artifact.values(name), checkpoint.values(name))


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_no_number_is_refused(folder: Path, tmp_path: Path, kind: Type, bad: float) -> None:
    blocks = random_blocks(kind, *SHAPES["attn_output"], 0)
    blocks[200, :2] = np.array([bad], "<f2").view(np.uint8)
    tensors = {"blk.0.attn_output.weight": (blocks, kind)}
    write_gguf(folder, tmp_path / "model.gguf", "f16", tensors=tensors)
    formats = dict.fromkeys(PARTS, "f16") | {"attention": GRIDS[kind]}
    with pytest.raises(CheckpointError, match=r"attn_output\.weight holds NaN or infinity"):
        pack(open_checkpoint(tmp_path / "model.gguf"), PackSpec(formats=formats), output=tmp_path / "a.pi", recipe={})
    assert not (tmp_path / "a.pi").exists()


def test_other_formats_are_quantised(folder: Path, tmp_path: Path) -> None:
    checkpoint = opened(folder, tmp_path / "model.gguf", Type.Q4_1)
    formats = dict.fromkeys(PARTS, "q8")
    pack(checkpoint, PackSpec(formats=formats), output=tmp_path / "a.pi", recipe={})
    with Artifact.open(tmp_path / "a.pi") as artifact:
        meant = checkpoint.values("layers/0/ffn/first")
        np.testing.assert_array_equal(artifact.values("layers/0/ffn/first"), as_stored("q8", meant))


@pytest.mark.parametrize(("kind", "fmt"), (GRIDS | GROUPED | TABLES).items(), ids=(GRIDS | GROUPED | TABLES).values())
def test_random_bytes_mean_what_ggml_says(kind: Type, fmt: str) -> None:
    """Any bytes, scales that are no numbers among them."""
    columns, nbytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (64, 1536 // columns * nbytes), np.uint8)
    if kind == Type.MXFP4:  # 255 is no number here, 2¹²⁸ there
        data[:, ::17][data[:, ::17] == 255] = 0
    with np.errstate(all="ignore"):
        meant, f = gguf.dequantize(data, kind), FORMATS[fmt]
        np.testing.assert_array_equal(dequantise(f, *pack_rows(f, *taken(f, data)), 1536), meant)
    assert np.isnan(meant).any() == (not f.byte_scale)
    assert np.isfinite(meant).mean() > 0.5


def mixed(folder: Path, path: Path, kinds: dict[str, Type]) -> Path:
    """A file with a type for each tensor of the layer, and an embedding in Q6_K."""
    blocks = {f"blk.0.{n}.weight": (random_blocks(kinds[n], *SHAPES[n], 0), kinds[n]) for n in SHAPES}
    write_gguf(folder, path, "f16", tensors=blocks)
    return path


@pytest.mark.parametrize("apart", [(), ("attn_v",), ("attn_k", "attn_v"), ("attn_k",)])
def test_whole_matrices_keep_their_types(folder: Path, tmp_path: Path, apart: tuple[str, ...]) -> None:
    """What llama-quantize makes as Q4_K_M: values, or keys too, and `down` have more bits than the others."""
    kinds = dict.fromkeys(SHAPES, Type.Q4_K) | {"ffn_down": Type.Q6_K} | dict.fromkeys(apart, Type.Q5_K)
    checkpoint = open_checkpoint(mixed(folder, tmp_path / "model.gguf", kinds)).in_layout(WHOLE)
    pack_model(str(tmp_path / "model.gguf"), tmp_path / "a.pi", progress=no_progress, notice=lambda _: None)
    names = ["k", "v"][-len({*apart, "attn_v"}) :] if apart else []
    with Artifact.open(tmp_path / "a.pi") as artifact:
        m = artifact.manifest
        assert ("formats.apart" in m.features) == bool(apart)
        assert [n for n in ("k", "v") if f"layers/0/attention/{n}" in m.arrays] == names
        assert {m.formats[f"layers/0/ffn/{n}"] for n in ("first", "up")} == {"q4_k"}
        parts = [artifact.values(f"layers/0/attention/{name}") for name in ("qkv", *names)]
        np.testing.assert_array_equal(np.concatenate(parts), checkpoint.values("layers/0/attention/qkv"))
        for name in ("attention/out", "ffn/first", "ffn/up", "ffn/down"):
            np.testing.assert_array_equal(artifact.values(f"layers/0/{name}"), checkpoint.values(f"layers/0/{name}"))
        wanted_TV = reference.forward(artifact, [1, 5, 9, 11], "dense")
    with load(tmp_path / "a.pi") as model:
        found_TV = model.logits([1, 5, 9, 11])
    assert np.median(np.abs(found_TV - wanted_TV)) < 0.02 * np.abs(wanted_TV).max()


@pytest.mark.parametrize("number", [0x7C00, 0xFC00, 0x7E00, 0x7D00], ids=["inf", "-inf", "NaN", "signalling NaN"])
def test_a_number_of_a_group_that_is_none_is_refused(folder: Path, tmp_path: Path, number: int) -> None:
    """Also where the integers beside it are 0, whose product with it is no number either."""
    places = [(kind, at) for kind in GROUPED for at in ((208,) if kind == Type.Q6_K else (0, 2))]
    for kind, place in places:
        data = random_blocks(kind, *SHAPES["ffn_up"], 0)
        data[7, place : place + 2] = np.frombuffer(number.to_bytes(2, "little"), np.uint8)
        data[7, slice(192, 200) if kind == Type.Q6_K else slice(4, 12)] = 0
        write_gguf(folder, tmp_path / "model.gguf", "f16", tensors={"blk.0.ffn_up.weight": (data, kind)})
        with pytest.raises(CheckpointError, match=r"ffn_up\.weight holds NaN or infinity"):
            pack_model(str(tmp_path / "model.gguf"), tmp_path / "a.pi", progress=no_progress, notice=lambda _: None)


@pytest.mark.parametrize("kind", TABLES, ids=TABLES.values())
def test_tables_are_kept_in_whole_matrices(folder: Path, tmp_path: Path, kind: Type) -> None:
    """The embedding too; what reads them computes what their values say."""
    blocks = {f"blk.0.{n}.weight": (random_blocks(kind, *SHAPES[n], 0), kind) for n in SHAPES}
    rows = gguf.GGUFReader(mixed(folder, tmp_path / "m.gguf", dict.fromkeys(SHAPES, kind))).tensors[0].shape[1]
    blocks["token_embd.weight"] = random_blocks(kind, int(rows), 256, 1), kind
    write_gguf(folder, tmp_path / "model.gguf", "f16", tensors=blocks)
    said: list[str] = []
    pack_model(str(tmp_path / "model.gguf"), tmp_path / "a.pi", progress=no_progress, notice=said.append)
    assert ALL_KEPT in said
    checkpoint = open_checkpoint(tmp_path / "model.gguf").in_layout(WHOLE)
    with Artifact.open(tmp_path / "a.pi") as artifact:
        assert {artifact.manifest.formats[part] for part in ("embedding", "attention", "ffn")} == {TABLES[kind]}
        for name in checkpoint.array_shapes:
            np.testing.assert_array_equal(artifact.values(name), checkpoint.values(name))
        wanted_TV = reference.forward(artifact, [1, 5, 9, 11], "dense")
    with load(tmp_path / "a.pi") as model:
        found_TV = model.logits([1, 5, 9, 11])
    assert np.median(np.abs(found_TV - wanted_TV)) < 0.02 * np.abs(wanted_TV).max()


def test_scales_of_nvfp4_tensors(folder: Path, tmp_path: Path) -> None:
    """One for all of a tensor, as llama.cpp multiplies products with; that of inputs says how they were rounded."""
    kind, name = Type.NVFP4, "blk.0.ffn_up."
    data, factor = random_blocks(kind, *SHAPES["ffn_up"], 0), np.array([0.3], np.float32)
    tensors = {name + "weight": (data, kind)}
    for own in ("scale", "input_scale"):
        tensors[name + own] = factor, Type.F32
    write_gguf(folder, tmp_path / "model.gguf", "f16", tensors=tensors)
    checkpoint = open_checkpoint(tmp_path / "model.gguf").in_layout(WHOLE)
    meant = gguf.dequantize(data, kind) * factor
    np.testing.assert_array_equal(checkpoint.values("layers/0/ffn/up"), meant)
    blocks = stored_blocks.as_stored(checkpoint, "layers/0/ffn/up", "nvfp4")
    np.testing.assert_array_equal(np.concatenate(list(blocks)), meant)
    tensors[name + "scale"] = np.array([np.inf], np.float32), Type.F32
    write_gguf(folder, tmp_path / "model.gguf", "f16", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight holds NaN or infinity"):
        list(
            stored_blocks.as_stored(
                open_checkpoint(tmp_path / "model.gguf").in_layout(WHOLE), "layers/0/ffn/up", "nvfp4"
            )
        )


@pytest.mark.parametrize("kind", [Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4], ids=lambda kind: kind.name)
def test_a_scale_of_a_table_that_is_none_is_refused(folder: Path, tmp_path: Path, kind: Type) -> None:
    """So is a power of two whose multiples no float32 holds."""
    for byte in (0xFF, 0xFE) if kind == Type.MXFP4 else (0x7C,):
        data = random_blocks(kind, *SHAPES["ffn_up"], 0)
        data[7, int(kind != Type.MXFP4)] = byte
        write_gguf(folder, tmp_path / "model.gguf", "f16", tensors={"blk.0.ffn_up.weight": (data, kind)})
        with pytest.raises(CheckpointError, match=r"ffn_up\.weight holds NaN or infinity"):
            pack_model(str(tmp_path / "model.gguf"), tmp_path / "a.pi", progress=no_progress, notice=lambda _: None)


def test_rows_that_are_summed_are_refused(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(mixed(folder, tmp_path / "model.gguf", dict.fromkeys(SHAPES, Type.Q4_K)))
    spec = PackSpec(formats=dict.fromkeys(PARTS, "keep") | {"ffn": "q4_k", "predictor": "q8"})
    with pytest.raises(CheckpointError, match="layers/0/ffn/rest: not in q4_k"):
        pack(checkpoint, spec, output=tmp_path / "a.pi", recipe={})


AGAIN = dict.fromkeys(PARTS, "keep") | {"ffn": "q8", "predictor": "q8"}
"""What `init` writes for a file whose `down` no format keeps by neuron."""


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_what_is_quantised_again_keeps_the_matrices_that_it_can(folder: Path, tmp_path: Path, activation: str) -> None:
    """Without a GPU: `first` of a sparse model, whose `up` and `down` lie by neuron; and all of a model that is not."""
    kinds = dict.fromkeys(SHAPES, Type.Q4_K) | {"ffn_down": Type.Q6_K}
    path = mixed(folder, tmp_path / "model.gguf", kinds)
    checkpoint = open_checkpoint(path, activation=activation)
    result = pack(checkpoint, PackSpec(formats=AGAIN, mixed=True), output=tmp_path / "a.pi", recipe={})
    kept = ("first",) if activation == "relu" else ("first", "up", "down")
    assert (result.errors["ffn"].largest > 0) == (activation == "relu")
    with Artifact.open(tmp_path / "a.pi") as artifact:
        values = {name: artifact.values(f"layers/0/ffn/{name}") for name in kept}
        assert artifact.manifest.formats["ffn"] == "q8"
        wanted_TV = reference.forward(artifact, [1, 5, 9, 11], "auto")
    meant = checkpoint if activation == "relu" else checkpoint.in_layout(WHOLE)
    for name, found in values.items():
        np.testing.assert_array_equal(found, meant.values(f"layers/0/ffn/{name}"))
    with load(tmp_path / "a.pi", device="cpu") as model:
        found_TV = model.logits([1, 5, 9, 11])
    assert np.median(np.abs(found_TV - wanted_TV)) < 0.02 * np.abs(wanted_TV).max()
    pack(checkpoint, PackSpec(formats=AGAIN), output=tmp_path / "gpu.pi", recipe={})
    with Artifact.open(tmp_path / "gpu.pi") as artifact:
        assert {e.format for name, e in artifact.manifest.arrays.items() if name.endswith("ffn/first")} == {"q8"}


def test_a_recipe_is_packed_plain_with_the_blocks_of_its_file(folder: Path, tmp_path: Path) -> None:
    path, said = mixed(folder, tmp_path / "model.gguf", dict.fromkeys(SHAPES, Type.Q4_K)), list[str]()
    create_recipe(str(path), tmp_path / "recipe.toml", notice=said.append)
    assert any("whole matrices, as a plain pack has them, keep it" in line for line in said)
    said.clear()
    pack_plain(tmp_path / "recipe.toml", tmp_path / "a.pi", progress=no_progress, notice=said.append)
    assert ALL_KEPT in said
    pack_model(str(path), tmp_path / "b.pi", progress=no_progress, notice=said.append)
    said.clear()
    (tmp_path / "recipe.toml").write_text((tmp_path / "recipe.toml").read_text().replace('"pc-low"', '"laptop"'))
    with (pipeline := Pipeline(tmp_path / "recipe.toml", "cpu", said.append, no_progress)).worker:
        pipeline.pack(tmp_path / "c.pi")
    assert ALL_KEPT in said  # and no loss is measured that there is not
    arrays = []
    for name in "abc":
        with Artifact.open(tmp_path / f"{name}.pi") as a:
            arrays.append({n: (e.format, e.sha256) for n, e in a.manifest.arrays.items()})
    assert arrays[0] == arrays[1] == arrays[2]


@pytest.mark.parametrize(("activation", "machine"), [("relu", "laptop"), ("silu", "stand-in"), ("silu", "laptop")])
def test_a_dense_layer_is_priced_as_the_blocks_that_it_keeps(
    folder: Path, tmp_path: Path, activation: str, machine: str
) -> None:
    """Skipping in q8 must be quicker than whole matrices in their own 4.5 bits, where these would be stored."""
    checkpoint = open_checkpoint(
        mixed(folder, tmp_path / "model.gguf", dict.fromkeys(SHAPES, Type.Q4_K)), activation=activation
    )
    processor = train_spec(checkpoint, machine, formats=AGAIN, rungs=("dense", "threshold")).processor
    ratio = 8.5 / 4.5 if (activation, machine) == ("silu", "laptop") else 1
    assert processor.rate("q8", "dense") / processor.rate("q8", "gather") == pytest.approx(ratio, rel=0.02)


def test_the_table_of_pack_names_every_format_of_a_part(folder: Path, tmp_path: Path) -> None:
    path = mixed(folder, tmp_path / "model.gguf", dict.fromkeys(SHAPES, Type.Q4_K) | {"ffn_down": Type.Q6_K})
    report = pack_model(str(path), tmp_path / "a.pi", progress=no_progress, notice=lambda _: None)
    assert {row["part"]: row["format"] for row in report["quantisation"]}["ffn"] == "q4_k and q6_k"
