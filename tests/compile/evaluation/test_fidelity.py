"""Evaluation of a packed file: its figures against the same computed by hand."""

import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from support import hf
from support.paths import GOLDEN
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError, CorpusError
from pi_compile.evaluation import window_scores
from pi_compile.evaluation.fidelity import LEAST_TIMED, LoadOptions, _tokens_per_s, _windows, evaluate
from pi_compile.evaluation.window_scores import Score, score_windows
from pi_compile.packing import PackSpec, pack
from pi_compile.results.activation_profile import ActivationProfile
from pi_compile.results.predictor_set import LayerRow, PredictorSet
from pi_runtime import Model, load
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.inspection import other_bytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import FfnBytes
from pi_runtime.files import CHARACTERS
from pi_runtime.kernels import reference

KEYS = {
    "device",
    "vram_bytes",
    "tokens",
    "perplexity",
    "agreement",
    "kl_divergence",
    "bytes_per_token",
    "ffn_bytes_per_token",
}
KEYS |= {"same_as", "increase_interval", "tokens_per_s", "layers"}
TEXT = "Once upon a time there was a little neuron that did not fire. It waited, and waited; then it did! " * 12
F = 83


def trained(d: Decoder, *, bias: float) -> PredictorSet:
    """Predictors of rank 5 that say the sign of a random projection, shifted."""
    rng = np.random.default_rng(0)
    row = LayerRow(
        rung="predicted", density=0.5, rank=5, ffn_bytes=1.0, gate_bytes=1.0, ffn_us=1.0, recall=1.0,
        precision=1.0, rows_read_over_active=1.0, error=0.0,
    )  # fmt: skip
    arrays = [
        (
            rng.standard_normal((5, d.d_model), np.float32),
            rng.standard_normal((F, 5), np.float32),
            np.full(F, bias, "f4"),
        )
        for _ in range(d.n_layers)
    ]
    return PredictorSet(
        rows=(row,) * d.n_layers,
        predictors=tuple(arrays),
        predictor_format="f32",
        counts=(None,) * d.n_layers,
        counted_tokens=1,
        perplexity={},
        inputs="x",
    )


@pytest.fixture
def model(tmp_path: Path) -> torch.nn.Module:
    return hf.random_llama(tmp_path / "model", intermediate_size=F)


def packed(tmp_path: Path, bias: float | None) -> Path:
    checkpoint = open_checkpoint(tmp_path / "model")
    d = checkpoint.decoder
    counts = np.random.default_rng(1).integers(0, 100, (d.n_layers, F)).astype(np.uint64)
    order = np.argsort(-counts.astype(np.int64), axis=1, kind="stable").astype(np.uint32)
    profile = ActivationProfile(decoder=d, tokens=100, counts=counts, order=order, inputs="x")
    predictors = None if bias is None else trained(d, bias=bias)
    pack(checkpoint, PackSpec(), tmp_path / "a.pi", recipe={}, profile=profile, predictor_set=predictors)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "a.pi"


def score(artifact: Path, model: Path | None = None) -> dict[str, object]:
    text = artifact.with_name("text.txt")
    found = evaluate(artifact, [text], model, tokens=96, window=32, progress=lambda _done, _total: None)
    assert set(found) == KEYS
    json.dumps(found)
    return found


def test_perplexity_and_agreement_are_those_of_transformers(tmp_path: Path, model: torch.nn.Module) -> None:
    artifact = packed(tmp_path, None)
    found = score(artifact, tmp_path / "model")
    with load(artifact) as opened:
        ids = torch.tensor(opened.tokenizer.encode(TEXT, prefix=False)[:96]).reshape(3, 32)
    with torch.inference_mode():
        loss = model.float()(input_ids=ids, labels=ids).loss
    for mode in ("checkpoint", "dense", "gate"):
        assert found["perplexity"][mode] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["agreement"] == {"dense": 1.0, "gate": 1.0}
    assert found["kl_divergence"] == pytest.approx({"dense": 0, "gate": 0}, abs=1e-7)
    assert found["increase_interval"]["dense"] == pytest.approx((0, 0), abs=1e-4)
    assert found["increase_interval"]["gate"] == pytest.approx((0, 0), abs=1e-4)


