"""What an error of a weight costs: as plain differentiation says, and about what is measured."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from support import families, hf

from pi_compile.calibration.quantising import sensitivities
from pi_compile.calibration.quantising.loss import Sensitivity, rounded
from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.torch_model import decoder as td
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.sizes import ALL_MATRICES

IDS = torch.from_numpy(np.random.default_rng(0).integers(3, 130, (6, 24)))


@pytest.fixture(params=["llama", "opt", "mixtral"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    if request.param == "mixtral":
        families.random_checkpoint(tmp_path, "mixtral")
    else:
        {"llama": hf.random_llama, "opt": hf.random_opt}[request.param](tmp_path, tokenizer=False)
    return open_checkpoint(tmp_path)


def weights_of(checkpoint: Checkpoint) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    layers = [td.layer_weights(checkpoint, n, "cpu") for n in range(checkpoint.decoder.n_layers)]
    return layers, td.global_weights(checkpoint, "cpu")


def log_p(checkpoint: Checkpoint, layers: list[dict[str, torch.Tensor]], ends: dict[str, torch.Tensor]) -> torch.Tensor:
    d = checkpoint.decoder
    *_, (x,) = td.layers(d, layers, [td.embed(d, ends, IDS)])
    return td.logits(d, ends, x).log_softmax(-1)


def test_the_squares_are_those_of_the_whole_model_at_once(checkpoint: Checkpoint) -> None:
    some = IDS[:2]
    found = sensitivities(checkpoint, some, 1, lambda _done, _all: None)
    layers, ends = weights_of(checkpoint)
    d, generator = checkpoint.decoder, torch.Generator().manual_seed(0)
    leaves = {
        f"layers/{n}/{name}": w[name].requires_grad_()
        for n, w in enumerate(layers)
        for name in ALL_MATRICES
        if name in w
    }
    rows = {name: torch.zeros(leaf.shape[:-1], dtype=torch.float64) for name, leaf in leaves.items()}
    for ids_T in some:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            *_, (x,) = td.layers(d, layers, [td.embed(d, ends, ids_T[None])])
            log_p_TV = td.logits(d, ends, x)[0].log_softmax(-1)
            y = torch.multinomial(log_p_TV.detach().exp(), 1, generator=generator)
            signs = 2 * torch.randint(2, y.shape, generator=generator) - 1
            gradients = torch.autograd.grad((log_p_TV.gather(1, y) * signs).sum(), list(leaves.values()))
        for name, gradient in zip(leaves, gradients, strict=True):
            rows[name] += gradient.double().square().sum(-1) / some.numel()
    for name, expected in rows.items():
        sums = found[name].rows_Rk
        np.testing.assert_allclose(sums, expected.numpy().reshape(sums.shape), rtol=1e-3, atol=1e-9)
        np.testing.assert_allclose(found[name].columns_kD.sum(1), sums.sum(0), rtol=1e-6)


def test_the_divergence_is_about_what_is_measured(checkpoint: Checkpoint) -> None:
    found, q4 = sensitivities(checkpoint, IDS, 1, lambda _done, _all: None), FORMATS["q4"]
    layers, ends = weights_of(checkpoint)
    before, expected = log_p(checkpoint, layers, ends), 0.0
    for n, w in enumerate(layers):
        for name in ALL_MATRICES.keys() & w.keys():
            values, sensitivity = w[name].numpy(), found[f"layers/{n}/{name}"]
            none = np.zeros(values.shape[:-1], bool)
            expected += sensitivity.divergence(q4, values, none)
            assert sensitivity.divergence(q4, values, ~none) == 0
            parts = values.reshape(len(values), -1, values.shape[-1])
            again = [rounded(q4, parts[:, k], sensitivity.importances[k]) for k in range(parts.shape[1])]
            w[name] = torch.from_numpy(np.stack(again, 1).reshape(values.shape))
    measured = float((before.exp() * (before - log_p(checkpoint, layers, ends))).sum(-1).mean())
    assert 0.5 < expected / measured < 2


def test_values_that_a_format_holds_cost_nothing_and_fewer_bits_cost_more() -> None:
    values = np.random.default_rng(1).standard_normal((64, 96), np.float32)
    sensitivity = Sensitivity(np.ones((64, 1)), np.ones((1, 96)))
    costs = [sensitivity.divergence(FORMATS[name], values, np.zeros(64, bool)) for name in ("f32", "q8", "q4")]
    assert costs[0] == 0 < costs[1] < costs[2]
    held = rounded(FORMATS["q4"], values, np.ones(96, np.float32))
    assert sensitivity.divergence(FORMATS["q4"], held, np.zeros(64, bool)) == 0
