"""Experts from the checkpoint to the artifact, against counts by hooks on transformers' own modules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from support import families
from support.placeable import MUCH, machine
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from pi_compile.calibration.profiling import ProfileSpec, profile
from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.part_formats import resolve_formats
from pi_compile.cli.rendering import artifact_text
from pi_compile.cost_model.workload import Workload, rows_read
from pi_compile.errors import ProfileError
from pi_compile.evaluation.window_scores import Score
from pi_compile.packing import PackSpec, pack
from pi_compile.pipeline.summary import profile_report
from pi_compile.placement.formulation import Problem, Sizes
from pi_compile.placement.stage import ladder, place
from pi_compile.results.activation_profile import ActivationProfile, LayerWork, order_neurons
from pi_compile.results.predictor_set import PredictorSet
from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.predictor import Predictor, SparseFfn
from pi_compile.training import Texts, TrainSpec, train_predictors
from pi_compile.workers import work_folder
from pi_runtime import load
from pi_runtime.artifact.inspection import inspect
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import PARTS, FfnBytes, is_scales
from pi_runtime.kernels import reference

EXPERTS, PER_TOKEN, F = 5, 2, 140
KEEP = dict.fromkeys(PARTS, "keep")
TOKENS = np.random.default_rng(0).integers(3, 130, 8 * 20)
Made = tuple[Any, Checkpoint]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random TurboSparse-Mixtral whose experts have three groups, and the model that computes its logits."""
    case = families.CASES["turbosparse-mixtral"]
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.CASES, "wide", replace(case, fields={**case.fields, "intermediate_size": F}))
        return families.random_checkpoint(folder, "wide"), open_checkpoint(folder)


@pytest.fixture(scope="module")
def profiled(made: Made, tmp_path_factory: pytest.TempPathFactory) -> ActivationProfile:
    spec = ProfileSpec(window=20, batch=3, shard=4, cofiring_tokens=36)
    with work_folder(tmp_path_factory.mktemp("work")) as work:
        return profile(made[1], TOKENS, spec, work=work, inputs="i", progress=lambda *_: None)


