"""The simulation of many workers, where its answer is known."""

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.many_workers import simulation
from benchmarks.many_workers.simulation import Store, Task, simulate

STORE = Store(seconds_per_listing=0.0, operations_per_s=10**12)


def chain(length: int) -> list[Task]:
    return [Task(1.0, n, int(n > 0), [n + 1] if n + 1 < length else []) for n in range(length)]


@pytest.fixture(autouse=True)
def without_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DEATHS_PER_S", 1e-12), ("STRAGGLERS", 0.0), ("OWN_SPEED", 0.0)):
        monkeypatch.setattr(simulation, name, value)


@pytest.mark.parametrize(("workers", "seconds"), [(1, 12), (2, 6), (5, 3), (12, 1), (99, 1)])
def test_free_tasks_are_shared(workers: int, seconds: float) -> None:
    found = simulate([Task(1.0, n) for n in range(12)], workers, np.ones(1), STORE, 0)
    assert found.seconds == pytest.approx(seconds)
    assert found.wasted == 0


def test_a_chain_gains_nothing_from_workers() -> None:
    assert simulate(chain(9), 64, np.ones(1), STORE, 0).seconds == pytest.approx(9)


def test_deaths_waste_work_and_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "DEATHS_PER_S", 1 / 20)
    monkeypatch.setattr(simulation, "BACK", 1.0)
    found = simulate([Task(5.0, n) for n in range(40)], 4, np.ones(1), STORE, 0)
    assert found.seconds > 50
    assert 0 < found.wasted < 0.5


def test_a_slow_store_is_named() -> None:
    slow = Store(seconds_per_listing=0.0, operations_per_s=50)
    assert simulate([Task(0.1, n) for n in range(500)], 64, np.ones(1), slow, 0).bound == "the store"
