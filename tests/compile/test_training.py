"""Training end to end on a model with planted sparsity: who gets a predictor, what it costs, and what a kill leaves."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("zarr")

import hf
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from planted import D_FF, D_MODEL, DENSE_LAYER, LAYERS, RANK, SHAPE, SPEC, TEXTS, planted, profiled, text, trained_on

from pi_compile import torch_decoder as td
from pi_compile import training
from pi_compile.activations import ActivationProfile
from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.errors import CorpusError, ProfileError
from pi_compile.predictor import Predictor
from pi_compile.report import train_report
from pi_compile.selection_quality import judge
from pi_compile.trained import Trained
from pi_runtime.artifact.sizes import FfnBytes
from pi_runtime.errors import NotMetError


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ActivationProfile]:
    return planted(tmp_path_factory.mktemp("sparse"), tmp_path_factory.mktemp("counts"))


@pytest.fixture(scope="module")
def trained(sparse: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An undisturbed run."""
    return trained_on(sparse, tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(sparse: Any, tmp_path: Path) -> Callable[..., Trained]:
    return lambda scratch="work", model=sparse, **changes: trained_on(model, tmp_path / scratch, **changes)


def test_sparse_layers_get_a_predictor_that_reads_less(trained: Trained) -> None:
    assert trained.inputs == "key"
    assert [row.rung for row in trained.rows] == ["predicted", "gate", "predicted"]
    assert trained.ranks == (RANK, None, RANK)
    for row, predictor in zip(trained.rows, trained.predictors, strict=True):
        if row.rung == "predicted":
            assert predictor
            assert [a.shape for a in predictor] == [(RANK, D_MODEL), (D_FF, RANK), (D_FF,)]
            assert row.ffn_bytes < 0.8 * row.gate_bytes
            assert 0.01 < row.density < 0.2
            assert row.recall > 0.5
            assert row.error < 1e-3
            assert row.rows_read_over_active < 2
            assert row.precision == pytest.approx(row.recall / row.rows_read_over_active)
        else:
            assert predictor is None
            assert row.ffn_bytes == row.gate_bytes
            assert (row.recall, row.error) == (1, 0)
            assert row.rows_read_over_active == pytest.approx(1 / row.density)
    p = trained.perplexity
    assert abs(p["report"] / p["report_dense"] - 1) < 0.001
    assert 0 <= p["tune_divergence"] <= training.TUNE_SHARE * SPEC.perplexity_increase


def test_the_table_is_plain_data(trained: Trained) -> None:
    rows = json.loads(json.dumps(train_report(trained)))["layers"]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert {"density", "rank", "ffn_bytes", "gate_bytes", "recall", "precision", "rows_read_over_active"} <= set(
        rows[0]
    )


def test_a_smooth_model_stays_dense(
    run: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf.random_llama(tmp_path / "model", tokenizer=False, hidden_act="silu", **SHAPE)
    (tmp_path / "counts").mkdir()
    model = profiled(open_checkpoint(tmp_path / "model"), tmp_path / "counts")
    monkeypatch.setattr(training, "train", None)  # there is nothing to train
    trained = run(model=model)
    assert [row.rung for row in trained.rows] == ["dense"] * 3
    assert trained.predictors == (None,) * 3
    assert trained.perplexity["report"] == trained.perplexity["report_dense"]
    with pytest.raises(NotMetError, match="allow dense") as caught:
        run(model=model, rungs=("gate", "predicted"))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("rung", ["gate", "dense"])
def test_a_recipe_may_allow_an_exact_rung_alone(
    run: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch, rung: str
) -> None:
    monkeypatch.setattr(training, "train", None)
    trained = run(rungs=(rung,))
    assert [row.rung for row in trained.rows] == [rung] * 3
    neuron = 3 * D_MODEL * 2  # three rows of f16
    for row in trained.rows:
        read = D_FF * neuron if rung == "dense" else D_FF * neuron * (1 + 2 * row.density) / 3
        assert row.ffn_bytes == pytest.approx(read)


def test_dense_is_a_way_out_where_gate_is_not_allowed(run: Callable[..., Trained]) -> None:
    trained = run(rungs=("dense", "predicted"))
    assert [row.rung for row in trained.rows] == ["predicted", "dense", "predicted"]


def test_a_budget_of_nothing_takes_gate(run: Callable[..., Trained]) -> None:
    trained = run(perplexity_increase=1e-15)
    assert [row.rung for row in trained.rows] == ["gate"] * 3
    assert trained.perplexity["tune_divergence"] == 0


def test_a_budget_out_of_reach_names_the_worst_layers(run: Callable[..., Trained]) -> None:
    with pytest.raises(NotMetError) as caught:
        run(rungs=("predicted",), steps=0, perplexity_increase=1e-9)
    assert caught.value.exit_code == 5
    message = str(caught.value)
    assert "the quality budget is out of reach with the rungs that [train] rungs allows" in message
    assert f"layers {DENSE_LAYER}, " in message
    assert "allow gate in [train] rungs, or raise [quality] perplexity_increase" in message


def test_a_larger_budget_reads_less(run: Callable[..., Trained]) -> None:
    def total(trained: Trained) -> float:
        return sum(row.ffn_bytes for row in trained.rows)

    runs = [run(perplexity_increase=budget) for budget in (1e-4, 1e-2, 0.5)]  # one scratch: trained once
    read = [total(trained) for trained in runs]
    assert read == sorted(read, reverse=True)
    assert read[2] < read[0]


def test_training_repeats_and_the_seed_decides(run: Callable[..., Trained], trained: Trained) -> None:
    torch.manual_seed(12345)
    np.random.seed(12345)  # no global generator has a say
    done: list[tuple[int, int]] = []
    assert run("a", progress=lambda *a: done.append(a)).digest() == trained.digest()
    steps = 3 + training.PRICES
    assert done == [(n, steps) for n in range(1, steps + 1)]
    assert run("b", seed=1).digest() != trained.digest()


@pytest.mark.parametrize("finished", [1, 2, 3])
def test_a_killed_run_trains_only_the_rest(
    run: Callable[..., Trained], trained: Trained, monkeypatch: pytest.MonkeyPatch, finished: int
) -> None:
    def stop_early(done: int, _total: int) -> None:
        if done == finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("killed", progress=stop_early)
    read, original = [], td.layer_weights
    fitted, fit = [], training._Run._fit
    monkeypatch.setattr(td, "layer_weights", lambda c, n, device: read.append(n) or original(c, n, device))
    monkeypatch.setattr(training._Run, "_fit", lambda self, n, file: fitted.append(n) or fit(self, n, file))
    assert run("killed").digest() == trained.digest()
    assert fitted == list(range(finished, LAYERS))
    assert read[: len(fitted)] == fitted  # and no earlier layer is read for it


@pytest.mark.parametrize("call", [1, 9, 14, 20])
def test_a_kill_in_the_middle_of_a_layer(
    run: Callable[..., Trained], trained: Trained, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    calls, original = [], td.attention

    def dies(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as m:
        m.setattr(td, "attention", dies)
        with pytest.raises(KeyboardInterrupt):
            run("killed")
    assert run("killed").digest() == trained.digest()


def test_the_report_text_decides_nothing(run: Callable[..., Trained], trained: Trained) -> None:
    first, second = trained, run(texts=replace(TEXTS, report=text(9, 700)))
    assert first.rows != second.rows
    assert [r.rung for r in first.rows] == [r.rung for r in second.rows]
    assert first.perplexity["report"] != second.perplexity["report"]
    assert first.perplexity["tune"] == second.perplexity["tune"]
    assert arrays(first) == arrays(second)


def arrays(trained: Trained, *, bias: bool = True) -> list[bytes]:
    return [array.tobytes() for p in trained.predictors if p for array in (p if bias else p[:2])]


def test_the_tune_text_sets_thresholds_only(run: Callable[..., Trained], trained: Trained) -> None:
    first, second = trained, run("b", texts=replace(TEXTS, tune=text(9, 700)))
    assert arrays(first, bias=False) == arrays(second, bias=False)
    assert arrays(first) != arrays(second)  # a threshold is part of the bias
    other = run("c", texts=replace(TEXTS, fit=text(9, 1500)))
    assert arrays(other, bias=False) != arrays(first, bias=False)


@pytest.mark.parametrize("name", ["fit", "tune", "report"])
def test_a_text_shorter_than_one_window(run: Callable[..., Trained], name: str) -> None:
    with pytest.raises(CorpusError, match=r"the text has 31 tokens\n  expected: at least one window of 32"):
        run(texts=replace(TEXTS, **{name: text(0, 31)}))


def test_a_saved_result_comes_back(trained: Trained, tmp_path: Path) -> None:
    trained.save(tmp_path / "a.npz")
    loaded = Trained.load(tmp_path / "a.npz")
    assert loaded.rows == trained.rows
    assert (loaded.perplexity, loaded.inputs) == (trained.perplexity, trained.inputs)
    assert arrays(loaded) == arrays(trained)
    assert loaded.digest() == trained.digest()
    assert replace(trained, inputs="other").digest() == trained.digest()  # what it was made from does not matter
    down, up, bias = trained.predictors[0] or ()
    bias = bias.copy()
    bias[0] = np.nextafter(bias[0], 0)
    assert replace(trained, predictors=((down, up, bias), *trained.predictors[1:])).digest() != trained.digest()


def test_a_damaged_result_is_refused(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    trained.save(path)
    good = path.read_bytes()
    for data in (b"", good[: len(good) // 2], good[:3000] + b"?" + good[3001:], b"noise" * 99):
        path.write_bytes(data)
        with pytest.raises(ProfileError) as caught:
            Trained.load(path)
        assert str(path) in str(caught.value)
    np.savez(path, meta=np.array(json.dumps({"rows": [{"rung": "gate"}], "perplexity": {}, "inputs": ""})))
    with pytest.raises(ProfileError, match="not a file of trained predictors"):
        Trained.load(path)
    with pytest.raises(ProfileError):
        Trained.load(tmp_path / "none.npz")


# What a choice costs.


def test_without_predictors_a_verdict_is_that_of_transformers(sparse: Any) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = sparse[0]
    ids = td.windows(TEXTS.report, 32)
    verdict = judge(checkpoint, ids, [None] * LAYERS, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    with torch.inference_mode():
        logits = model(ids).logits[:, :-1]
    wanted = float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).exp())
    assert verdict.perplexity == pytest.approx(wanted, rel=1e-4)
    again = judge(checkpoint, ids, [None] * LAYERS, device="cpu", dense=verdict)
    assert again.divergence == 0
    assert [t.fires for t in again.tallies] == [t.fires for t in verdict.tallies]


def test_a_verdict_counts_and_loses_what_a_predictor_leaves_out(sparse: Any) -> None:
    checkpoint, d = sparse[0], sparse[0].decoder
    ids = td.windows(TEXTS.report, 32)
    w = td.layer_weights(checkpoint, 0, "cpu")
    p = Predictor(
        w["ffn/first"][:8], torch.randn(D_FF, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(D_FF)
    )
    dense = judge(checkpoint, ids, [None] * LAYERS, device="cpu")
    verdict = judge(checkpoint, ids, [p, None, None], device="cpu", dense=dense)
    with torch.inference_mode():
        x = td.attention(d, w, td.embed(d, td.end_weights(checkpoint, "cpu"), ids))
        inputs = td.norm(d, w, "ffn/norm", x)
        h, predicted = td.neurons(d, w, inputs), p.scores(inputs) > 0
        y = td.ffn_output(w, h * predicted)
        lost = (td.ffn_output(w, h) - y).square().sum()
        x = x + y
    row = verdict.tallies[0].row(FfnBytes(d, "f16", "f16"), "predicted", 8)
    fires = h != 0
    assert row.density == pytest.approx(float(fires.float().mean()))
    assert row.recall == pytest.approx(float((fires & predicted).sum() / fires.sum()))
    assert row.precision == pytest.approx(float((fires & predicted).sum() / predicted.sum()))
    assert row.rows_read_over_active == pytest.approx(float(predicted.sum() / fires.sum()))
    assert row.error == pytest.approx(float(lost / x.square().sum()), rel=1e-3)
    assert verdict.divergence > 0
    assert verdict.perplexity != dense.perplexity
