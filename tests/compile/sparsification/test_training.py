"""The training itself: the same sums however they are cut, and an end where one is due."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from safetensors.torch import load_file
from support.sparsifying import small_recipe

from pi_compile.errors import CheckpointError, TrainingError
from pi_compile.recipe import read_toml
from pi_compile.sparsification import run, training
from pi_compile.sparsification.recipe import SparsifyRecipe

FEW = [{"steps": 4, "penalty": 0.1, "curve": "constant"}]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "train",
    [{"micro_batch": 8}, {"micro_batch": 1}, {"activation_checkpointing": True}],
    ids=lambda train: next(iter(train)),
)
def test_how_a_batch_is_cut_changes_nothing_but_rounding(
    tmp_path: Path, sparsified: Any, train: dict[str, Any]
) -> None:
    usual = sparsified(stages=FEW, output="usual")
    other = sparsified(stages=FEW, output="other", train=train)
    assert other["text"]["position"] == usual["text"]["position"]
    for name, tensor in weights(tmp_path / "usual").items():
        assert torch.allclose(tensor, weights(tmp_path / "other")[name], atol=2e-5), name


def test_bfloat16_and_distillation_train_too(tmp_path: Path, sparsified: Any) -> None:
    plain = sparsified(stages=FEW, output="plain")
    record = sparsified(stages=FEW, train={"dtype": "bf16", "distillation": 1.0})
    assert record["perplexity"]["model"] == pytest.approx(plain["perplexity"]["model"], rel=0.3)
    assert record["difference"] < 1e-3


def test_the_penalty_makes_neurons_silent(sparsified: Any) -> None:
    stages = [{"steps": 40, "penalty": 3.0, "curve": "sine"}]
    found = sparsified(stages=stages, train={"learning_rate": 1e-2}, run={"every": 40})
    free = sparsified(
        output="free", stages=[stages[0] | {"penalty": 0.0}], train={"learning_rate": 1e-2}, run={"every": 40}
    )
    assert found["sparsity"] > free["sparsity"] + 0.1


def test_the_control_and_its_interval(sparsified: Any) -> None:
    record = sparsified("qwen2", stages=FEW, run={"control": True})
    perplexity, (low, high) = record["perplexity"], record["interval"]
    assert low < record["perplexity_increase"] < high
    assert record["perplexity_increase"] == pytest.approx(perplexity["model"] / perplexity["control"] - 1)
    assert perplexity["control"] < perplexity["base"]


def test_a_constant_becomes_a_bias(tmp_path: Path, sparsified: Any) -> None:
    record = sparsified(stages=FEW, target={"constant": True})
    found = weights(tmp_path / "out")
    assert found["model.layers.0.mlp.down_proj.bias"].abs().sum() > 0
    assert not found["model.layers.0.mlp.gate_proj.bias"].any()
    assert record["stock"]
    with pytest.raises(CheckpointError, match=r"target.constant: a mistral model has none"):
        sparsified("mistral", stages=FEW, target={"constant": True}, output="no")


def test_a_threshold_is_chosen_within_the_allowed_loss(sparsified: Any) -> None:
    target = {"activation": "fatrelu", "thresholds": [0.001, 0.05, 50.0], "threshold_loss": 0.05}
    record = sparsified(stages=FEW, target=target)
    rows = {row["threshold"]: row for row in record["thresholds"]}
    assert list(rows) == [0.0, 0.001, 0.05, 50.0]
    assert rows[50.0]["sparsity"] == 1.0
    allowed = [t for t, row in rows.items() if row["perplexity"] <= 1.05 * rows[0.0]["perplexity"]]
    assert record["threshold"] == max(allowed)
    assert record["sparsity"] >= rows[0.0]["sparsity"] - 0.05


def test_a_training_ends_at_the_sparsity_wanted(sparsified: Any) -> None:
    record = sparsified(stop={"sparsity": 0.3}, run={"every": 2, "control": True})
    assert (record["steps"], record["ended"]) == (2, "sparsity reached 0.3")
    assert record["tokens"] == 2 * 8 * 32


def test_a_training_ends_before_the_perplexity_is_too_high(sparsified: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, factors = training.evaluate, iter([1.0, 0.5, 0.6, 3.0])

    def rising(*arguments: Any) -> Any:
        found = evaluate(*arguments)
        found.losses_N[:] = math.log(next(factors, 0.7)) + base
        return found

    base = math.log(sparsified(stages=FEW, output="first")["perplexity"]["base"])
    monkeypatch.setattr(training, "evaluate", rising)
    record = sparsified(stop={"perplexity_ratio": 0.8}, run={"every": 2})
    assert (record["steps"], record["ended"]) == (6, "perplexity exceeded 0.8 times the original's")


def test_perplexity_is_compared_with_the_base_on_the_same_text(
    sparsified: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tune text; the base on the held-out text may be far better or worse."""
    compared: list[float] = []
    evaluate, began = run.evaluate, run.Training

    def by_length(*arguments: Any) -> Any:
        found = evaluate(*arguments)
        found.losses_N[:] = 1.0 if len(found.losses_N) == 128 // 32 else 2.0
        return found

    def begun(*arguments: Any, **options: Any) -> Any:
        compared.extend(held.perplexity for held in arguments if isinstance(held, training.Base))
        return began(*arguments, **options)

    monkeypatch.setattr(run, "evaluate", by_length)
    monkeypatch.setattr(run, "Training", begun)
    record = sparsified(stages=FEW, corpus={"tune_tokens": 128, "report_tokens": 256})
    assert compared == [pytest.approx(math.e)]
    assert record["perplexity"]["base"] == pytest.approx(math.e**2)


