"""The arithmetic of the benchmark `reality`."""

from pathlib import Path
from types import ModuleType

import pytest

from pi_compile.cost_model.token_time import LayerTime, TokenTime


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from against_reality import order

    return order


def token(*sides: tuple[int, int]) -> TokenTime:
    layers = [LayerTime(attention=10, predictor=0, gpu=g, cpu=c, handover=1, crossing=0) for g, c in sides]
    return TokenTime(embedding=3, layers=tuple(layers), head=7)


def test_two_sides_on_one_bus_take_at_least_what_it_needs_for_both(order: ModuleType) -> None:
    """Alone 8 and 6 together 8; the bus needs 5 + 4 for both. One side by itself takes what it takes."""
    found = order.on_one_bus(token((8, 6), (0, 14)), token((5, 4), (0, 9)))
    assert found == 3 + (10 + 9 + 1) + (10 + 14 + 1) + 7


def test_pairs_are_counted_once(order: ModuleType) -> None:
    assert order.pairs_in_order([(1, 5), (2, 6), (3, 4)]) == (1, 3)
