"""A packed artifact holds the checkpoint's values, always in the same bytes, without holding the model in memory."""

import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.hf import edit_tensors, random_llama, random_opt, write_tokenizer
from support.long_form import marked_long
from support.rss import layer_bytes, pack_in_child, synthetic_llama
from support.synthetic import stored_plan

from pi_compile.checkpoint import open_checkpoint
from pi_compile.checkpoint.checkpoint import NEURON_ARRAYS
from pi_compile.errors import CheckpointError
from pi_compile.packing import PackResult, PackSpec, pack
from pi_compile.pipeline.summary import pack_report
from pi_compile.results import ActivationProfile, QuantisedWeights
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.quantisation import as_stored, dequantise, quantise
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS, is_scales, part_of
from pi_runtime.artifact.verification import verify

KEEP = dict.fromkeys(PARTS, "keep")


def pack_folder(folder: Path, output: Path, formats: dict[str, str] | None = None, **arguments: Any) -> PackResult:
    spec = PackSpec(formats={**KEEP, **(formats or {})})
    return pack(open_checkpoint(folder), spec, output, **{"recipe": {}, **arguments})


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-fp32": (random_llama, {}),
    "llama-bf16-tied-sharded": (
        random_llama,
        {"dtype": torch.bfloat16, "tie_word_embeddings": True, "shard": "20KB"},
    ),
    "llama-fp16-biases-silu": (
        random_llama,
        {"dtype": torch.float16, "attention_bias": True, "mlp_bias": True, "hidden_act": "silu"},
    ),
    "opt-fp32": (random_opt, {}),
    "opt-fp16-untied-bin": (random_opt, {"dtype": torch.float16, "tie_word_embeddings": False, "pickled": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_kept_formats_hold_every_value_exactly(tmp_path: Path, case: str) -> None:
    make, overrides = CASES[case]
    make(tmp_path, **overrides)
    result = pack_folder(tmp_path, tmp_path / "model.pi")
    checkpoint = open_checkpoint(tmp_path)
    kept = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(overrides.get("dtype"), "f32")
    assert set(result.manifest.formats.values()) == {kept}
    verify(result.path)
    with Artifact.open(result.path) as artifact:
        assert artifact.manifest.arrays.keys() == checkpoint.array_shapes.keys()
        for name, shape in checkpoint.array_shapes.items():
            assert artifact.manifest.arrays[name].format == (kept if len(shape) > 1 else "f32")
            np.testing.assert_array_equal(artifact.values(name), checkpoint.values(name))


@pytest.mark.parametrize(
    "chosen", [("f16", "bf16", "f16", "bf16", "f32"), ("q8", "q4", "q8", "f16", "q4"), ("q4", "q8", "q4", "q4", "q8")]
)
@pytest.mark.parametrize("make", [random_llama, random_opt])
def test_formats_can_be_chosen_part_by_part(tmp_path: Path, make: Any, chosen: tuple[str, ...]) -> None:
    make(tmp_path, tie_word_embeddings=False)
    formats = dict(zip(("embedding", "attention", "ffn", "head", "predictor"), chosen, strict=True))
    result = pack_folder(tmp_path, tmp_path / "model.pi", formats)
    assert result.manifest.formats == formats
    verify(result.path)
    checkpoint = open_checkpoint(tmp_path)
    with Artifact.open(result.path) as artifact:
        assert {n for n in artifact.manifest.arrays if not is_scales(n)} == checkpoint.array_shapes.keys()
        for name, shape in checkpoint.array_shapes.items():
            entry = artifact.manifest.arrays[name]
            assert entry.format == (formats[part_of(name) or ""] if len(shape) > 1 else "f32")
            np.testing.assert_array_equal(artifact.values(name), as_stored(entry.format, checkpoint.values(name)))


def test_a_tied_head_and_positions_have_the_embeddings_format(tmp_path: Path) -> None:
    random_opt(tmp_path)
    manifest = pack_folder(tmp_path, tmp_path / "model.pi", {"embedding": "q4", "head": "q8"}).manifest
    assert manifest.formats == {"embedding": "q4", "attention": "f32", "ffn": "f32", "head": "q4", "predictor": "f32"}
    assert (manifest.arrays["embedding"].format, manifest.arrays["positions"].format) == ("q4", "q4")
    assert "head" not in manifest.arrays
    assert {"embedding_scales", "positions_scales"} <= manifest.arrays.keys()


def test_predictors_keep_the_format_of_the_ffn(tmp_path: Path) -> None:
    random_llama(tmp_path)
    assert pack_folder(tmp_path, tmp_path / "model.pi", {"ffn": "q4"}).manifest.formats["predictor"] == "q4"


def test_the_error_of_quantising_is_reported_part_by_part(tmp_path: Path) -> None:
    random_llama(tmp_path)
    result = pack_folder(tmp_path, tmp_path / "model.pi", {"embedding": "q8", "ffn": "q4"})
    checkpoint, formats = open_checkpoint(tmp_path), {"embedding": "q8", "ffn": "q4"}
    assert result.errors.keys() == formats.keys()
    for part, fmt in formats.items():
        names = [n for n, shape in checkpoint.array_shapes.items() if part_of(n) == part and len(shape) > 1]
        values = [checkpoint.values(n).astype(float) for n in names]
        errors = [as_stored(fmt, v.astype("f4")) - v for v in values]
        found = result.errors[part]
        squares, of = (sum(float(np.square(a).sum()) for a in arrays) for arrays in (errors, values))
        assert found.relative == pytest.approx(math.sqrt(squares / of), rel=1e-5)
        assert found.largest == pytest.approx(max(float(np.abs(e).max()) for e in errors), rel=1e-5)
    assert pack_report(result)["quantisation"] == [
        {
            "part": part,
            "format": formats[part],
            "relative_rms_error": result.errors[part].relative,
            "largest_error": result.errors[part].largest,
        }
        for part in ("embedding", "ffn")
    ]
    assert 0.001 < result.errors["embedding"].relative < 0.01 < result.errors["ffn"].relative < 0.2


def test_nothing_is_reported_where_nothing_is_quantised(tmp_path: Path) -> None:
    random_llama(tmp_path)
    result = pack_folder(tmp_path, tmp_path / "model.pi", {"embedding": "f16", "predictor": "q4"})
    assert result.errors == {}
    assert pack_report(result).keys() == {"artifact", "bytes", "sha256"}


def test_a_part_of_mixed_formats_keeps_all_values(tmp_path: Path) -> None:
    random_llama(tmp_path, dtype=torch.float16)
    up = torch.full((83, 48), 1e-9)
    edit_tensors(tmp_path, model__layers__0__mlp__up_proj__weight=up)
    manifest = pack_folder(tmp_path, tmp_path / "model.pi").manifest
    assert (manifest.formats["ffn"], manifest.formats["attention"]) == ("f32", "f16")


@pytest.mark.parametrize(("activation", "rung"), [("relu", "gate"), ("silu", "dense")])
def test_rungs_are_exact(tmp_path: Path, activation: str, rung: str) -> None:
    random_llama(tmp_path, hidden_act=activation)
    manifest = pack_folder(tmp_path, tmp_path / "model.pi").manifest
    assert [layer.rung for layer in manifest.layers] == [rung] * 3


@pytest.mark.parametrize("fmt", ["keep", "q8", "q4"])
def test_the_same_input_gives_the_same_bytes_anywhere(tmp_path: Path, fmt: str) -> None:
    for name in ("a", "b"):
        random_llama(tmp_path / name / "model")
    one = pack_folder(tmp_path / "a" / "model", tmp_path / "one.pi", dict.fromkeys(PARTS, fmt))
    two = pack_folder(tmp_path / "b" / "model", tmp_path / "two.pi", dict.fromkeys(PARTS, fmt))
    assert one.sha256 == two.sha256
    assert one.path.read_bytes() == two.path.read_bytes()
    assert str(tmp_path).encode() not in one.path.read_bytes()


@pytest.mark.parametrize("fmt", ["keep", "q4"])
def test_what_is_reported_is_what_was_written(tmp_path: Path, fmt: str) -> None:
    random_llama(tmp_path)
    calls: list[tuple[int, int]] = []
    plan = stored_plan((0, 0, 0), 1 << 20, 0)
    result = pack_folder(
        tmp_path,
        tmp_path / "model.pi",
        dict.fromkeys(PARTS, fmt),
        recipe={"model": {"path": "."}},
        plans=[plan],
        progress=lambda done, total: calls.append((done, total)),
    )
    assert result.nbytes == result.path.stat().st_size
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (sum(a.nbytes for a in result.manifest.arrays.values()),) * 2
    with Artifact.open(result.path) as artifact:
        assert artifact.manifest == result.manifest
    assert result.manifest.recipe == {"model": {"path": "."}}
    assert result.manifest.plans == (plan,)
    assert result.manifest.provenance["checkpoint"]["digest"] == open_checkpoint(tmp_path).digest()


@pytest.mark.parametrize("fmt", ["f32", "q8", "q4"])
def test_a_profile_orders_the_neurons_and_travels_inside(tmp_path: Path, fmt: str) -> None:
    random_llama(tmp_path, mlp_bias=True)
    checkpoint = open_checkpoint(tmp_path)
    counts = np.random.default_rng(0).integers(0, 100, (3, 83)).astype(np.uint64)
    order = np.argsort(-counts.astype(np.int64), axis=1, kind="stable").astype(np.uint32)
    profile = ActivationProfile(decoder=checkpoint.decoder, tokens=100, counts=counts, order=order, inputs="")
    result = pack_folder(tmp_path, tmp_path / "model.pi", {"ffn": fmt}, profile=profile)
    assert result.manifest.profiled_tokens == 100
    with Artifact.open(result.path) as artifact:
        for n in range(3):
            np.testing.assert_array_equal(artifact.values(f"layers/{n}/ffn/order"), order[n])
            np.testing.assert_array_equal(artifact.values(f"layers/{n}/ffn/counts"), counts[n][order[n]])
            for name, values in checkpoint.layer_values(n).items():
                ordered = values[order[n]] if name in NEURON_ARRAYS else values
                expected = as_stored(fmt if name in ("ffn/first", "ffn/rest") else "f32", ordered)
                np.testing.assert_array_equal(artifact.values(f"layers/{n}/{name}"), expected)


def test_matrices_that_are_rounded_already_are_stored_as_they_are(tmp_path: Path) -> None:
    """In the order of the profile; and the error is told."""
    random_llama(tmp_path)
    checkpoint, q4 = open_checkpoint(tmp_path), FORMATS["q4"]
    rng = np.random.default_rng(0)
    rounded = {
        f"layers/{n}/{name}": quantise(
            q4, rng.standard_normal(checkpoint.array_shapes[f"layers/{n}/{name}"], np.float32)
        )
        for n, name in product(range(3), ("ffn/first", "ffn/rest"))
    }
    quantised = QuantisedWeights(tuple(rounded), rounded.__getitem__, "")
    counts = np.tile(np.arange(83, dtype=np.uint64), (3, 1))
    order = np.ascontiguousarray(np.tile(np.arange(83, dtype=np.uint32)[::-1], (3, 1)))
    profile = ActivationProfile(decoder=checkpoint.decoder, tokens=100, counts=counts, order=order, inputs="")
    spec = {"ffn": "q4", "attention": "q4"}
    result = pack_folder(tmp_path, tmp_path / "model.pi", spec, profile=profile, quantised=quantised)
    verify(result.path)
    assert result.errors["ffn"].relative > 1  # values that have nothing to do with the checkpoint's
    assert 0.05 < result.errors["attention"].relative < 0.12
    with Artifact.open(result.path) as artifact:
        for name, stored in rounded.items():
            expected = dequantise(q4, *stored, checkpoint.decoder.d_model)[::-1]
            np.testing.assert_array_equal(artifact.values(name), expected)


@pytest.mark.parametrize(("fmt", "largest"), [("f16", 65520.0), ("q4", 65520.0 * 8), ("q8", 65520.0 * 127)])
def test_values_too_large_for_the_format(tmp_path: Path, fmt: str, largest: float) -> None:
    random_llama(tmp_path)
    v = torch.zeros(10, 48)
    v[3, 4] = -largest
    edit_tensors(tmp_path, model__layers__1__self_attn__v_proj__weight=v)
    (tmp_path / "model.pi").write_bytes(b"an older artifact")
    with pytest.raises(CheckpointError) as caught:
        pack_folder(tmp_path, tmp_path / "model.pi", {"attention": fmt})
    assert f"values of model.layers.1.self_attn.v_proj.weight are too large for {fmt}" in str(caught.value)
    assert '[pack] attention = "bf16"' in str(caught.value)
    assert caught.value.exit_code == 3
    assert (tmp_path / "model.pi").read_bytes() == b"an older artifact"
    pack_folder(tmp_path, tmp_path / "model.pi", {"attention": "bf16"})


@pytest.mark.parametrize("fmt", ["f16", "q8", "q6", "q5", "q4", "q4_1", "q4z", "q5_1"])
@pytest.mark.parametrize(
    ("others", "refused"), [(0.0, True), (20.0, True), (200.0, False)], ids=["all", "a notable share", "few"]
)
def test_values_too_small_for_the_format(tmp_path: Path, fmt: str, others: float, refused: bool) -> None:
    random_llama(tmp_path)
    small = FORMATS[fmt].underflows_below / 2
    v = torch.full((10, 48), small)
    v[3] = others * small
    (tmp_path / "model.pi").write_bytes(b"an older artifact")
    edit_tensors(tmp_path, model__layers__1__self_attn__v_proj__weight=v)
    q = torch.zeros(30, 48)  # of the same array
    edit_tensors(tmp_path, model__layers__1__self_attn__q_proj__weight=q, model__layers__1__self_attn__k_proj__weight=v)
    if refused:
        with pytest.raises(CheckpointError) as caught:
            pack_folder(tmp_path, tmp_path / "model.pi", {"attention": fmt})
        assert f"model.layers.1.self_attn.v_proj.weight are too small for {fmt}" in str(caught.value)
        assert "of Σ w² in values that it stores as 0, or with less than three bits" in str(caught.value)
        assert '[pack] attention = "bf16"' in str(caught.value)
        assert caught.value.exit_code == 3
        assert (tmp_path / "model.pi").read_bytes() == b"an older artifact"
    else:
        pack_folder(tmp_path, tmp_path / "model.pi", {"attention": fmt})
    pack_folder(tmp_path, tmp_path / "model.pi", {"attention": "bf16"})


def test_a_checkpoint_with_nan_leaves_nothing_behind(tmp_path: Path) -> None:
    random_llama(tmp_path / "model")
    edit_tensors(tmp_path / "model", model__norm__weight=torch.full((48,), float("nan")))
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight holds NaN"):
        pack_folder(tmp_path / "model", tmp_path / "model.pi")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("fmt", marked_long(["keep", "q4"], ["keep"]))
def test_memory_does_not_grow_with_the_model(tmp_path: Path, fmt: str) -> None:
    """Peak anonymous memory ≤ 2 layers + 500 MB; above what importing takes, far less than embedding or model."""
    shape = {"d_model": 512, "d_ff": 2048, "n_layers": 4, "vocab_size": 100_000}
    synthetic_llama(tmp_path / "model", **shape, dtype=torch.bfloat16, per_shard=2)
    write_tokenizer(tmp_path / "model")
    measured = pack_in_child(tmp_path / "model", tmp_path / "model.pi", fmt)
    layer = layer_bytes(512, 2048, 2)
    assert measured.peak <= 2 * layer + 500_000_000
    assert measured.peak - measured.before <= 2 * layer + 120_000_000
