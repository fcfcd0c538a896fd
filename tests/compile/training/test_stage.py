"""Training end to end on a model with planted sparsity: who gets a predictor, what it costs, and what a kill leaves."""

import json
from collections import Counter
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
import torch.nn.functional as F  # noqa: N812  its usual name
from support import hf
from support.measured import measure_quality
from support.planted import (
    D_FF,
    D_MODEL,
    DENSE_LAYER,
    LAYERS,
    RANK,
    SHAPE,
    SPEC,
    TEXTS,
    planted,
    profiled,
    text,
    trained_on,
)
from support.synthetic import small_decoder

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.cost_model.processors import Processor
from pi_compile.errors import CorpusError, ProfileError
from pi_compile.files import read_arrays
from pi_compile.pipeline.summary import train_report
from pi_compile.results.activation_profile import ActivationProfile
from pi_compile.results.predictor_set import PredictorSet
from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.predictor import DENSE, Predictor, SparseFfn
from pi_compile.training import candidates, stage
from pi_compile.training.candidates import BYTES
from pi_compile.training.layer_search import LayerSearch
from pi_compile.training.rung_choice import PASSES, MeasuredText
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import FfnBytes
from pi_runtime.errors import NotMetError


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ActivationProfile]:
    return planted(tmp_path_factory.mktemp("sparse"), tmp_path_factory.mktemp("counts"))


