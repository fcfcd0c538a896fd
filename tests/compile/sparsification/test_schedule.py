"""Learning rate, the penalty's weight, and a controller that finds a weight for a wanted sparsity."""

import math
from dataclasses import asdict

import pytest

pytest.importorskip("pydantic")

from support.sparsifying import small_recipe

from pi_compile.sparsification.schedule import Steering, ThresholdSteering, learning_rate, penalty_weight


def test_the_learning_rate_warms_up_and_falls_on_a_cosine() -> None:
    train = small_recipe(train={"learning_rate": 1.0, "final_learning_rate": 0.1, "warmup_steps": 4}).train
    found = [learning_rate(train, 21, step) for step in range(21)]
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[12] == pytest.approx(0.55)
    assert found[20] == pytest.approx(0.1)


def test_stages_rise_from_the_weight_before() -> None:
    stages = [(2, 1.0, "constant"), (4, 3.0, "linear"), (4, 5.0, "sine"), (2, 0.0, "constant")]
    recipe = small_recipe(stages=[{"steps": n, "penalty": w, "curve": c} for n, w, c in stages])
    found = [penalty_weight(recipe.stages, step) for step in range(13)]
    assert found[:6] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert found[6:10] == pytest.approx([4 - math.sqrt(0.5), 4.0, 4 + math.sqrt(0.5), 5.0])
    assert found[10:] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("wanted", [0.7, 0.8, 0.9])
@pytest.mark.parametrize("steps", [300, 3000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_steering_comes_within_two_points(wanted: float, steps: int, scale: float) -> None:
    """A plant whose sparsity goes slowly to a value that depends on the logarithm of the weight."""
    steering, sparsity = Steering(wanted, steps), 0.5
    for step in range(steps):
        settled = 1 / (1 + math.exp(-0.6 * math.log(max(steering.weight * scale, 1e-9) / 0.01)))
        sparsity += (max(0.5, settled) - sparsity) * 20 / steps
        steering.observe(step, sparsity, 3.0, 0.1 * (1 - sparsity))
    assert sparsity == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize("wanted", [0.7, 0.9])
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_thresholds_come_within_two_points(wanted: float, scale: float) -> None:
    """Layers whose gates spread differently, about means of their own."""
    steering, spread_L, mean_L = ThresholdSteering(wanted, 100), (scale, 3 * scale), (0.0, -scale)
    sparsity_L = [0.5, 0.6]
    for step in range(100):
        steering.observe(step, sparsity_L, [0.8 * spread for spread in spread_L])
        above = [(t - m) / s for t, m, s in zip(steering.thresholds, mean_L, spread_L, strict=True)]
        sparsity_L = [0.5 * (1 + math.erf(z / math.sqrt(2))) for z in above]
    assert sparsity_L == pytest.approx([wanted, wanted], abs=0.02)


def test_what_is_wanted_is_the_sparsity_of_the_tune_text() -> None:
    penalty, thresholds = Steering(0.8, 10), ThresholdSteering(0.8, 10)
    penalty.observe(0, 0.6, 3.0, 0.1)
    thresholds.observe(0, [0.5, 0.7], [1.0, 1.0])
    for steering in (penalty, thresholds):
        steering.compare([0.49, 0.67])
    assert penalty.goal(9) == thresholds.goal(9) == pytest.approx(0.8)
    assert penalty.gap == pytest.approx(0.02)
    assert thresholds.gap == pytest.approx([0.01, 0.03])


def test_steering_goes_on_from_a_state() -> None:
    first = Steering(0.9, 100)
    for step in range(30):
        first.observe(step, 0.5 + step / 100, 3.0, 0.1)
    second = Steering(**asdict(first))
    first.observe(30, 0.8, 3.0, 0.1)
    second.observe(30, 0.8, 3.0, 0.1)
    assert first == second
