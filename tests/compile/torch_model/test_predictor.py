"""Predictors: the warm start is the best low-rank matrix, training lowers the loss, and a threshold becomes a bias."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from hypothesis import given
from hypothesis import strategies as st
from support.synthetic import small_decoder

from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.predictor import (
    MISS_WEIGHT,
    Predictor,
    WarmStarts,
    energy,
    initial_rank,
    routed_neurons,
    second_moment,
    train,
)
from pi_runtime.artifact.decoder import Decoder

D_MODEL, D_FF, SAMPLES = 24, 60, 512


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def anisotropic(n: int, seed: int = 1) -> torch.Tensor:
    """Inputs like hidden states: few directions hold most of the energy, and none is along an axis."""
    turn = torch.linalg.qr(torch.randn(D_MODEL, D_MODEL, generator=seeded(9)))[0]
    return torch.randn(n, D_MODEL, generator=seeded(seed)) * 0.85 ** torch.arange(D_MODEL) @ turn


W = torch.randn(D_FF, D_MODEL, generator=seeded())
B = torch.randn(D_FF, generator=seeded(2))
X = anisotropic(SAMPLES)
MOMENT = second_moment([X], D_MODEL)


def warm_start(first: torch.Tensor, bias: torch.Tensor | None, moment: torch.Tensor, rank: int) -> Predictor:
    return WarmStarts.of(first, bias, moment).at(rank)


def test_the_second_moment_is_that_of_all_blocks() -> None:
    wanted = (X.double().T @ X.double()) / SAMPLES
    torch.testing.assert_close(second_moment(torch.split(X, 100), D_MODEL), wanted, rtol=1e-5, atol=1e-6)


def test_at_full_rank_scores_are_preactivations() -> None:
    for bias in (B, None):
        start = warm_start(W, bias, MOMENT, D_MODEL)
        torch.testing.assert_close(start.scores(X), F.linear(X, W, bias), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 4, 12, 23])
def test_the_error_is_the_tail_of_the_singular_values(rank: int) -> None:
    """Eckart–Young in the inputs' metric: E‖Wx − Ŵx‖² = Σ_{i>R} σ_i² of W C^½."""
    values, vectors = torch.linalg.eigh(MOMENT)
    sigma = torch.linalg.svdvals(W.double() @ (vectors * values.sqrt()))
    start = warm_start(W, None, MOMENT, rank)
    assert (start.down.shape, start.up.shape) == ((rank, D_MODEL), (D_FF, rank))
    error = (X @ W.T - start.scores(X)).double().square().sum(1).mean()
    assert float(error) == pytest.approx(float(sigma[rank:].square().sum()), rel=1e-3)


def test_weighting_by_the_inputs_beats_plain_svd() -> None:
    unseen = anisotropic(SAMPLES, seed=5)
    for rank in (2, 6, 12):
        weighted, plain = (warm_start(W, None, m, rank) for m in (MOMENT, torch.eye(D_MODEL, dtype=torch.float64)))
        errors = [(unseen @ W.T - p.scores(unseen)).square().sum() for p in (weighted, plain)]
        assert errors[0] < 0.6 * errors[1]


def test_inputs_in_a_subspace_do_no_harm() -> None:
    flat = X.clone()
    flat[:, 3:] = 0
    start = warm_start(W, B, second_moment([flat], D_MODEL), 3)
    torch.testing.assert_close(start.scores(flat), F.linear(flat, W, B), rtol=1e-3, atol=1e-3)


def test_a_shifted_predictor_has_its_threshold_at_zero() -> None:
    p = warm_start(W, B, MOMENT, 8)
    scores = p.scores(X)
    shifted = p.shifted(0.75)
    clear = (scores - 0.75).abs() > 1e-5
    assert torch.equal((shifted.scores(X) > 0)[clear], (scores > 0.75)[clear])
    assert torch.equal(p.bias, B)


