"""What a budget is divided into fits the budget, and more memory never holds fewer rows."""

import numpy as np
import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.reader import Artifact
from pi_runtime.disk.ram_plan import ROW_ARRAYS, RamPlan, plan_for, row_nbytes, slot_nbytes
from pi_runtime.errors import DoesNotFitError

FIXED = 1 << 20


@pytest.fixture(scope="module", params=[1, 4])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    experts = {"n_experts": request.param, "experts_per_token": min(2, request.param)}
    decoder = small_decoder(d_ff=1500, n_layers=3, **experts)
    path = tmp_path_factory.mktemp("plan") / "model.pi"
    return Artifact.open(random_artifact(path, decoder, ranks=[4, None, 4], profiled=True))


def rows_bytes(artifact: Artifact, plan: RamPlan) -> int:
    return sum(plan.slots(name) * slot_nbytes(artifact.manifest, name) for name in ROW_ARRAYS)


def held(plan: RamPlan) -> list[int]:
    return [slots.pinned + slots.cached for slots in (*plan.first_L, *plan.rest_L)]


@pytest.mark.parametrize("mode", ["auto", "gate", "dense"])
def test_a_plan_fits_its_budget(artifact: Artifact, mode: str) -> None:
    with pytest.raises(DoesNotFitError) as found:
        plan_for(artifact, mode, FIXED, FIXED)
    least = int(str(found.value.expected).split()[2])
    m = artifact.manifest
    whole = sum(row_nbytes(m, name) for name in ROW_ARRAYS) * m.decoder.neurons * 3
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
    whole = sum(row_nbytes(m, name) for name in ROW_ARRAYS) * m.decoder.neurons * 3
    plan = plan_for(artifact, "auto", FIXED + whole // 2, FIXED)
    assert plan.two_phases_L == (False, True, False)
    assert plan.first_L[1].pinned == m.decoder.neurons
    assert plan.rest_L[1].pinned + plan.rest_L[1].cached < m.decoder.neurons
