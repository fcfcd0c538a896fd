"""Groups of all experts in one order: by hand, and against brute force over every cut of every expert."""

import itertools

import numpy as np
import pytest

from pi_compile.cost_model.workload import cuts, expert_cuts, group_order, group_sums


def sorted_counts(rng: np.random.Generator, experts: int, d_ff: int) -> np.ndarray:
    return -np.sort(-rng.integers(0, 1000, (experts, d_ff)), axis=1).ravel()


@pytest.mark.parametrize("d_ff", [1, 64, 100, 256])
def test_one_expert_goes_in_its_own_order(d_ff: int) -> None:
    counts = np.random.default_rng(0).integers(0, 9, d_ff)  # not even sorted
    assert group_order(counts, 1).tolist() == list(range(-(-d_ff // 64)))
    assert cuts(d_ff, 1).tolist() == [*range(0, d_ff, 64), d_ff]
    assert [expert_cuts(group_order(counts, 1), cut, d_ff, 1) for cut in cuts(d_ff, 1)] == [(c,) for c in cuts(d_ff, 1)]


def test_the_hottest_group_of_all_experts_goes_first() -> None:
    of_groups = np.array([[9, 5, 5], [8, 7, 1], [5, 5, 0]])
    order = group_order(np.repeat(of_groups, 64), 3)
    assert order.tolist() == [0, 3, 4, 6, 1, 7, 2, 5, 8]  # ties: the lower group, then the lower expert
    assert expert_cuts(order, 4 * 64, 192, 3) == (64, 128, 64)


def test_a_group_waits_for_a_colder_one_before_it() -> None:
    """Co-firing may move neurons between groups of near-equal heat."""
    order = group_order(np.repeat([[9, 4, 6], [7, 5, 4]], 64), 2)
    assert order.tolist() == [0, 3, 4, 1, 2, 5]  # 9, 7, 5, then the 4s: 4 with the 6 behind it, and 4


def test_short_groups_go_last() -> None:
    counts = np.array([[9] * 64 + [8] * 6, [3] * 64 + [3] * 6])
    assert cuts(70, 2).tolist() == [0, 64, 128, 134, 140]
    order = group_order(counts.ravel(), 2)
    assert order.tolist() == [0, 2, 1, 3]
    assert [expert_cuts(order, cut, 70, 2) for cut in (64, 128, 134, 140)] == [(64, 0), (64, 64), (70, 64), (70, 70)]


@pytest.mark.parametrize(("experts", "d_ff"), [(2, 192), (3, 128), (3, 40)])
def test_no_other_cuts_of_the_experts_hold_more(experts: int, d_ff: int) -> None:
    rng = np.random.default_rng(experts)
    for _ in range(20):
        counts = sorted_counts(rng, experts, d_ff)
        order, own = group_order(counts, experts), counts.reshape(experts, d_ff)
        best: dict[int, int] = {}
        for each in itertools.product(sorted({*range(0, d_ff, 64), d_ff}), repeat=experts):
            mass = sum(int(own[e, :cut].sum()) for e, cut in enumerate(each))
            best[sum(each)] = max(mass, best.get(sum(each), 0))
        for cut in cuts(d_ff, experts).tolist():
            each = expert_cuts(order, cut, d_ff, experts)
            assert sum(each) == cut
            assert sum(int(own[e, :c].sum()) for e, c in enumerate(each)) == best[cut]


def test_sums_of_groups_are_integers() -> None:
    values = np.arange(140, dtype=np.uint64)
    assert group_sums(values, 2).tolist() == [
        [sum(range(64)), sum(range(64, 70))],
        [sum(range(70, 134)), sum(range(134, 140))],
    ]
    assert group_sums(values, 2).dtype == np.int64