@pytest.mark.parametrize(("name", "bits"), [("f32", 24), ("f16", 11), ("bf16", 8)])
def test_stored_predictors_are_rounded_to_their_format(name: str, bits: int) -> None:
    p = warm_start(W, B, MOMENT, 7)
    stored = p.stored_as(name)
    for before, after in ((p.down, stored.down), (p.up, stored.up)):
        assert after.shape == before.shape
        assert after.dtype == torch.float32
        torch.testing.assert_close(after, before, rtol=2.0**-bits, atol=1e-6)
        assert torch.equal(after, before) is (name == "f32")
    assert torch.equal(stored.bias, p.bias)
    again = stored.stored_as(name)
    assert torch.equal(again.down, stored.down)
    assert torch.equal(again.up, stored.up)


@given(
    densities=st.lists(st.floats(0, 1), min_size=2, max_size=6),
    shares=st.lists(st.floats(0.2, 1), min_size=2, max_size=6),
    step=st.sampled_from([16, 32]),
)
def test_the_initial_rank_rises_with_density_and_falls_with_skewness(
    densities: list[float], shares: list[float], step: int
) -> None:
    d = small_decoder(d_model=512)
    by_density = [initial_rank(d, density, 0.5, step) for density in sorted(densities)]
    by_share = [initial_rank(d, 0.1, share, step) for share in sorted(shares)]
    assert by_density == sorted(by_density)
    assert by_share == sorted(by_share, reverse=True)
    assert all(rank % step == 0 and step <= rank <= 512 for rank in by_density + by_share)


def layer(ffn: str = "gated") -> dict[str, torch.Tensor]:
    rest = torch.randn(D_FF, 2 if ffn == "gated" else 1, D_MODEL, generator=seeded(3))
    return {"ffn/first": W, "ffn/first_bias": B - 1.5, "ffn/rest": rest}


@pytest.mark.parametrize("ffn", ["gated", "plain"])
def test_energy_is_what_the_output_loses_without_a_neuron(ffn: str) -> None:
    d, w = small_decoder(ffn=ffn), layer(ffn)
    h = td.neurons(d, w, X)
    found = energy(h, w)
    y = td.ffn_output(w, h)
    for neuron in (0, 17):
        without = h.clone()
        without[:, neuron] = 0
        lost = (y - td.ffn_output(w, without)).square().sum(1)
        torch.testing.assert_close(found[:, neuron], lost, rtol=1e-3, atol=1e-3)
    assert torch.equal(found > 0, h != 0)


def batches(size: int = 128) -> Iterator[torch.Tensor]:
    return (anisotropic(size, seed) for seed in itertools.count(10))


def weighted_loss(p: Predictor, x: torch.Tensor, w: dict[str, torch.Tensor]) -> float:
    """The loss as `train` defines it."""
    e = energy(td.neurons(small_decoder(), w, x), w)
    weight = torch.where(e > 0, MISS_WEIGHT * (e / e[e > 0].mean()).clamp(0.05, 20).sqrt(), 1.0)
    return float(F.binary_cross_entropy_with_logits(p.scores(x), (e > 0).float(), weight=weight))


@pytest.mark.parametrize("rank", [2, 4, 12])
def test_training_lowers_the_loss_on_unseen_inputs(rank: int) -> None:
    d, w = small_decoder(), layer()
    start = warm_start(w["ffn/first"], w["ffn/first_bias"], MOMENT, rank)
    spread = 1 / start.scores(X).std()
    scaled = Predictor(start.down, start.up * spread, start.bias * spread)
    (trained,) = train([start], batches(), d, w, steps=100, learning_rate=1e-2)
    unseen = anisotropic(SAMPLES, seed=4)
    assert weighted_loss(trained, unseen, w) < 0.85 * weighted_loss(scaled, unseen, w)
    assert not trained.up.requires_grad


