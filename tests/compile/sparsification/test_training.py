"""The training itself: the same sums however they are cut, and an end where one is due."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from safetensors.torch import load_file
from support.sparsifying import small_recipe

from pi_compile.errors import TrainingError
from pi_compile.recipe import read_toml
from pi_compile.sparsification import training
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


def test_the_sparsity_wanted_is_told_at_each_evaluation(sparsified: Any) -> None:
    told: list[training.Point] = []
    sparsified(steer={"sparsity": 0.9}, run={"every": 2}, watch=training.Watch(point=told.append))
    assert [point.step for point in told] == [2, 4, 6, 8]
    assert told[0].wanted < told[-1].wanted == pytest.approx(0.9)
    told.clear()
    sparsified(output="free", watch=training.Watch(point=told.append))
    assert {point.wanted for point in told} == {0.0}


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
