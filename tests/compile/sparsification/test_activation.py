"""The FFNs with another activation: their function, the penalty's gradient, and what is counted."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch

from pi_compile.recipe import ModelSection
from pi_compile.sparsification.activation import Activation, FfnActivity, LayerActivity
from pi_compile.sparsification.evaluation import evaluate
from pi_compile.sparsification.model import load_model, open_base
from pi_compile.sparsification.training import recompute_layers

GATE, UP = torch.tensor([-1.0, 0.05, 0.5, 2.0]), torch.tensor([3.0, 1.0, -1.0, 2.0])
VALUES = {
    "relu": [0.0, 0.05, -0.5, 4.0],
    "drelu": [0.0, 0.05, 0.0, 4.0],
    "relu2": [0.0, 0.0025, -0.25, 8.0],
    "fatrelu": [0.0, 0.0, -0.5, 4.0],
}


def installed(bases: Path, name: str = "model", activation: str = "relu") -> tuple[Any, FfnActivity]:
    model = load_model(open_base(ModelSection(path=name, revision="", ignore_config=[]), bases))
    activity = FfnActivity(Activation(activation))
    activity.install(model)
    return model, activity


@pytest.mark.parametrize("name", VALUES)
def test_activations(name: str) -> None:
    found = Activation(name, 0.1 if name == "fatrelu" else 0.0)(GATE, UP)
    assert found.tolist() == pytest.approx(VALUES[name])


def test_the_penalty_has_the_gradient_of_its_sum() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(5, 7, requires_grad=True) for _ in range(2))
    activity, layer = FfnActivity(Activation("relu")), LayerActivity(7, 1, Activation("relu"))
    activity.penalty = 0.3
    weight = torch.randn(5, 7)
    (activity.neurons(gate, up, layer) * weight).sum().backward()
    found = gate.grad, up.grad
    gate.grad = up.grad = None
    h = gate.relu() * up
    ((h * weight).sum() + 0.3 * h.abs().sum()).backward()
    for gradient, wanted in zip(found, (gate.grad, up.grad), strict=True):
        assert torch.allclose(gradient, wanted)


@pytest.mark.parametrize("name", ["model", "qwen3", "mixtral"])
def test_counts_are_those_of_the_neurons(bases: Path, name: str) -> None:
    model, activity = installed(bases, name)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad(), activity.observed(count_each=True) as layers:
        model(ids)
    each = [layer.fired_XF.clone() for layer in layers]
    with torch.no_grad(), activity.observed(count_each=False) as layers:
        model(ids)
    assert len(layers) == model.config.num_hidden_layers
    for counted, layer in zip(each, layers, strict=True):
        assert int(counted.sum()) == int(layer.fired)
        assert layer.values * len(layers) == 16 * activity.values_per_token()
        assert 0 < int(layer.fired) < layer.values


def test_a_layer_that_is_computed_twice_is_penalised_and_counted_once(bases: Path) -> None:
    found = []
    for twice in (False, True):
        model, activity = installed(bases)
        if twice:
            recompute_layers(model)
        activity.penalty = 0.01
        with activity.observed(count_each=False) as layers:
            logits = model.train()(torch.arange(3, 19)[None]).logits
        logits.square().mean().backward()
        gradient = model.model.layers[0].mlp.gate_proj.weight.grad
        found.append((gradient, [int(layer.fired) for layer in layers]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_experts_compute_what_stock_experts_do(bases: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, _ = installed(bases, "mixtral")
    stock = AutoModelForCausalLM.from_pretrained(bases / "mixtral", hidden_act="relu")
    stock.config._experts_implementation = "eager"
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 100, (2, 30)))
    with torch.no_grad():
        assert (model(ids).logits - stock(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["model", "qwen3", "mixtral"])
def test_layers_come_to_share_a_threshold(bases: Path, name: str) -> None:
    model, activity = installed(bases, name, "fatrelu")
    activity.thresholds = [0.001, 0.2][: len(activity.layers)]
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        activity.share_threshold(model)
        assert (model(ids).logits - wanted).abs().max() < 1e-5
    assert activity.thresholds == pytest.approx([math.sqrt(0.001 * 0.2)] * 2)


def test_a_process_without_windows_hands_over_counts_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a GPU cannot add up what lies elsewhere."""
    reduced: list[torch.device] = []

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        reduced.append(tensor.device)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    device = torch.device("meta")
    accelerator = SimpleNamespace(device=device, process_index=1, num_processes=2, reduce=reduce)
    activity = FfnActivity(Activation("relu"))
    activity.layers = [LayerActivity(7, 1, Activation("relu"))]
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    evaluate(accelerator, torch.nn.Identity(), activity, np.zeros((1, 8), np.int64))  # type: ignore[arg-type]
    assert reduced == [device, device]