def test_training_repeats() -> None:
    d, w = small_decoder(), layer()
    start = warm_start(w["ffn/first"], w["ffn/first_bias"], MOMENT, 6)
    before = [t.clone() for t in (start.down, start.up, start.bias)]
    torch.manual_seed(1)
    (first,) = train([start], batches(), d, w, steps=10, learning_rate=1e-2)
    torch.manual_seed(2)  # no generator but the batches' own has a say
    (second,) = train([start], batches(), d, w, steps=10, learning_rate=1e-2)
    for name in ("down", "up", "bias"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert all(torch.equal(a, b) for a, b in zip(before, (start.down, start.up, start.bias), strict=True))


def test_ranks_trained_side_by_side_are_as_if_alone() -> None:
    d, w = small_decoder(), layer()
    starts = [warm_start(w["ffn/first"], w["ffn/first_bias"], MOMENT, rank) for rank in (3, 9)]
    steps: list[int] = []
    together = train(starts, batches(), d, w, steps=10, learning_rate=1e-2, on_step=lambda: steps.append(1))
    assert len(steps) == 10
    for start, found in zip(starts, together, strict=True):
        (alone,) = train([start], batches(), d, w, steps=10, learning_rate=1e-2)
        assert torch.equal(found.scores(X), alone.scores(X))


def experts(n: int = 3) -> tuple[Decoder, dict[str, torch.Tensor]]:
    d = small_decoder(n_experts=n, experts_per_token=2, d_model=D_MODEL, d_ff=D_FF // n)
    return d, {**layer(), "ffn/router": torch.randn(n, D_MODEL, generator=seeded(6))}


def test_experts_have_predictors_of_their_own_in_one() -> None:
    _, w = experts()
    whole = WarmStarts.of(w["ffn/first"], w["ffn/first_bias"], MOMENT, 3).at(5)
    assert (whole.down.shape, whole.up.shape) == ((15, D_MODEL), (D_FF, 5))
    parts = zip(w["ffn/first"].chunk(3), w["ffn/first_bias"].chunk(3), strict=True)
    scores = torch.cat([warm_start(first, bias, MOMENT, 5).scores(X) for first, bias in parts], -1)
    torch.testing.assert_close(whole.scores(X), scores, rtol=1e-4, atol=1e-4)


def test_what_an_expert_would_say_to_tokens_of_others_does_not_count() -> None:
    d, w = experts()
    start = WarmStarts.of(w["ffn/first"], w["ffn/first_bias"], MOMENT, 3).at(5)
    x = X[:64]
    idle = ~routed_neurons(d, w, x)
    e = energy(td.neurons(d, w, x), w)
    assert not e[idle].any()
    (first,) = train([start], iter([x, x]), d, w, steps=1, learning_rate=1e-2)
    # An expert that no token goes to stays as it was.
    w["ffn/router"] = torch.stack([torch.zeros(D_MODEL), *x[:1].repeat(2, 1)])
    x = x[(x @ w["ffn/router"].T)[:, 1] > 0]
    (second,) = train([start], iter([x, x]), d, w, steps=1, learning_rate=1e-2)
    scale = 1 / start.scores(x).std()
    torch.testing.assert_close(second.up[: D_FF // 3], start.up[: D_FF // 3] * scale)
    assert not torch.allclose(second.up[D_FF // 3 :], start.up[D_FF // 3 :] * scale)
    assert first.up.shape == start.up.shape


def test_no_steps_keep_the_warm_start() -> None:
    d, w = small_decoder(), layer()
    start = warm_start(w["ffn/first"], w["ffn/first_bias"], MOMENT, 6)
    (kept,) = train([start], batches(), d, w, steps=0, learning_rate=1e-2)
    assert torch.equal(kept.scores(X) > 0, start.scores(X) > 0)


@pytest.mark.parametrize("bias", [-1e3, 1e3])
def test_layers_in_which_all_or_nothing_fires_train(bias: float) -> None:
    d, w = small_decoder(), layer()
    w["ffn/first_bias"] = torch.full((D_FF,), bias)
    start = warm_start(W, w["ffn/first_bias"], MOMENT, 6)
    (trained,) = train([start], batches(), d, w, steps=5, learning_rate=1e-2)
    assert torch.isfinite(trained.scores(X)).all()
    assert torch.equal(trained.scores(X) > 0, td.neurons(d, w, X) != 0)


def test_a_plain_layer_trains_too() -> None:
    d, w = replace(small_decoder(), ffn="plain"), layer("plain")
    start = warm_start(w["ffn/first"], w["ffn/first_bias"], MOMENT, 12)
    (trained,) = train([start], batches(), d, w, steps=40, learning_rate=1e-2)
    fires = td.neurons(d, w, X) > 0
    predicted = trained.scores(X) > 0
    assert float((predicted & fires).sum() / fires.sum()) > 0.9
    assert float(predicted.float().mean()) < 2 * float(fires.float().mean())
