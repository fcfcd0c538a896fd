"""Rows that are asked for have slots of their own until their turn is over; pinned ones always have theirs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_runtime.artifact.footprint import CHUNKS
from pi_runtime.disk.kernels import neuron_cache
from pi_runtime.disk.kernels.neuron_cache import HITS, MISSES, LayerRows
from pi_runtime.disk.whole_experts import EarlyNames, Heat

NEURONS, PINNED, STAGED = 200, 20, 200


def rows_with(cached: int) -> LayerRows:
    """Slot 0, pinned slots, cached slots, slots for staged rows; the first rows are pinned."""
    slots = 1 + PINNED + cached + STAGED
    owner_S, turn_S = np.full(slots, -1, np.int64), np.full(slots, -1, np.int64)
    cache = 1 + PINNED, 1 + PINNED + cached
    rows = neuron_cache.rows_of(NEURONS, *cache, 3, owner_S, np.zeros(slots, np.int64), turn_S)
    neuron_cache.place(rows, np.arange(PINNED), 1)
    return rows


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    cached=st.integers(0, 60),
    turns=st.lists(st.tuples(st.sets(st.integers(0, NEURONS - 1), min_size=1), st.booleans()), max_size=12),
)
def test_turns(cached: int, turns: list[tuple[set[int], bool]]) -> None:
    rows, staging, absent_C = rows_with(cached), 1 + PINNED + cached, np.zeros(CHUNKS, np.int64)
    row_I, slot_I = np.empty(NEURONS, np.int64), np.empty(NEURONS, np.int64)
    contents: dict[int, int] = {}
    for wanted, keep in turns:
        neuron_I, before = np.array(sorted(wanted), np.int64), rows.counts_2.copy()
        absent = int((rows.slot_N[neuron_I] == 0).sum())
        assert neuron_cache.begin_turn(rows, 0, neuron_I, False) == absent
        neuron_cache.absent_of_chunks(rows, 0, neuron_I, absent_C)
        assert absent_C.sum() == absent
        count, staged = neuron_cache.obtain(rows, 0, neuron_I, 0, CHUNKS, keep, staging, row_I, slot_I)
        assert count == absent
        assert staged == absent or keep
        assert (rows.counts_2 - before).tolist() == [len(wanted) - absent, absent]
        contents.update(zip(slot_I[:count].tolist(), row_I[:count].tolist(), strict=True))
        slots = rows.slot_N[neuron_I]
        assert (slots > 0).all()
        assert len(set(slots.tolist())) == len(slots)
        for row, slot in zip(neuron_I.tolist(), slots.tolist(), strict=True):
            assert slot == row + 1 if row < PINNED else contents[slot] == row
        neuron_cache.clear_staged(rows, staging, staged)
        assert (rows.slot_N < staging).all()
    assert (rows.slot_N[:PINNED] == np.arange(1, 1 + PINNED)).all()
    neuron_cache.forget(rows)
    assert not rows.slot_N[PINNED:].any()
    assert rows.counts_2[HITS] + rows.counts_2[MISSES] == sum(len(wanted) for wanted, _ in turns)


def test_a_row_that_comes_again_and_again_outlives_those_that_come_once() -> None:
    rows = rows_with(4)
    row_I, slot_I = np.empty(NEURONS, np.int64), np.empty(NEURONS, np.int64)

    def ask(*neurons: int) -> int:
        neuron_I = np.array(neurons, np.int64)
        neuron_cache.begin_turn(rows, 0, neuron_I, False)
        count, staged = neuron_cache.obtain(rows, 0, neuron_I, 0, CHUNKS, True, 1 + PINNED + 4, row_I, slot_I)
        neuron_cache.clear_staged(rows, 1 + PINNED + 4, staged)
        return count

    ask(100)
    ask(100)
    for other in range(110, 116):
        ask(other)
    assert ask(100) == 0
    assert ask(110) == 1


def test_the_unit_that_was_used_least_lately_makes_room_in_a_ring_that_layers_share() -> None:
    unit, units, layers, experts = 8, 6, 3, 10
    owner_S, turn_S, heat_U = np.full(200, -1, np.int64), np.full(200, -1, np.int64), np.zeros(layers * experts)
    pool = neuron_cache.rows_of(experts * unit, 1, 1 + units * unit, 3, owner_S, np.zeros(200, np.int64), turn_S)
    rows_L = neuron_cache.in_one_ring(pool, layers, unit, heat_U)
    row_I, slot_I = np.empty((2, experts * unit), np.int64)

    def ask(layer: int, expert: int, goes_on: bool = False) -> None:
        rows, neuron_I = rows_L[layer], expert * unit + np.arange(unit)
        neuron_cache.begin_turn(rows, 0, neuron_I, goes_on)
        _, staged = neuron_cache.obtain(rows, 0, neuron_I, 0, CHUNKS, True, -1, row_I, slot_I)
        assert staged == 0
        assert rows.slot_N[neuron_I].tolist() == list(range(rows.slot_N[neuron_I[0]], rows.slot_N[neuron_I[0]] + unit))

    def held() -> set[tuple[int, int]]:
        return {(n, e) for n, rows in enumerate(rows_L) for e in range(experts) if rows.slot_N[e * unit]}

    heat_U[:] = np.random.default_rng(0).permutation(layers * experts) + 1.0
    for expert in range(6):
        ask(expert % layers, expert)
    for layer, expert in ((0, 7), (1, 7), (2, 7), (0, 8), (1, 8)):
        before = held()
        fresh = {(n, e) for n, e in before if turn_S[rows_L[n].slot_N[e * unit]] > pool.clock_7[neuron_cache.TURN] - 1}
        coldest = min(before - fresh, key=lambda unit: heat_U[unit[0] * experts + unit[1]])
        ask(layer, expert)
        assert held() == before - {coldest} | {(layer, expert)}
    for expert in range(4):  # all of these are needed in one turn
        ask(2, expert, goes_on=expert > 0)
    assert {(2, expert) for expert in range(4)} <= held()
    neuron_cache.end_unit(rows_L[2], 3 * unit)
    heat_U[2 * experts + 3] = 0
    ask(2, 9, goes_on=True)
    assert (2, 3) not in held()
    assert {(2, 0), (2, 1), (2, 2), (2, 9)} <= held()


def test_heat_is_uses_of_late_and_in_the_long_run() -> None:
    heat = Heat(np.array([0.2, 0.1, 0.0]))
    assert np.argsort(heat.value_U).tolist() == [2, 1, 0]  # by the profile
    for _ in range(600):
        heat.use(np.array([1]))
        heat.age()
    np.testing.assert_allclose(heat.value_U[1], 2, atol=0.25)  # one use a token, by both rates
    for _ in range(40):
        heat.use(2)
        heat.age()
    assert heat.value_U[2] > heat.value_U[0]
    value_U = heat.value_U.copy()
    for _ in range(64):
        heat.age()
    assert (heat.value_U < value_U).all()
    assert heat.value_U[1] > heat.value_U[2]  # what was used for long outlives what was used for a while


def test_experts_are_read_ahead_at_places_that_are_mostly_right() -> None:
    """Of three places the first is always taken, the second in two of three turns, the last in one of three; an expert
    that was there teaches nothing, and one place recovers as soon as it is mostly right."""
    early = EarlyNames(3)
    for turn in range(60):
        expert_TK, nowhere = np.array([[turn, 100 + turn, 200 + turn]]), np.zeros((1, 3), np.bool_)
        early.worth_reading(expert_TK, nowhere)
        early.learn(np.array([turn, *([100 + turn] if turn % 3 else []), *([] if turn % 3 else [200 + turn])]))
    assert early.worth_reading(expert_TK, nowhere).tolist() == [[True, True, False]]
    for _ in range(100):
        early.worth_reading(expert_TK, np.array([[True, True, True]]))
        early.learn(expert_TK[0])
    assert early.worth_reading(expert_TK, nowhere).tolist() == [[True, True, False]]
    for _ in range(100):
        early.learn(expert_TK[0])
        early.worth_reading(expert_TK, nowhere)
    assert early.worth_reading(expert_TK, nowhere).all()