@pytest.fixture(scope="module")
def trained(sparse: Any, tmp_path_factory: pytest.TempPathFactory) -> PredictorSet:
    """The result of a run that nothing interrupts."""
    return trained_on(sparse, tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(sparse: Any, tmp_path: Path) -> Callable[..., PredictorSet]:
    return lambda scratch="work", model=sparse, **changes: trained_on(model, tmp_path / scratch, **changes)


def test_sparse_layers_get_a_predictor_that_reads_less(trained: PredictorSet) -> None:
    assert trained.inputs == "key"
    assert [row.rung for row in trained.rows] == ["predicted", "gate", "predicted"]
    assert trained.ranks == (RANK, None, RANK)
    for row, predictor in zip(trained.rows, trained.predictors, strict=True):
        if row.rung == "predicted":
            assert predictor
            assert [a.shape for a in predictor] == [(RANK, D_MODEL), (D_FF, RANK), (D_FF,)]
            assert row.ffn_bytes < 0.8 * row.gate_bytes
            assert 0.01 < row.density < 0.2
            assert row.recall > 0.4
            assert row.error < 1e-3
            assert row.rows_read_over_active < 2
            assert row.precision == pytest.approx(row.recall / row.rows_read_over_active)
        else:
            assert predictor is None
            assert row.ffn_bytes == row.gate_bytes
            assert (row.recall, row.error) == (1, 0)
            assert row.rows_read_over_active == pytest.approx(1 / row.density)
    p = trained.perplexity
    assert max(p["report"] / p["report_dense"] - 1, p["report_divergence"]) <= SPEC.perplexity_increase
    assert 0 <= p["tune_divergence"] <= SPEC.perplexity_increase


def test_the_table_is_plain_data(trained: PredictorSet) -> None:
    rows = json.loads(json.dumps(train_report(trained)))["layers"]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert {"density", "rank", "ffn_bytes", "gate_bytes", "recall", "precision", "rows_read_over_active"} <= set(
        rows[0]
    )


SHAPE_DECODER = small_decoder(d_model=D_MODEL, d_ff=D_FF, ffn="gated")


def test_a_smooth_model_stays_dense(
    run: Callable[..., PredictorSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf.random_llama(tmp_path / "model", tokenizer=False, hidden_act="silu", **SHAPE)
    (tmp_path / "counts").mkdir()
    model = profiled(open_checkpoint(tmp_path / "model"), tmp_path / "counts")
    monkeypatch.setattr(candidates, "train", None)  # there is nothing to train
    trained = run(model=model)
    assert [row.rung for row in trained.rows] == ["dense"] * 3
    assert tuple(trained.predictors) == (None,) * 3
    assert trained.perplexity["report"] == trained.perplexity["report_dense"]
    with pytest.raises(NotMetError, match="allow dense") as caught:
        run(model=model, rungs=("gate", "predicted"))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("rung", ["gate", "dense"])
def test_a_recipe_may_allow_an_exact_rung_alone(
    run: Callable[..., PredictorSet], monkeypatch: pytest.MonkeyPatch, rung: str
) -> None:
    monkeypatch.setattr(candidates, "train", None)
    trained = run(rungs=(rung,))
    assert [row.rung for row in trained.rows] == [rung] * 3
    neuron = 3 * D_MODEL * 2  # three rows of f16
    for row in trained.rows:
        read = D_FF * neuron if rung == "dense" else D_FF * neuron * (1 + 2 * row.density) / 3
        assert row.ffn_bytes == pytest.approx(read)


def test_dense_is_a_way_out_where_gate_is_not_allowed(run: Callable[..., PredictorSet]) -> None:
    trained = run(rungs=("dense", "predicted"), perplexity_increase=2.5e-4)
    assert [row.rung for row in trained.rows] == ["predicted", "dense", "predicted"]


def test_a_budget_of_nothing_takes_gate(run: Callable[..., PredictorSet]) -> None:
    trained = run(perplexity_increase=1e-15)
    assert [row.rung for row in trained.rows] == ["gate"] * 3
    assert trained.perplexity["tune_divergence"] == 0


def test_a_budget_out_of_reach_names_the_worst_layers(run: Callable[..., PredictorSet]) -> None:
    with pytest.raises(NotMetError) as caught:
        run(rungs=("predicted",), steps=0, perplexity_increase=1e-9)
    assert caught.value.exit_code == 5
    message = str(caught.value)
    assert "the quality budget is out of reach with the rungs that [train] rungs allows" in message
    assert "expected: [quality] perplexity_increase = 1e-09 on the report text" in message
    assert f"most is lost in layers {DENSE_LAYER} (predicted, error " in message
    assert "allow gate or dense in [train] rungs, or raise [quality] perplexity_increase" in message


def test_a_larger_budget_reads_less(run: Callable[..., PredictorSet]) -> None:
    def total(trained: PredictorSet) -> float:
        return sum(row.ffn_bytes for row in trained.rows)

    runs = [run(perplexity_increase=budget) for budget in (1e-4, 1e-2, 0.5)]  # one scratch: trained once
    read = [total(trained) for trained in runs]
    assert read == sorted(read, reverse=True)
    assert read[2] < read[0]


def test_training_repeats_and_the_seed_decides(
    run: Callable[..., PredictorSet], trained: PredictorSet, tmp_path: Path
) -> None:
    torch.manual_seed(12345)
    np.random.seed(12345)  # no global generator has a say
    done: list[tuple[int, int]] = []
    assert run("a", progress=lambda *a: done.append(a)).digest() == trained.digest()
    assert [total for _, total in done] == [done[0][1]] * len(done)
    assert [n for n, _ in done] == sorted(n for n, _ in done)
    assert len(done) > LAYERS * SPEC.steps
    assert done[-1][0] == done[-1][1]
    run("b", seed=1)
    one, other = (read_arrays(tmp_path / name / "layer-0.npz") for name in ("a", "b"))
    assert not np.array_equal(one["trained-32/up"], other["trained-32/up"])
    assert np.array_equal(one["init-32/up"], other["init-32/up"])


@pytest.mark.parametrize("finished", [1, 2, 3])
def test_a_killed_run_trains_only_the_rest(
    run: Callable[..., PredictorSet],
    trained: PredictorSet,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    finished: int,
) -> None:
    def stop_early(*_progress: int) -> None:
        if len(list((tmp_path / "killed").glob("layer-*.npz"))) == finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("killed", progress=stop_early)
    read, original = [], td.layer_weights
    searched, search = [], LayerSearch._search
    monkeypatch.setattr(td, "layer_weights", lambda c, n, device: read.append(n) or original(c, n, device))
    monkeypatch.setattr(LayerSearch, "_search", lambda self: searched.append(self.n) or search(self))
    assert run("killed").digest() == trained.digest()
    assert searched == list(range(finished, LAYERS))
    assert read[: len(searched)] == searched  # and no earlier layer is read for it


@pytest.mark.parametrize("budget", [1e-4, 1e-2, 0.5])
def test_the_choice_takes_at_most_three_passes_and_one_of_the_report_text(
    run: Callable[..., PredictorSet], monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    """A worker alone reads each weight once to push text and to search, and once in each pass of the choice."""
    passes, measure = Counter[str](), MeasuredText._measure
    read, layer_weights = [], td.layer_weights

    def counted(self: MeasuredText, ffn_of: Any, batches: Any) -> None:
        passes[self.text.name] += 1
        measure(self, ffn_of, batches)

    monkeypatch.setattr(MeasuredText, "_measure", counted)
    monkeypatch.setattr(td, "layer_weights", lambda c, n, device: read.append(n) or layer_weights(c, n, device))
    run(perplexity_increase=budget)
    assert 1 <= passes["tune"] <= PASSES
    assert passes["report"] == 1
    assert len(read) == LAYERS * (1 + passes.total())


@pytest.mark.parametrize("call", [1, 9, 14, 20])
def test_a_kill_in_the_middle_of_a_layer(
    run: Callable[..., PredictorSet], trained: PredictorSet, monkeypatch: pytest.MonkeyPatch, call: int
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


def test_the_report_text_decides_nothing_but_a_refusal(run: Callable[..., PredictorSet], trained: PredictorSet) -> None:
    first, second = (
        run(texts=replace(TEXTS, report=t), perplexity_increase=0.01) for t in (TEXTS.report, text(9, 700))
    )
    assert first.rows != second.rows
    assert [r.rung for r in first.rows] == [r.rung for r in second.rows]
    assert first.perplexity["report"] != second.perplexity["report"]
    assert first.perplexity["tune"] == second.perplexity["tune"]
    assert arrays(first) == arrays(second)


@pytest.mark.parametrize("refused", [1, 2])
def test_what_the_report_text_refuses_is_chosen_again_with_less(
    run: Callable[..., PredictorSet], monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """The choice gets down to no loss at all, where an exact rung is allowed."""
    reported, original = [], stage._Training._measure

    def of_report(self: Any, text: Any, chosen: Any) -> Any:
        quality = original(self, text, chosen)
        if text is self.report:
            reported.append(quality.divergence)
            if len(reported) <= refused:
                return replace(quality, divergence=0.02)
        return quality

    monkeypatch.setattr(stage._Training, "_measure", of_report)
    trained = run(perplexity_increase=0.01)
    assert len(reported) == refused + 1
    assert reported == sorted(reported, reverse=True)
    assert trained.perplexity["tune_divergence"] <= stage.REFUSED_FRACTIONS[refused] * 0.01
    assert trained.perplexity["increase"] <= 0.01
    assert (refused == 2) == ([row.rung for row in trained.rows] == ["gate"] * 3)


def test_the_reported_increase_is_that_of_the_perplexities(trained: PredictorSet) -> None:
    p = trained.perplexity
    assert p["increase"] == pytest.approx(p["report"] / p["report_dense"] - 1, abs=1e-9)
    assert 0 < p["standard_error"] < 0.01


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_smooth_model_may_have_thresholds(run: Callable[..., PredictorSet], tmp_path: Path, activation: str) -> None:
    hf.random_llama(tmp_path / "model", tokenizer=False, hidden_act=activation, **SHAPE)
    (tmp_path / "counts").mkdir()
    model = profiled(open_checkpoint(tmp_path / "model"), tmp_path / "counts")
    trained = run(model=model, rungs=("dense", "threshold"), perplexity_increase=0.05)
    assert "threshold" in [row.rung for row in trained.rows]
    assert tuple(trained.predictors) == (None,) * 3
    for row, counts in zip(trained.rows, trained.counts, strict=True):
        assert (counts is not None) == (row.rung == "threshold") == (row.threshold > 0)
        if counts is not None:
            assert row.density < 0.99
            assert row.ffn_bytes == pytest.approx(D_FF * 2 * D_MODEL * (1 + 2 * row.density))
            assert counts.mean() / trained.counted_tokens == pytest.approx(row.density, abs=0.1)
    refined = trained.refine(model[1])
    for n, row in enumerate(trained.rows):
        assert refined.density()[n] == pytest.approx(row.density, abs=0.1)
    trained.save(tmp_path / "a.npz")
    loaded = PredictorSet.load(tmp_path / "a.npz")
    assert loaded.digest() == trained.digest()
    assert refined.digest() == loaded.refine(model[1]).digest()


def test_little_memory_finds_the_same(
    run: Callable[..., PredictorSet], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neuron values are never kept for a whole text."""
    rungs = ("gate", "threshold", "predicted")
    run("wanted", rungs=rungs)
    most, original = [], candidates.energy
    monkeypatch.setattr(candidates, "NEURON_VALUES", 50 * D_FF)
    monkeypatch.setattr(candidates, "energy", lambda h, w: most.append(len(h)) or original(h, w))
    monkeypatch.setattr(stage._Training, "choose", lambda _: 1 / 0)  # the choice takes whole windows
    with pytest.raises(ZeroDivisionError):
        run("found", rungs=rungs)
    assert max(most) == 50 < len(TEXTS.tune)
    wanted, found = (
        json.loads(str(read_arrays(tmp_path / name / "layer-0.npz")["candidates"])) for name in ("wanted", "found")
    )
    assert {c["layer"]["rung"] for c in found} == {"threshold", "predicted"}
    tolerances = {"threshold": 2**-6, "score_threshold": 2**-6, "rank": 0, "error": 0.05}
    for key, tolerance in tolerances.items():
        ones, others = ([(c | c["layer"])[key] or 0 for c in cs] for cs in (wanted, found))
        assert others == pytest.approx(ones, rel=tolerance)


def test_time_and_not_bytes_decides(run: Callable[..., PredictorSet]) -> None:
    """Reading all rows is faster where gathering rows, or starting an operator, is slow."""

    def predicted(name: str, processor: Processor) -> int:
        return [row.rung for row in run(name, processor=processor).rows].count("predicted")

    # Some remain where picking is slow: they pick fewer rows of `rest` too.
    slow_to_pick, slow_to_start = (
        Processor("a", 0, {"": 10**9}, {"gather": {"f16": 10**6}}, None),
        Processor("b", 10**12, {"": 10**9}, {}, None),
    )
    assert predicted("a", BYTES) > predicted("b", slow_to_pick)
    assert predicted("c", slow_to_start) == 0
    slow_prompts = Processor("d", 0, {"": 10**9}, {}, None, late_ps={"f16": 1e6}, matrices=True)
    assert {row.rung for row in run("d", processor=slow_prompts).rows} == {"dense"}
    trained = run("c", processor=slow_to_start)
    assert trained.rows[0].ffn_us == pytest.approx(2e6 + trained.rows[0].ffn_bytes / 1e3)


@pytest.mark.parametrize("rungs", [("dense", "gate", "predicted"), ("dense", "gate", "threshold", "predicted")])
def test_what_is_loaded_again_decides_the_same(run: Callable[..., PredictorSet], rungs: tuple[str, ...]) -> None:
    first = run(rungs=rungs, predictor_formats=("f16", "q8"))
    assert run(rungs=rungs, predictor_formats=("f16", "q8")).digest() == first.digest()
    assert first.predictor_format in ("f16", "q8")


def arrays(trained: PredictorSet, *, bias: bool = True) -> list[bytes]:
    return [array.tobytes() for p in trained.predictors if p for array in (p if bias else p[:2])]


def test_the_tune_text_sets_thresholds_only(run: Callable[..., PredictorSet], trained: PredictorSet) -> None:
    first, second = trained, run("b", texts=replace(TEXTS, tune=text(9, 700)))
    assert arrays(first, bias=False) == arrays(second, bias=False)
    assert arrays(first) != arrays(second)  # a threshold is part of the bias
    other = run("c", texts=replace(TEXTS, fit=text(9, 1500)))
    assert arrays(other, bias=False) != arrays(first, bias=False)


@pytest.mark.parametrize("name", ["fit", "tune", "report"])
def test_a_text_shorter_than_one_window(run: Callable[..., PredictorSet], name: str) -> None:
    with pytest.raises(CorpusError, match=r"the text has 31 tokens\n  expected: at least one window of 32"):
        run(texts=replace(TEXTS, **{name: text(0, 31)}))


def test_a_saved_result_comes_back(trained: PredictorSet, tmp_path: Path) -> None:
    trained.save(tmp_path / "a.npz")
    loaded = PredictorSet.load(tmp_path / "a.npz")
    assert loaded.rows == trained.rows
    assert (loaded.perplexity, loaded.inputs) == (trained.perplexity, trained.inputs)
    assert arrays(loaded) == arrays(trained)
    assert loaded.digest() == trained.digest()
    assert replace(trained, inputs="other").digest() == trained.digest()  # what it was made from does not matter
    down, up, bias = trained.predictors[0] or ()
    bias = bias.copy()
    bias[0] = np.nextafter(bias[0], 0)
    assert replace(trained, predictors=((down, up, bias), *trained.predictors[1:])).digest() != trained.digest()


def test_a_damaged_result_is_refused(trained: PredictorSet, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    trained.save(path)
    good = path.read_bytes()
    for data in (b"", good[: len(good) // 2], good[:3000] + b"?" + good[3001:], b"noise" * 99):
        path.write_bytes(data)
        with pytest.raises(ProfileError) as caught:
            PredictorSet.load(path)
        assert str(path) in str(caught.value)
    np.savez(path, meta=np.array(json.dumps({"rows": [{"rung": "gate"}], "perplexity": {}, "inputs": ""})))
    with pytest.raises(ProfileError, match="not a file of trained predictors"):
        PredictorSet.load(path)
    with pytest.raises(ProfileError):
        PredictorSet.load(tmp_path / "none.npz")


# What a choice costs.


def test_without_predictors_quality_is_that_of_transformers(sparse: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = sparse[0]
    ids = td.windows(TEXTS.report, 32)
    quality = measure_quality(checkpoint, ids, [DENSE] * LAYERS, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    with torch.inference_mode():
        logits = model(ids).logits[:, :-1]
    wanted = float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).exp())
    assert quality.perplexity == pytest.approx(wanted, rel=1e-4)
    again = measure_quality(checkpoint, ids, [DENSE] * LAYERS, tmp_path, "again")
    assert again.divergence == 0
    assert [t.fires for t in again.layers] == [t.fires for t in quality.layers]


def test_the_quality_counts_and_loses_what_a_predictor_leaves_out(sparse: Any, tmp_path: Path) -> None:
    checkpoint, d = sparse[0], sparse[0].decoder
    ids = td.windows(TEXTS.report, 32)
    w = td.layer_weights(checkpoint, 0, "cpu")
    p = Predictor(
        w["ffn/first"][:8], torch.randn(D_FF, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(D_FF)
    )
    ffn = SparseFfn(Layer(rung="predicted", rank=8), p)
    dense = measure_quality(checkpoint, ids, [DENSE] * LAYERS, tmp_path)
    quality = measure_quality(checkpoint, ids, [ffn, *[DENSE] * 2], tmp_path, "sparse")
    with torch.inference_mode():
        x, inputs = td.before_ffn(d, w, td.embed(d, td.global_weights(checkpoint, "cpu"), ids))
        h, predicted = td.neurons(d, w, inputs), p.scores(inputs) > 0
        y = td.ffn_output(w, h * predicted)
        lost = (td.ffn_output(w, h) - y).square().sum()
        x = x + y
    row = quality.layers[0].row(FfnBytes(d, "f16", "f16"), BYTES, ffn.layer)
    fires = h != 0
    assert row.density == pytest.approx(float(fires.float().mean()))
    assert row.recall == pytest.approx(float((fires & predicted).sum() / fires.sum()))
    assert row.precision == pytest.approx(float((fires & predicted).sum() / predicted.sum()))
    assert row.rows_read_over_active == pytest.approx(float(predicted.sum() / fires.sum()))
    assert row.error == pytest.approx(float(lost / x.square().sum()), rel=1e-3)
    assert quality.divergence > 0
    assert quality.perplexity != dense.perplexity
