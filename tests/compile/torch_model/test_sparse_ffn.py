"""Rungs in torch against their definition in the runtime, and what packing writes of them."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from support import hf
from support.measured import measure_quality
from support.synthetic import small_decoder

from pi_compile.checkpoint import open_checkpoint
from pi_compile.packing import PackSpec, pack
from pi_compile.results.activation_profile import ActivationProfile
from pi_compile.results.predictor_set import PredictorSet
from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.predictor import DENSE, Predictor, SparseFfn
from pi_compile.training.candidates import BYTES
from pi_compile.training.samples import LayerSums
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import PARTS, FfnBytes
from pi_runtime.kernels import reference

D_MODEL, D_FF, RANK = 70, 90, 6
GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((33, D_MODEL)).astype(np.float32)
X[0, :9] = 0
WEIGHTS: dict[str, Any] = {
    "ffn/first": GENERATOR.standard_normal((D_FF, D_MODEL)).astype(np.float32) / 8,
    "ffn/first_bias": GENERATOR.standard_normal(D_FF).astype(np.float32) / 4,
    "ffn/rest": GENERATOR.standard_normal((D_FF, 2, D_MODEL)).astype(np.float32),
    "ffn/up_bias": np.zeros(D_FF, np.float32),
    "ffn/down_bias": GENERATOR.standard_normal(D_MODEL).astype(np.float32),
    "ffn/router": GENERATOR.standard_normal((3, D_MODEL)).astype(np.float32),
    "predictor/down": GENERATOR.standard_normal((RANK, D_MODEL)).astype(np.float32),
    "predictor/up": GENERATOR.standard_normal((D_FF, RANK)).astype(np.float32),
    "predictor/bias": GENERATOR.standard_normal(D_FF).astype(np.float32),
}


class Named(dict[str, Any]):
    """Weights as the reference takes them."""

    def product(self, name: str, x: reference.F32) -> reference.F32:
        return np.tensordot(x, self[name], (-1, -1))


@pytest.mark.parametrize("n_experts", [1, 3])
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "drelu"])
@pytest.mark.parametrize("rung", ["dense", "gate", "threshold", "predicted"])
def test_a_rung_computes_what_its_definition_says(rung: str, activation: str, n_experts: int) -> None:
    d = small_decoder(
        d_model=D_MODEL, d_ff=D_FF // n_experts, n_experts=n_experts, experts_per_token=min(2, n_experts),
        activation=activation, ffn="gated", ffn_bias=True,
    )  # fmt: skip
    numbers = Named(WEIGHTS)
    if n_experts == 1:
        del numbers["ffn/router"]
    else:
        numbers["predictor/down"] = (
            np.tile(WEIGHTS["predictor/down"], (3, 1)) + np.arange(3, dtype=np.float32).repeat(RANK)[:, None] / 9
        )
    layer = Layer(
        rung=rung,
        rank=RANK if rung == "predicted" else None,
        threshold=0.125 if rung == "threshold" else 0.0,
    )
    w = {name: torch.from_numpy(v) for name, v in numbers.items() if not name.startswith("predictor/")}
    p = Predictor(*(torch.from_numpy(numbers[f"predictor/{k}"]) for k in ("down", "up", "bias")))
    ffn = SparseFfn(layer, p if rung == "predicted" else None)
    x = torch.from_numpy(X)
    read, kept = ffn.apply(d, w, x, td.neurons(d, w, x))
    selected = reference.selected(numbers, layer, X)
    assert (read is None) == (selected is None)
    if read is not None and selected is not None:
        taken = np.repeat(reference.routing(d, numbers, X) > 0, d.d_ff, 1)
        assert np.array_equal(read.numpy(), selected & taken)
        assert 0 < read.float().mean() < 1
    wanted = reference.ffn(d, numbers, X, selected, layer.threshold)
    np.testing.assert_allclose(td.ffn_output(w, kept).numpy(), wanted, rtol=1e-3, atol=1e-4)


def test_a_threshold_is_counted_as_what_fires() -> None:
    d = small_decoder(d_model=D_MODEL, d_ff=D_FF, activation="silu")
    w = {name: torch.from_numpy(WEIGHTS[name]) for name in ("ffn/first", "ffn/rest")}
    x, layer, sums = torch.from_numpy(X), Layer(rung="threshold", threshold=0.2), LayerSums.over(D_FF)
    sums.state, place = 1.0, sums.fired.data_ptr()
    h = td.neurons(d, w, x)
    read, kept = SparseFfn(layer).apply(d, w, x, h)
    assert read is None
    sums.add(h, kept, read, w)
    neuron = FfnBytes(d, "f16", "f16")
    row = sums.row(neuron, BYTES, layer)
    share = float((kept != 0).float().mean())
    assert 0.1 < share < 0.9
    assert (row.density, row.recall, row.threshold) == (pytest.approx(share), 1.0, 0.2)
    assert row.ffn_bytes == pytest.approx(D_FF * (neuron.first + share * neuron.rest))
    assert row.gate_bytes == D_FF * (neuron.first + neuron.rest)  # nothing is 0 without the threshold
    assert row.error == pytest.approx(float((td.ffn_output(w, h) - td.ffn_output(w, kept)).square().sum()), rel=1e-4)
    assert np.array_equal(sums.fired.numpy(), (kept != 0).sum(0).numpy())
    assert sums.fired.data_ptr() == place


@pytest.mark.parametrize("ffn_format", ["keep", "q4"])
def test_thresholds_are_packed(tmp_path: Path, ffn_format: str) -> None:
    """The packed artifact, run by the reference, has the losses that were measured."""
    hf.random_llama(tmp_path / "model", hidden_size=72)
    checkpoint = open_checkpoint(tmp_path / "model")
    d = checkpoint.decoder
    layers = [Layer(rung="gate"), Layer(rung="threshold", threshold=0.0625), Layer(rung="gate")]
    ids = torch.from_numpy(np.random.default_rng(3).integers(3, 130, (2, 16)))
    measure_quality(checkpoint, ids, [DENSE] * 3, tmp_path / "work")
    quality = measure_quality(checkpoint, ids, list(map(SparseFfn, layers)), tmp_path / "work", "sparse")
    neuron = FfnBytes(d, "f32", "f32")
    counts = np.random.default_rng(1).integers(0, 100, (3, d.d_ff)).astype(np.uint64)
    order = np.argsort(-counts.astype(np.int64), axis=1, kind="stable").astype(np.uint32)
    trained = PredictorSet(
        rows=tuple(s.row(neuron, BYTES, layer) for s, layer in zip(quality.layers, layers, strict=True)),
        predictors=(None,) * 3,
        predictor_format="f32",
        counts=(None, quality.layers[1].fired.numpy().astype(np.uint64), None),
        counted_tokens=32,
        perplexity={},
        inputs="",
    )
    profile = ActivationProfile(decoder=d, tokens=100, counts=counts, order=order, inputs="")
    refined = trained.refine(profile)
    assert np.array_equal(refined.counts[1], quality.layers[1].fired.numpy() * 100 // 32)
    assert (np.diff(refined.ordered_counts()[1].astype(np.int64).reshape(-1)[:64]) <= 0).all()
    assert np.array_equal(refined.counts[::2], counts[::2])
    formats = {**dict.fromkeys(PARTS, "keep"), "ffn": ffn_format}
    pack(checkpoint, PackSpec(formats=formats), tmp_path / "a.pi", recipe={}, profile=refined, predictor_set=trained)
    with Artifact.open(tmp_path / "a.pi") as artifact:
        assert list(artifact.manifest.layers) == layers
        if ffn_format == "keep":
            logits = torch.from_numpy(np.stack([reference.forward(artifact, row, "predicted") for row in ids.numpy()]))
            losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)
            np.testing.assert_allclose(losses.numpy(), quality.losses.numpy(), rtol=1e-5)
