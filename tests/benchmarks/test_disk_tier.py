"""The disk benchmark: cache policies on traces counted by hand, their files, and what is said without a cgroup."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.row_traces import persistence


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from disk_tier import policies

    return policies


def trace(*steps: list[int]) -> list[np.ndarray]:
    return [np.array(step, np.int64) for step in steps]


def test_policies_by_hand(policies: ModuleType) -> None:
    alternating = trace([5], [6], [5], [6], [5], [7], [5])
    held = range(2)
    assert policies.prefix(alternating, 2, held) == 0
    assert policies.lru(alternating, 2, held) == 4
    assert policies.belady(alternating, 2, held) == 4
    assert policies.lru(trace([0], [1], [0]), 2, held) == 3
    assert policies.by_pages(4)(trace([5], [6], [7], [0]), 4, []) == 2


def test_nothing_beats_knowing_the_future(policies: ModuleType) -> None:
    rng = np.random.default_rng(0)
    often = np.minimum(1, 4 / np.arange(1, 65))
    steps = trace(*(np.flatnonzero(rng.random(64) < often).tolist() for _ in range(30)))
    found = dict(policies.hit_rates([steps], 64, (0.5, 0.25), 1))
    for rates in found.values():
        assert all(rate <= best + 1e-9 for rate, best in zip(rates, found["Belady"], strict=True))
        assert 0 < rates[1] <= rates[0] <= 1


def test_traces_come_back_as_they_were_written(policies: ModuleType, tmp_path: Path) -> None:
    steps = trace([1, 2], [], [3])
    np.savez(tmp_path / "t.npz", **{"0": np.concatenate(steps), "0_counts": [len(step) for step in steps]})
    (found,) = policies.load_traces(tmp_path / "t.npz")
    assert [step.tolist() for step in found] == [[1, 2], [], [3]]
    nine = trace([1], [2], [3], [3], [3], [4], [5, 6], [1, 5], [5, 6, 7])
    assert persistence(nine, 8) == [3, 1, 2, 2, 2]


@pytest.mark.usefixtures("policies")
def test_synthetic_routing_is_about_as_persistent_and_skewed_as_published() -> None:
    from disk_tier import residency, routing

    for one in (residency.SMALL, residency.LARGE):
        same, hot = routing.persistence_and_hot_list(one.of(routing.text(400, range(routing.SUBJECTS))))
        assert 0.33 < same < 0.43
        assert 0.33 < hot < 0.43
    assert [token // routing.IDS for token in routing.text(130, [5, 2], 60)] == [5] * 60 + [2] * 60 + [5] * 10


@pytest.mark.usefixtures("policies")
def test_uses_of_experts_count_less_with_time() -> None:
    from disk_tier import residency

    often, profile_U = trace(*[[0, 1]] * 40, [2], [0, 1], [2], [0, 1]), np.zeros(4)
    assert residency.warm(often, 2, 1, profile_U) == 80 + 1 + 1
    assert residency.warm(trace([2, 3], [2, 3]), 2, 1, np.array([1.0, 1, 0, 0])) == 2  # always let in


def test_where_no_group_can_be_made_it_is_said(
    policies: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from disk_tier import limits

    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    with pytest.raises(limits.NoGroupError, match="does not exist"), limits.memory_group():
        pass
    monkeypatch.setattr(limits, "_ROOT", tmp_path / "none")
    with pytest.raises(limits.NoGroupError, match="No such file"), limits.memory_group():
        pass
