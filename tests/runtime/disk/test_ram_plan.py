"""What a budget is divided into fits the budget, and more memory never holds fewer rows."""

import numpy as np
import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import PROMPT_TOKENS, ROW_ARRAYS, least_row_buffers, row_buffers, row_nbytes, slot_nbytes
from pi_runtime.artifact.schema import Manifest, RowPlan
from pi_runtime.disk.ram_plan import RamPlan, plan_for
from pi_runtime.errors import DoesNotFitError

FIXED = 1 << 20


@pytest.fixture(scope="module", params=[1, 4])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    experts = {"n_experts": request.param, "experts_per_token": min(2, request.param)}
    decoder = small_decoder(d_ff=1500, n_layers=3, **experts)
    path = tmp_path_factory.mktemp("plan") / "model.pi"
    return Artifact.open(random_artifact(path, decoder, ranks=[4, None, 4], profiled=True))


def rows_bytes(artifact: Artifact, plan: RamPlan) -> int:
    nbytes = slot_nbytes(artifact.manifest.decoder, artifact.manifest.formats["ffn"])
    return sum(plan.slots(name) * nbytes[name] for name in ROW_ARRAYS)


def held(plan: RamPlan) -> list[int]:
    return [slots.pinned + slots.cached for slots in (*plan.first_L, *plan.rest_L)]


@pytest.mark.parametrize("mode", ["auto", "gate", "dense"])
def test_a_plan_fits_its_budget(artifact: Artifact, mode: str) -> None:
    with pytest.raises(DoesNotFitError) as found:
        plan_for(artifact, mode, FIXED, FIXED)
    least = int(str(found.value.expected).split()[2])
    m = artifact.manifest
    whole = sum(row_nbytes(m.decoder, m.formats["ffn"]).values()) * m.decoder.neurons * 3
    before = 0
    for budget in np.linspace(least, least + 2 * whole, 9).astype(int).tolist():
        plan = plan_for(artifact, mode, budget, FIXED)
        assert plan.fixed + rows_bytes(artifact, plan) <= budget
        assert max(held(plan)) <= m.decoder.neurons
        assert sum(held(plan)) >= before
        before = sum(held(plan))
    assert set(held(plan)) == {m.decoder.neurons}
    with pytest.raises(DoesNotFitError):
        plan_for(artifact, mode, least - 1, FIXED)


def test_gate_layers_keep_first_where_there_is_room(artifact: Artifact) -> None:
    m = artifact.manifest
    whole = sum(row_nbytes(m.decoder, m.formats["ffn"]).values()) * m.decoder.neurons * 3
    plan = plan_for(artifact, "auto", FIXED + whole // 2, FIXED)
    assert plan.two_phases_L == (False, True, False)
    assert plan.first_L[1].pinned == m.decoder.neurons
    assert plan.rest_L[1].pinned + plan.rest_L[1].cached < m.decoder.neurons


NEURONS, LAYERS = 1500, 3


def row_plan(m: Manifest, pinned: int, cached: int) -> RowPlan:
    """A stored division; the second of the layers is on the gate rung and has its `first` in RAM."""
    first, rest = slot_nbytes(m.decoder, m.formats["ffn"]).values()
    nbytes = LAYERS * (pinned + cached) * rest + 2 * (pinned + cached) * first + NEURONS * first
    return RowPlan(
        ram_bytes=nbytes,
        context=16,
        pinned=(pinned,) * LAYERS,
        cached=(cached,) * LAYERS,
        first=(False, True, False),
        slot_bytes=nbytes,
        read_bytes=0,
        predicted_ns=1,
        digest="0" * 64,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact with two stored divisions."""
    decoder = small_decoder(d_ff=NEURONS, n_layers=LAYERS)
    path = tmp_path_factory.mktemp("planned") / "model.pi"
    bare = Artifact.open(random_artifact(path, decoder, ranks=[4, None, 4], profiled=True)).manifest
    plans = tuple(row_plan(bare, *division) for division in ((64, 128), (320, 576)))
    return Artifact.open(random_artifact(path, decoder, ranks=[4, None, 4], profiled=True, row_plans=plans))


def budget_for(m: Manifest, slots: int) -> int:
    """The smallest budget that leaves so many bytes for rows that stay."""
    both, budget = sum(slot_nbytes(m.decoder, m.formats["ffn"]).values()), slots
    while row_buffers(m.decoder, both, budget).left < slots:
        budget += 1024
    return FIXED + budget


def test_a_budget_picks_the_largest_stored_division_that_fits(planned: Artifact) -> None:
    m = planned.manifest
    small, large = m.row_plans
    for stored, slots in ((small, small.slot_bytes), (small, large.slot_bytes - 4096), (large, large.slot_bytes)):
        budget = budget_for(m, slots)
        plan = plan_for(planned, "auto", budget, FIXED)
        assert plan.stored == stored
        assert [s.pinned for s in plan.rest_L] == list(stored.pinned)
        assert [s.pinned for s in plan.first_L] == [stored.pinned[0], NEURONS, stored.pinned[2]]
        assert all(s.cached >= cached for s, cached in zip(plan.rest_L, stored.cached, strict=True))
        assert plan.fixed + rows_bytes(planned, plan) <= budget


def test_what_is_left_of_a_budget_goes_to_the_caches(planned: Artifact) -> None:
    small, large = planned.manifest.row_plans
    tight, loose = (plan_for(planned, "auto", budget_for(planned.manifest, n), FIXED) for n in
                    (small.slot_bytes, large.slot_bytes - 4096))  # fmt: skip
    assert sum(s.cached for s in loose.rest_L) > 2 * sum(s.cached for s in tight.rest_L)


def test_without_a_stored_division_that_fits_a_rule_divides(planned: Artifact) -> None:
    """The budget is too small for any, or holds all; or the mode is not the one that they were solved for."""
    m = planned.manifest
    middle = budget_for(m, m.row_plans[0].slot_bytes)
    everything = budget_for(m, 2 * LAYERS * NEURONS * sum(slot_nbytes(m.decoder, m.formats["ffn"]).values()))
    found = [("auto", middle - (64 << 10)), ("auto", everything), ("gate", middle), ("dense", middle)]
    assert [plan_for(planned, mode, budget, FIXED).stored for mode, budget in found] == [None] * 4
    assert plan_for(planned, "predicted", middle, FIXED).stored == m.row_plans[0]


@pytest.mark.parametrize(("d_model", "d_ff"), [(64, 640), (8192, 28672), (9216, 36864), (1024, 1 << 20)])
def test_the_smallest_buffers_leave_no_less_than_nothing(d_model: int, d_ff: int) -> None:
    decoder, both = small_decoder(d_model=d_model, d_ff=d_ff, n_layers=64), 12 * d_model
    least = least_row_buffers(decoder, both)
    assert row_buffers(decoder, both, least).left >= 0


def test_more_room_never_leaves_less_for_rows() -> None:
    """A little above a threshold for prompts the division is that of a little below it."""
    decoder = small_decoder(d_ff=NEURONS, n_layers=LAYERS)
    both = 1000
    room = np.linspace(10 * both * 64, 40 << 20, 4000).astype(int).tolist()
    left = [row_buffers(decoder, both, r).left for r in room]
    assert left == sorted(left)
    assert {row_buffers(decoder, both, r).tokens for r in room} == {0, *PROMPT_TOKENS[2:]}