def counted(model: Any, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(layers, X·F) tokens for which each neuron of a routed expert fires, the same that a last bit may decide, and
    (layers, X) tokens of each expert; token by token."""
    found = [m for m in model.modules() if isinstance(m, MixtralExperts)]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [m.register_forward_pre_hook(lambda _m, args: seen.append((args[0], args[1]))) for m in found]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    shape = (len(found), EXPERTS, F)
    fires, doubtful, routed = (np.zeros(s, int) for s in (shape, shape, shape[:2]))
    for n, (m, (x_TD, taken_TK)) in enumerate(zip(found, seen, strict=True)):
        for x, experts in zip(x_TD, taken_TK.tolist(), strict=True):
            for e in experts:
                gate, up = (m.gate_up_proj[e].detach() @ x).chunk(2)
                fires[n, e] += ((gate > 0) & (up > 0)).numpy()
                doubtful[n, e] += (torch.minimum(gate.abs(), up.abs()) < 1e-4).numpy()
                routed[n, e] += 1
    return fires.reshape(len(found), -1), doubtful.reshape(len(found), -1), routed


def workload(p: ActivationProfile, checkpoint: Checkpoint, layers: tuple[LayerWork, ...]) -> Workload:
    formats = resolve_formats(checkpoint.formats(), KEEP, tied_head=p.decoder.tied_head)
    return Workload.of(replace(p, layers=layers), formats, 20)


def test_counts_are_a_plain_count_of_routed_tokens(made: Made, profiled: ActivationProfile) -> None:
    fires, doubtful, routed = counted(made[0], td.windows(TOKENS, 20))
    np.testing.assert_array_equal(profiled.routed, routed)
    assert (routed.sum(1) == PER_TOKEN * profiled.tokens).all()
    assert len({*routed.ravel().tolist()}) > 2, "the router should prefer some experts"
    assert doubtful.sum() < 1e-2 * fires.sum()
    assert (np.abs(profiled.counts.astype(int) - fires) <= doubtful).all()
    density = profiled.counts.sum(1) / (PER_TOKEN * F * profiled.tokens)
    np.testing.assert_allclose(profiled.density(), density)
    assert 0.1 < density.min() < density.max() < 0.5
    rows = profile_report(profiled)["layers"]
    shares = [(row["busiest_expert"], row["idlest_expert"]) for row in rows]
    assert shares == [(r.max() / profiled.tokens, r.min() / profiled.tokens) for r in routed]


def test_each_expert_orders_its_own_neurons(profiled: ActivationProfile) -> None:
    order = profiled.order.reshape(-1, EXPERTS, F).astype(int)
    assert (np.sort(order, axis=2) == np.arange(EXPERTS * F).reshape(EXPERTS, F)).all()
    heat = profiled.ordered_counts().astype(int).reshape(-1, EXPERTS, F)
    groups = [heat[:, :, start : start + 64].sum(2) for start in (0, 64)]
    assert (groups[0] >= groups[1] * 0.99).all()
    counts, bits = np.arange(12), np.zeros((0, 12), np.uint8)
    assert order_neurons(counts, bits, 3).tolist() == [3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8]


def test_only_routed_tokens_are_computed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    d, w = made[1].decoder, td.layer_weights(made[1], 0, "cpu")
    x = torch.randn(3, 7, d.d_model, generator=torch.Generator().manual_seed(0))
    rows, original = [], td._expert_neurons
    monkeypatch.setattr(td, "_expert_neurons", lambda d, w, x, t: rows.append(len(x)) or original(d, w, x, t))
    share = td.routing(d, w, x)
    h = td.neurons(d, w, x).view(3, 7, EXPERTS, F)
    assert rows == (share > 0).sum((0, 1)).tolist()
    assert sum(rows) == 3 * 7 * PER_TOKEN
    up = (x @ w["ffn/rest"][:, 0].T).relu()
    dense = ((x @ w["ffn/first"].T).relu() * up).view(3, 7, EXPERTS, F) * share[..., None]
    torch.testing.assert_close(h, dense)
    torch.testing.assert_close(td.ffn_output(w, h.flatten(2)), dense.flatten(2) @ w["ffn/rest"][:, 1])


def test_predicted_bytes_are_the_bytes_of_the_profiled_text(made: Made, profiled: ActivationProfile) -> None:
    """Every token reads `first` of its experts, and of these `rest` where it fires: whatever the router prefers."""
    work = workload(profiled, made[1], (LayerWork(rung="gate"), LayerWork(rung="dense")))
    for n in range(2):
        first, rest = rows_read(work, n)
        assert first[-1] == PER_TOKEN * F * profiled.tokens
        assert rest[-1] == (first[-1], profiled.counts[n].sum())[n == 0]
        assert profiled.routed is not None
        for j, cut in enumerate(work.cuts.tolist()):
            assert first[j] == (np.array(work.expert_cuts(n, cut)) * profiled.routed[n].astype(int)).sum()


def test_a_profile_of_experts_comes_back(made: Made, profiled: ActivationProfile, tmp_path: Path) -> None:
    profiled.save(tmp_path / "p.npz")
    loaded = ActivationProfile.load(tmp_path / "p.npz")
    assert (loaded.digest(), loaded.placing_digest()) == (profiled.digest(), profiled.placing_digest())
    np.testing.assert_array_equal(loaded.routed, profiled.routed)
    assert loaded.formats == made[1].formats()
    assert profiled.routed is not None
    assert replace(profiled, routed=profiled.routed[:, ::-1]).digest() != profiled.digest()


@pytest.mark.parametrize("fault", ["order", "routed", "missing"])
def test_a_profile_that_contradicts_its_experts(profiled: ActivationProfile, fault: str, tmp_path: Path) -> None:
    assert profiled.routed is not None
    mixed = profiled.order.copy()
    mixed[0, [0, -1]] = mixed[0, [-1, 0]]  # each neuron once, but two in the wrong expert
    changes: dict[str, Any] = {
        "order": {"order": mixed},
        "routed": {"routed": profiled.routed // 4},
        "missing": {"routed": None},
    }[fault]
    replace(profiled, **changes).save(tmp_path / "p.npz")
    with pytest.raises(ProfileError, match=r"name every neuron once|routed"):
        ActivationProfile.load(tmp_path / "p.npz")


def test_the_artifact_holds_orders_counts_and_cuts_of_the_experts(
    made: Made, profiled: ActivationProfile, tmp_path: Path
) -> None:
    model, checkpoint = made
    work = workload(profiled, checkpoint, (LayerWork(rung="gate"),) * 2)
    placements = ladder(Problem.of(work, machine()))
    plans = [p.plan for p in placements]
    result = pack(checkpoint, PackSpec(), tmp_path / "a.pi", recipe={}, profile=profiled, plans=plans)
    assert result.manifest.plans == tuple(plans)
    ids = TOKENS[:20]
    with Artifact.open(tmp_path / "a.pi") as artifact:
        arrays = artifact.manifest.arrays
        for n, values in enumerate(checkpoint.layer_values(k) for k in range(2)):
            order = profiled.order[n].astype(int)
            np.testing.assert_array_equal(artifact.values(f"layers/{n}/ffn/order"), order)
            np.testing.assert_array_equal(artifact.values(f"layers/{n}/ffn/counts"), profiled.counts[n][order])
            for name in ("ffn/first", "ffn/rest"):
                np.testing.assert_array_equal(artifact.values(f"layers/{n}/{name}"), values[name][order])
            np.testing.assert_array_equal(artifact.values(f"layers/{n}/ffn/router"), values["ffn/router"])
        # What `place` counts is what the file holds.
        own = sum(a.nbytes for name, a in arrays.items() if not name.endswith(("ffn/order", "ffn/counts")))
        parts = ("embedding", "attention", "predictor", "ffn", "head")
        for p in placements:
            assert sum(p.gpu_bytes[part] + p.ram_bytes[part] for part in parts) == own
        assert not any(is_scales(name) for name in arrays)
        found = reference.forward(artifact, ids)
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("device", ["cpu", "stand-in"])
@pytest.mark.parametrize("mode", ["dense", "gate"])
def test_the_artifact_runs_as_transformers_does(
    made: Made, profiled: ActivationProfile, mode: str, device: str, tmp_path: Path
) -> None:
    """With half of the model beyond a cut, different for each expert."""
    model, checkpoint = made
    work = workload(profiled, checkpoint, (LayerWork(rung="gate"),) * 2)
    plan = place(Problem.of(work, machine()), Sizes.of(work).all_on_gpu // 2, MUCH).plan
    assert len({*plan.cuts}) > 2
    pack(checkpoint, PackSpec(), tmp_path / "a.pi", recipe={}, profile=profiled, plans=[plan])
    with load(tmp_path / "a.pi", mode=mode, device=device) as running:
        found, tally = running.examine(TOKENS[:20])
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(TOKENS[:20])[None]).logits[0].numpy()
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert (tally[:, 1] == 20 * PER_TOKEN * F).all()


def test_predictors_of_experts_are_trained_packed_and_run(
    made: Made, profiled: ActivationProfile, tmp_path: Path
) -> None:
    """What training measured is what the artifact computes: the same logits by torch and by the definition."""
    checkpoint, d = made[1], made[1].decoder
    texts = Texts(fit=TOKENS, tune=TOKENS[:40], report=TOKENS[40:80])
    spec = TrainSpec(window=20, batch=64, steps=3, perplexity_increase=100.0, rungs=("predicted",))
    with work_folder(tmp_path) as work:
        found = train_predictors(checkpoint, profiled, texts, spec, work=work, inputs="i", progress=lambda *_: None)
    pack(checkpoint, PackSpec(formats=KEEP | {"predictor": "f16"}), tmp_path / "a.pi", recipe={},
         profile=profiled, predictor_set=found)  # fmt: skip
    ffns = []
    for row, arrays in zip(found.rows, found.predictors, strict=True):
        assert arrays is not None
        down, up, bias = (torch.from_numpy(a) for a in arrays)
        assert (down.shape, up.shape) == ((EXPERTS * row.rank, d.d_model), (EXPERTS * F, row.rank))
        assert 0 < row.density < 0.5
        assert row.precision == pytest.approx(row.recall / row.rows_read_over_active)
        ffns.append(SparseFfn(row.layer, Predictor(down, up, bias).stored_as("f16")))
    with torch.inference_mode():
        global_w = td.global_weights(checkpoint, "cpu")
        x = td.embed(d, global_w, torch.from_numpy(TOKENS[:20])[None])
        weights = td.stored_layers(checkpoint, "cpu")
        *_, (x,) = td.layers(d, weights, [x], lambda n, _, w, inputs, h: ffns[n].apply(d, w, inputs, h)[1])
        wanted = td.logits(d, global_w, x)[0].numpy()
    with Artifact.open(tmp_path / "a.pi") as artifact:
        np.testing.assert_allclose(reference.forward(artifact, TOKENS[:20], "predicted"), wanted, atol=2e-3)
    with load(tmp_path / "a.pi", mode="predicted") as running:
        logits, tally = running.examine(TOKENS[:20])
    np.testing.assert_allclose(logits, wanted, atol=2e-3)
    assert (tally[:, 1] < 20 * PER_TOKEN * F).all()


def test_counts_above_a_threshold_stay_within_what_was_routed(profiled: ActivationProfile, tmp_path: Path) -> None:
    """The tune text may prefer other experts than the text that was profiled."""
    fired = np.tile(np.arange(F, dtype=np.uint64), EXPERTS)
    trained = PredictorSet(
        rows=(), predictors=(), predictor_format="f16", counts=(fired, None), counted_tokens=F, perplexity={}, inputs=""
    )
    found = trained.refine(profiled)
    assert profiled.routed is not None
    most = np.repeat(profiled.routed[0], F)
    np.testing.assert_array_equal(found.counts[0], np.minimum(fired * np.uint64(profiled.tokens) // np.uint64(F), most))
    np.testing.assert_array_equal(found.counts[1], profiled.counts[1])
    found.save(tmp_path / "p.npz")
    assert ActivationProfile.load(tmp_path / "p.npz").digest() == found.digest()


def test_inspect_shows_experts_and_the_range_of_their_cuts(
    made: Made, profiled: ActivationProfile, tmp_path: Path
) -> None:
    work = workload(profiled, made[1], (LayerWork(rung="gate"),) * 2)
    p = place(Problem.of(work, machine()), Sizes.of(work).all_on_gpu // 2, MUCH)
    pack(made[1], PackSpec(), tmp_path / "a.pi", recipe={}, profile=profiled, plans=[p.plan])
    found = inspect(tmp_path / "a.pi")
    (plan,) = found["plans"]
    assert plan["gpu_neuron_share"] == sum(p.plan.cuts) / (2 * EXPERTS * F)
    assert plan["gpu_expert_share"] == [min(p.plan.cuts) / F, max(p.plan.cuts) / F]
    text = artifact_text(found)
    assert "5 experts, 2 a token, of 140 neurons" in text
    assert "of an expert's" in text


def test_bytes_per_token_are_those_of_the_experts_it_goes_to(made: Made, tmp_path: Path) -> None:
    manifest = pack(made[1], PackSpec(), tmp_path / "a.pi", recipe={}).manifest
    m = replace(manifest, layers=(Layer(rung="predicted", rank=3), Layer(rung="predicted", rank=1)))
    row = FfnBytes.of(m.decoder, m.formats)
    tally = np.array([[300, 500, 200]] * 2)  # fires, read, both, over 10 tokens
    score = Score(1.0, np.zeros(1), np.zeros(0, np.int64), tally, 10)
    assert score.ffn_bytes(m, "dense") == [50 * row.first + PER_TOKEN * F * row.rest] * 2
    assert score.ffn_bytes(m, "gate") == [50 * row.first + 20 * row.rest] * 2
    picked = [50 * row.first + 20 * row.rest + PER_TOKEN * row.predictor(rank) for rank in (3, 1)]
    assert score.ffn_bytes(m, "predicted") == picked