def test_the_sparsity_wanted_is_told_at_each_evaluation(sparsified: Any) -> None:
    told: list[training.Point] = []
    sparsified(steer={"sparsity": 0.9}, run={"every": 2}, watch=training.Watch(point=told.append))
    assert [point.step for point in told] == [2, 4, 6, 8]
    assert told[0].wanted < told[-1].wanted == pytest.approx(0.9)
    told.clear()
    sparsified(output="free", watch=training.Watch(point=told.append))
    assert {point.wanted for point in told} == {0.0}


def test_a_training_that_ends_for_two_reasons_names_the_one_that_counts(
    sparsified: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the weights before the perplexity rose that are kept, whatever the sparsity after."""
    evaluate, evaluations = training.evaluate, iter([(1.0, 0.1), (0.5, 0.2), (3.0, 0.9)])

    def scripted(*arguments: Any) -> Any:
        factor, sparsity = next(evaluations, (0.7, 0.2))
        found = evaluate(*arguments)
        found.losses_N[:] = math.log(factor) + base
        return replace(found, sparsity_L=(sparsity,) * len(found.sparsity_L))

    base = math.log(sparsified(stages=FEW, output="first")["perplexity"]["base"])
    monkeypatch.setattr(training, "evaluate", scripted)
    record = sparsified(stop={"perplexity_ratio": 0.8, "sparsity": 0.6}, run={"every": 2})
    assert (record["steps"], record["ended"]) == (4, "perplexity exceeded 0.8 times the original's")


def test_a_loss_that_is_no_number_ends_it(sparsified: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = training.language_loss
    calls: list[int] = []

    def failing(*arguments: Any) -> Any:
        calls.append(0)
        return loss(*arguments) * (math.nan if len(calls) > 10 else 1)

    monkeypatch.setattr(training, "language_loss", failing)
    with pytest.raises(TrainingError, match=r"diverged at step 6: the loss is nan") as found:
        sparsified()
    assert str(tmp_path / "out.work" / "model" / "step-00000004") in str(found.value)
    assert f"does not rise by more than {training.DIVERGED:g}\n" in str(found.value)
    assert "and name another output: the training begins anew" in str(found.value)
    monkeypatch.undo()
    assert sparsified()["steps"] == 8


def test_a_loss_that_rises_ends_it(sparsified: Any) -> None:
    with pytest.raises(TrainingError, match="the mean loss rose"):
        sparsified(
            stages=[{"steps": 60, "penalty": 0.0, "curve": "constant"}], train={"learning_rate": 30.0, "clip": 1e6}
        )


def test_another_recipe_does_not_go_on_with_a_training(sparsified: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "language_loss", lambda *_: torch.tensor(math.nan, requires_grad=True))
    with pytest.raises(TrainingError, match="diverged"):
        sparsified()
    with pytest.raises(TrainingError, match="holds a training with another recipe"):
        sparsified(stages=FEW)


FURTHER = [("relu", 0.7), ("relu", 0.8), ("drelu", 0.9), ("fatrelu", 0.9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "wanted"),
    [("relu", 0.9), *(pytest.param(*case, marks=pytest.mark.long) for case in FURTHER)],
)
def test_steering_comes_within_two_points(sparsified: Any, activation: str, wanted: float) -> None:
    record = sparsified(
        corpus={"tune_tokens": 2048, "report_tokens": 2048},
        target={"activation": activation},
        steer={"sparsity": wanted},
        stages=[{"steps": 600, "penalty": 0.0, "curve": "constant"}],
        train={"learning_rate": 5e-3, "micro_batch": 8},
        run={"every": 100},
    )
    assert record["sparsity"] == pytest.approx(wanted, abs=0.02)
    assert record["dead"] <= 0.05


def test_a_recipe_is_read_back_unchanged(tmp_path: Path) -> None:
    recipe = small_recipe(text=("a", "b"))
    (tmp_path / "s.toml").write_text(recipe.to_toml())
    assert read_toml(tmp_path / "s.toml", SparsifyRecipe, "", "") == recipe