def test_modes_that_read_the_same_are_scored_once(tmp_path: Path) -> None:
    """With SiLU gate reads what dense reads: the same bits, from one pass over the text."""
    hf.random_llama(tmp_path / "model", intermediate_size=F, hidden_act="silu")
    artifact, steps = packed(tmp_path, None), list[tuple[int, int]]()
    found = evaluate(artifact, [tmp_path / "text.txt"], tokens=96, window=32, progress=lambda *s: steps.append(s))
    assert found["same_as"] == {"gate": "dense"}
    assert steps == [(n, 3) for n in range(4)]
    alone = {}
    for mode in ("dense", "gate"):
        with load(artifact, mode=mode) as opened:
            windows = _windows(opened, [tmp_path / "text.txt"], 96, 32)
            runs = {mode: partial(nullcontext, opened.examine)}
            alone |= score_windows(windows, runs, opened.manifest.decoder.vocab_size)
    for mode, one in alone.items():
        assert found["perplexity"][mode] == one.perplexity
        assert found["ffn_bytes_per_token"][mode] == sum(one.ffn_bytes(opened.manifest, mode))
    np.testing.assert_array_equal(alone["dense"].counts_L3, alone["gate"].counts_L3)


DECODERS = {
    "gated": small_decoder(),
    "plain": small_decoder("opt"),
    "squared": small_decoder("opt", activation="relu2"),
    "experts": small_decoder(n_experts=4, experts_per_token=2),
    "small values left out": small_decoder(threshold=0.05),
}


@pytest.mark.parametrize("fmt", ["f32", "q8", "q4"])
@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("predicted", [False, True], ids=["exact", "predicted"])
def test_gate_examines_with_the_bits_and_counts_of_dense(
    tmp_path: Path, decoder: Decoder, fmt: str, predicted: bool
) -> None:
    """So `evaluate` scores one of them for both."""
    ranks = [16 if predicted else None] * decoder.n_layers
    artifact = random_artifact(tmp_path / "a.pi", decoder, format=fmt, ranks=ranks)
    with load(artifact, mode="dense") as dense, load(artifact, mode="gate") as gate:
        for tokens in (2, 5, 24):
            ids = np.random.default_rng(tokens).integers(0, decoder.vocab_size, tokens)
            for of_dense, of_gate in zip(dense.examine(ids), gate.examine(ids), strict=True):
                np.testing.assert_array_equal(of_dense, of_gate)


def test_a_sparse_model_is_scored_once_for_dense_and_gate(tmp_path: Path, model: torch.nn.Module) -> None:
    steps = list[tuple[int, int]]()
    found = evaluate(
        packed(tmp_path, None), [tmp_path / "text.txt"], tokens=96, window=32, progress=lambda *s: steps.append(s)
    )
    assert found["same_as"] == {}
    assert steps == [(n, 3) for n in range(4)]
    assert found["ffn_bytes_per_token"]["gate"] < found["ffn_bytes_per_token"]["dense"]


