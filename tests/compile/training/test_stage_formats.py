"""Predictors in every number format: what is measured is what is packed, and ranks fit the format's lines."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("zarr")

import numpy as np
import torch
from support import hf
from support.measured import measure_quality
from support.planted import TEXTS, planted, trained_on
from support.synthetic import small_decoder

from pi_compile.checkpoint import Checkpoint
from pi_compile.cost_model.processors import Reads
from pi_compile.files import read_arrays
from pi_compile.packing import PackSpec, pack
from pi_compile.results.activation_profile import ActivationProfile
from pi_compile.results.predictor_set import PredictorSet
from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.predictor import DENSE, Predictor, SparseFfn, energy
from pi_compile.training.candidates import BYTES, LOST_ENERGY, ValueHistogram, initial_ranks
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import PARTS, FfnBytes, array_specs


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ActivationProfile]:
    return planted(tmp_path_factory.mktemp("sparse"), tmp_path_factory.mktemp("counts"))


@pytest.fixture
def run(sparse: Any, tmp_path: Path) -> Callable[..., PredictorSet]:
    return lambda **changes: trained_on(sparse, tmp_path / "work", **changes)


def sparse_ffn(p: Predictor | None) -> SparseFfn:
    return DENSE if p is None else SparseFfn(Layer(rung="predicted", rank=p.up.shape[1]), p)


def as_predictor(arrays: Any) -> Predictor:
    return Predictor(*map(torch.from_numpy, arrays))


@pytest.mark.parametrize(("name", "rank"), [("bf16", 32), ("q8", 64), pytest.param("q4", 128, marks=pytest.mark.more)])
def test_everything_is_measured_on_predictors_as_stored(
    run: Callable[..., PredictorSet], sparse: Any, tmp_path: Path, name: str, rank: int
) -> None:
    """Thresholds, the choice and what is reported; ranks fill whole cache lines of the format."""
    trained = run(predictor_formats=(name,))
    assert trained.ranks == (rank, None, rank)
    tune, report = (td.windows(t, 32) for t in (TEXTS.tune, TEXTS.report))
    tune = tune[: -(len(tune) // 4)]  # the rest corrects the choice
    raw = [p and as_predictor(p) for p in trained.predictors]
    stored = [sparse_ffn(p and p.stored_as(name)) for p in raw]
    quality = measure_quality(sparse[0], report, stored, tmp_path / "report")
    neuron = FfnBytes(sparse[0].decoder, "f16", name)
    assert trained.perplexity["report"] == quality.perplexity
    assert trained.rows[0] == quality.layers[0].row(neuron, BYTES, stored[0].layer)
    rounded = measure_quality(sparse[0], tune, stored, tmp_path / "rounded")
    exact = measure_quality(sparse[0], tune, [sparse_ffn(p) for p in raw], tmp_path / "exact")
    assert exact.perplexity != rounded.perplexity == trained.perplexity["tune"]

    fitted = read_arrays(tmp_path / "work" / "layer-0.npz")
    whole = as_predictor([fitted[f"trained-{rank}/{part}"] for part in ("down", "up", "bias")]).stored_as(name)
    w = td.layer_weights(sparse[0], 0, "cpu")
    with torch.inference_mode():
        x = td.embed(sparse[0].decoder, td.global_weights(sparse[0], "cpu"), tune)
        inputs = td.before_ffn(sparse[0].decoder, w, x)[1].flatten(0, 1)
        lost = energy(td.neurons(sparse[0].decoder, w, inputs), w)
        histogram = ValueHistogram()
        histogram.add(whole.scores(inputs)[lost > 0], lost[lost > 0])
        wanted = [histogram.threshold(fraction) for fraction in LOST_ENERGY]
    tried = json.loads(str(fitted["candidates"]))
    found = [c["score_threshold"] for c in tried if (c["layer"]["rank"], c["trained"]) == (rank, True)]
    assert found == pytest.approx(sorted(set(wanted)), rel=2**-6)  # a bin


@pytest.mark.parametrize("name", ["f16", "q8", "q4"])
def test_what_was_measured_is_what_is_packed(
    run: Callable[..., PredictorSet], sparse: Any, tmp_path: Path, name: str
) -> None:
    checkpoint, profile = sparse
    hf.write_tokenizer(checkpoint.folder)
    trained = run(predictor_formats=(name,))
    formats = {**dict.fromkeys(PARTS, "keep"), "predictor": name}
    pack(checkpoint, PackSpec(formats=formats), tmp_path / "a.pi", recipe={}, profile=profile, predictor_set=trained)
    stored = as_predictor(trained.predictors[0]).stored_as(name)
    order = profile.order[0]
    with Artifact.open(tmp_path / "a.pi") as artifact:
        np.testing.assert_array_equal(artifact.values("layers/0/predictor/down"), stored.down)
        np.testing.assert_array_equal(artifact.values("layers/0/predictor/up"), stored.up[order])
        np.testing.assert_array_equal(artifact.values("layers/0/predictor/bias"), stored.bias[order])


@pytest.mark.parametrize(("name", "step"), [("f32", 16), ("f16", 32), ("q8", 64), ("q4", 128)])
@pytest.mark.parametrize(("d_model", "d_ff"), [(8, 20), (48, 100), (64, 172), (192, 30), (192, 1024), (512, 2048)])
def test_ranks_fill_lines_and_stay_below_the_width(name: str, step: int, d_model: int, d_ff: int) -> None:
    decoder = small_decoder(n_layers=1, d_model=d_model, d_ff=d_ff)
    rng, order = np.random.default_rng(0), np.arange(d_ff, dtype=np.uint32)[None]
    full = min(d_model, d_ff)
    for most in (5, 50, 100):
        counts = rng.integers(0, most + 1, (1, d_ff)).astype(np.uint64)
        profile = ActivationProfile(decoder=decoder, tokens=100, counts=counts, order=order, inputs="")
        ranks = initial_ranks(decoder, [name], float(profile.density()[0]), float(profile.cumulative_curve(5)[0, 1]))
        assert ranks
        assert ranks == sorted(set(ranks))
        assert all(rank % min(step, full) == 0 and rank <= full for rank in ranks)


@pytest.mark.parametrize("ffn", ["gated", "plain"])
@pytest.mark.parametrize(
    ("ffn_format", "predictor_format"), [("f32", "f16"), ("bf16", "f32"), ("q4", "q8"), ("q8", "q4")]
)
def test_bytes_read_are_those_of_the_artifact(sparse: Any, ffn: str, ffn_format: str, predictor_format: str) -> None:
    """A token that reads every neuron reads whole arrays: `first`, `rest`, and the predictor's three."""
    d = replace(sparse[0].decoder, ffn=ffn, n_layers=1, ffn_bias=False)
    formats = dict.fromkeys(("embedding", "attention", "head"), "f32")
    formats |= {"ffn": ffn_format, "predictor": predictor_format}
    specs = array_specs(d, formats, [40], profiled=False)
    first, rest = (specs[f"layers/0/ffn/{name}"].nbytes_with_scales for name in ("first", "rest"))
    predictor = sum(spec.nbytes for name, spec in specs.items() if "predictor" in name)
    neuron = FfnBytes(d, ffn_format, predictor_format)
    assert Reads.of(neuron, Layer(rung="dense"), 0.5, 0.5).total == first + rest
    assert Reads.of(neuron, Layer(rung="gate"), 1.0, 1.0).total == first + rest
    assert Reads.of(neuron, Layer(rung="gate"), 1.0, 0.0).total == first
    assert Reads.of(neuron, Layer(rung="predicted", rank=40), 1.0, 1.0).total == first + rest + predictor
    assert Reads.of(neuron, Layer(rung="predicted", rank=40), 0.0, 0.0).total == predictor