def test_divergence_is_that_of_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the windows that are kept together; a token that neither run can give has no part in it."""
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 7, (5, 6))
    logits = {name: rng.standard_normal((7, 7)).astype(np.float32) for name in ("one", "other")}
    for table in logits.values():
        table[:, 3] = -np.inf
    windows[windows == 3] = 4
    runs = {
        name: lambda t=table: nullcontext(lambda ids: (t[ids], np.zeros((1, 3), int))) for name, table in logits.items()
    }
    p, q = (np.exp(logits[name][windows[:, :-1]].astype(float)) for name in ("one", "other"))
    p, q = (np.delete(x / x.sum(-1, keepdims=True), 3, -1) for x in (p, q))
    wanted = (p * np.log(p / q)).sum(-1).mean()
    for kept in (1, 2 * 4 * 7 * 6, 1 << 30):
        monkeypatch.setattr(window_scores, "KEPT_NBYTES", kept)
        found = score_windows(windows, runs, 7)
        assert found["one"].divergence is None
        assert found["other"].divergence == pytest.approx(wanted, rel=1e-6)
        assert len(found["other"].best) == 25


def test_timing_ends_after_some_seconds(
    tmp_path: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(Model, "decode", lambda _self, token, _cache: decoded.append(token))
    clock = iter(range(0, 10**6, 4))
    monkeypatch.setattr("pi_compile.evaluation.fidelity.time.perf_counter", lambda: float(next(clock)))
    with load(packed(tmp_path, None)) as opened:
        assert _tokens_per_s(opened, np.arange(30)) == 1 / 4
    assert len(decoded) == LEAST_TIMED


def test_rows_and_bytes_are_what_the_predictor_lets_through(tmp_path: Path, model: torch.nn.Module) -> None:
    """A predictor that names every neuron reads what gate reads and its own bytes; one that names none, only those."""
    everything, nothing = score(packed(tmp_path, 1e4)), score(packed(tmp_path, -1e4))
    row = 192  # 48 float32, three cache lines
    own = 3 * (5 * row + F * 64 + F * 4)
    dense, gate = everything["ffn_bytes_per_token"]["dense"], everything["ffn_bytes_per_token"]["gate"]
    assert dense == 3 * 3 * F * row
    assert everything["ffn_bytes_per_token"]["predicted"] == pytest.approx(gate + own)
    assert nothing["ffn_bytes_per_token"]["predicted"] == own
    assert everything["perplexity"]["predicted"] == pytest.approx(everything["perplexity"]["dense"], rel=1e-5)
    assert nothing["perplexity"]["predicted"] != pytest.approx(nothing["perplexity"]["dense"], rel=1e-5)
    low, high = nothing["increase_interval"]["predicted"]
    assert low < nothing["perplexity"]["predicted"] / nothing["perplexity"]["dense"] - 1 < high
    assert nothing["increase_interval"]["dense"] is None
    for layer in everything["layers"]:
        assert layer["recall"] == 1.0
        assert layer["precision"] == pytest.approx(layer["density"])
        assert layer["rows_read_over_active"] == pytest.approx(1 / layer["density"])
    assert {layer["recall"] for layer in nothing["layers"]} == {0.0}
    extra = everything["bytes_per_token"]["gate"] - gate
    assert everything["bytes_per_token"]["dense"] == pytest.approx(dense + extra)


def test_bytes_per_token_count_the_scales() -> None:
    """A row of 72 columns is 128 bytes in q8 and 64 in q4, with 8 bytes of scales; one of 24 columns is 64 and 8."""
    with Artifact.open(GOLDEN) as artifact:
        manifest = artifact.manifest
    layer = 40 * (128 + 8) + 72 * (64 + 8) + 2 * 72 * 4  # q8: qkv, out; norms
    assert other_bytes(manifest) == 2 * layer + 72 * 4 + 257 * 192
    first = 64 + 8  # q4
    tally = np.array([[30, 50, 20], [30, 400, 30]])  # fires, read, both, over 10 tokens
    found = Score(1.0, np.zeros(1), np.zeros(0, np.int64), tally, 10)
    assert found.ffn_bytes(manifest, "gate") == [5 * first + 2 * 2 * first, 40 * first + 3 * 2 * first]
    predictor = 3 * 320 + 40 * 64 + 40 * 4  # f32, rank 3
    assert found.ffn_bytes(manifest, "predicted")[0] == 5 * first + 2 * 2 * first + predictor
    assert found.ffn_bytes(manifest, "dense")[1] == 40 * first + 40 * 2 * first


def test_bytes_per_token_of_a_tied_head_in_q8(tmp_path: Path) -> None:
    """The embedding is read whole as the head; the one row of positions that is read is not counted."""
    path = random_artifact(tmp_path / "a.pi", small_decoder("opt", n_layers=1), format="q8", ranks=[3], profiled=True)
    with Artifact.open(path) as artifact:
        found, predictor = (
            other_bytes(artifact.manifest),
            FfnBytes.of(artifact.manifest.decoder, artifact.manifest.formats),
        )
    row = 64 + 8
    attention = 64 * row + 64 * 4 + 32 * row + 32 * 4
    assert found == 257 * row + attention + 3 * 2 * 32 * 4 + (40 + 32) * 4
    assert predictor.predictor(3) == 3 * row + 40 * (row + 4)


def test_what_cannot_be_scored_says_why(tmp_path: Path, model: torch.nn.Module) -> None:
    artifact = packed(tmp_path, None)
    with pytest.raises(CorpusError, match="at least one window"):
        evaluate(artifact, [artifact.with_name("text.txt")], None, tokens=8, window=32, progress=lambda *_: None)
    with pytest.raises(CorpusError, match=r"^text=.*none\.txt.*: no such file\n  try: "):
        evaluate(artifact, [tmp_path / "none.txt"], None, tokens=96, window=32, progress=lambda *_: None)
    with pytest.raises(CheckpointError, match="no such folder"):
        score(artifact, tmp_path / "nothing")
    hf.random_llama(tmp_path / "other", intermediate_size=F, hidden_act="silu")
    with pytest.raises(CheckpointError, match="not packed from this checkpoint"):
        score(artifact, tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match="no text in this folder"):
        evaluate(artifact, [tmp_path / "empty"], None, tokens=96, window=32, progress=lambda *_: None)


def test_of_a_folder_no_more_is_read_than_is_scored(tmp_path: Path, model: torch.nn.Module) -> None:
    artifact, folder = packed(tmp_path, None), tmp_path / "texts"
    (folder / ".hidden").mkdir(parents=True)
    (folder / ".hidden/a.txt").write_text("Hidden. " * 99)
    (folder / "b.TXT").write_text(TEXT, encoding="utf-8-sig")
    (folder / "c.txt").write_bytes(b"\xff is not read, for b.TXT has enough")
    with load(artifact) as opened:
        ids = opened.tokenizer.encode(TEXT, prefix=False)
        np.testing.assert_array_equal(_windows(opened, [folder], 96, 32).ravel(), ids[:96])
        (folder / "b.TXT").write_text(TEXT * 1000)
        opened.tokenizer.encode = Mock(side_effect=opened.tokenizer.encode)
        np.testing.assert_array_equal(_windows(opened, [folder], 96, 32).ravel(), ids[:96])
        assert len(opened.tokenizer.encode.call_args.args[0]) <= 96 * CHARACTERS


def test_recall_and_precision_are_those_of_the_predictor_on_the_same_inputs(
    tmp_path: Path, model: torch.nn.Module
) -> None:
    """Rows counted again with the reference: layer 0 sees the same input in every mode."""
    artifact = packed(tmp_path, 0.0)
    found = score(artifact)["layers"][0]
    with Artifact.open(artifact) as opened, load(artifact) as running:
        d, w = opened.manifest.decoder, reference.ArtifactWeights(opened, "layers/0/")
        ids = np.array(running.tokenizer.encode(TEXT, prefix=False)[:96]).reshape(3, 32)
        fires, read = [], []
        for window in ids:
            x = opened.values("embedding")[window]
            x = x + reference.attention(d, w, reference.norm(d, w, "attention/norm", x))
            x = reference.norm(d, w, "ffn/norm", x)
            fires.append(x @ w["ffn/first"].T > 0)
            read.append(reference.scores(w, x) > 0)
    both = np.logical_and(fires, read).sum()
    assert found["density"] == pytest.approx(np.mean(fires), abs=1e-3)
    assert found["recall"] == pytest.approx(both / np.sum(fires), abs=2e-3)
    assert found["precision"] == pytest.approx(both / np.sum(read), abs=2e-3)
    assert 0.1 < found["recall"] < 0.9


def test_folders_are_read_whole(tmp_path: Path, model: torch.nn.Module) -> None:
    artifact = packed(tmp_path, None)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    one = score(artifact)
    many = evaluate(artifact, [tmp_path / "texts"], None, tokens=96, window=32, progress=lambda *_: None)
    assert many["perplexity"] == one["perplexity"]


def test_a_cache_in_q8_is_compared_with_the_usual_one(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(n_layers=2))
    (tmp_path / "text.txt").write_text(TEXT)
    usual, found = (
        evaluate(path, [tmp_path / "text.txt"], tokens=96, window=32, options=LoadOptions(cache_format=fmt))
        for fmt in ("auto", "q8")
    )
    assert "cache" not in usual
    cache = found["cache"]
    assert (cache["format"], cache["usual_perplexity"]) == ("q8", usual["perplexity"]["dense"])
    assert 0 < abs(found["perplexity"]["dense"] / cache["usual_perplexity"] - 1) < 0.02
    assert cache["increase_interval"][0] <= cache["increase_interval"][1]
    assert cache["agreement"] > 0.9


def test_the_stand_in_scores_as_the_cpu_does(tmp_path: Path) -> None:
    plan = stored_plan((32, 0), 1 << 20, 1 << 19)
    path = random_artifact(tmp_path / "a.pi", small_decoder(n_layers=2), plans=(plan,))
    (tmp_path / "text.txt").write_text(TEXT)
    told: list[str] = []
    options = LoadOptions(device="stand-in", vram_budget=1 << 20, context=64, tell=told.append)
    here, there = (
        evaluate(path, [tmp_path / "text.txt"], None, tokens=64, window=32, progress=lambda *_: None, options=o)
        for o in (LoadOptions(), options)
    )
    assert (here["device"], here["vram_bytes"]) == ("cpu", None)
    assert (there["device"], there["vram_bytes"]) == ("stand-in", 1 << 20)
    # Two sides add up their own neurons first.
    for name, found in here["perplexity"].items():
        assert there["perplexity"][name] == (found and pytest.approx(found, rel=1e-6))
    assert set(told) == {"stand-in: by the placement for 1.0 MiB of GPU memory"}


def test_a_context_that_is_given_counts_before_the_one_that_is_needed(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(n_layers=1))
    for options, wanted in ((LoadOptions(), 48), (LoadOptions(context=64), 64)):
        with options.open(path, "dense", 48) as model:
            assert model.context == wanted
