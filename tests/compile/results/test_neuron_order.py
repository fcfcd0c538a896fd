"""The order of neurons: whichever fire together, no prefix of groups loses more than 1 % of its mass."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pi_compile.results.activation_profile import GROUP, LARGEST, LOSS, bands, order_neurons, similarity_order


def adversarial_counts() -> st.SearchStrategy[np.ndarray]:
    """Few distinct values and steep falls: bands of every width, ties, zeros, ragged last groups."""
    sizes = st.integers(1, 700)
    values = st.sampled_from([0, 1, 2, 99, 100, 101, 980, 990, 1000, 10**6, 2**40])
    near = st.integers(10_000, 10_300)
    return sizes.flatmap(lambda n: hnp.arrays(np.uint64, n, elements=values | near, fill=st.one_of(values, near)))


@settings(max_examples=60, deadline=None)
@given(counts=adversarial_counts(), seed=st.integers(0, 99), samples=st.integers(0, 5))
def test_every_prefix_of_groups_keeps_its_hot_mass(counts: np.ndarray, seed: int, samples: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2, (samples, len(counts))).astype(np.uint8)
    order = order_neurons(counts, bits)
    assert order.dtype == np.uint32
    np.testing.assert_array_equal(np.sort(order), np.arange(len(counts)))
    best = np.cumsum(-np.sort(-counts.astype(np.int64)))
    mass = np.cumsum(counts.astype(np.int64)[order])
    ends = np.append(np.arange(GROUP, len(counts), GROUP), len(counts)) - 1
    assert (mass[ends] >= (1 - LOSS) * best[ends]).all()


@settings(max_examples=60, deadline=None)
@given(counts=adversarial_counts())
def test_bands_cover_the_layer_and_cannot_lose_more(counts: np.ndarray) -> None:
    falling = -np.sort(-counts.astype(np.int64))
    found = bands(falling)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == len(counts)
    assert all(start % GROUP == 0 and start < stop for start, stop in found)
    # The worst order inside a band is the reverse one.
    reverse = np.concatenate([falling[start:stop][::-1] for start, stop in found])
    ends = np.arange(GROUP, len(counts) + 1, GROUP) - 1
    assert (np.cumsum(reverse)[ends] >= (1 - LOSS) * np.cumsum(falling)[ends]).all()


def test_bands_are_as_wide_as_they_can_be() -> None:
    assert bands(np.full(10 * GROUP, 5)) == [(0, 10 * GROUP)]
    assert bands(np.full(LARGEST + GROUP, 5)) == [(0, LARGEST), (LARGEST, LARGEST + GROUP)]
    halves = np.repeat([1000, 500], 2 * GROUP)
    assert bands(halves) == [(0, 2 * GROUP), (2 * GROUP, 4 * GROUP)]
    # One more group would cost the first prefix 2 %.
    assert bands(np.repeat([1000, 980, 979], GROUP)) == [(0, GROUP), (GROUP, 3 * GROUP)]
    assert bands(np.repeat([1000, 990], GROUP)) == [(0, 2 * GROUP)]
    assert bands(np.repeat([1000, 989], GROUP)) == [(0, GROUP), (GROUP, 2 * GROUP)]


def test_ties_go_to_the_lower_index() -> None:
    counts = np.array([3, 7, 3, 7, 0], np.uint64)
    assert order_neurons(counts, np.zeros((0, 5), np.uint8)).tolist() == [1, 3, 0, 2, 4]
    assert similarity_order(np.zeros((4, 3), np.uint8)).tolist() == [0, 1, 2]


def test_a_chain_goes_on_with_what_fires_most_alike() -> None:
    bits = np.array([[1, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0], [0, 1, 1, 1]], np.uint8)
    # Cosines with neuron 0: neuron 3 has 2/√3, neuron 2 has 1/√2. With neuron 3: 2 has 2/√2, 1 has 1/√2.
    assert similarity_order(bits).tolist() == [0, 3, 2, 1]
    # A neuron that always fires shares most tokens with neuron 0, but is less alike than one with three of its four.
    always = np.array([[1, 1, 1]] * 3 + [[1, 1, 0]] + [[0, 1, 0]] * 4, np.uint8)
    assert similarity_order(always).tolist() == [0, 2, 1]


def runs(active: np.ndarray) -> float:
    """Mean length of the runs of rows that are read, over samples."""
    starts = np.diff(active.astype(np.int8), axis=1, prepend=0) == 1
    return float(active.sum() / starts.sum())


@pytest.mark.parametrize("seed", [0, 1])
def test_neurons_that_fire_together_become_neighbours(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = rng.permutation(np.repeat(np.arange(16), 32))
    fires = rng.random((400, 16)) < 0.2
    bits = (fires[:, cluster] ^ (rng.random((400, len(cluster))) < 0.01)).astype(np.uint8)
    order = order_neurons(np.full(len(cluster), 1000), bits)
    assert runs(bits[:, order]) > 5 * runs(bits)
    # Few places where the cluster changes: 15 at the least.
    assert (np.diff(cluster[order]) != 0).sum() < 40
    np.testing.assert_array_equal(order, order_neurons(np.full(len(cluster), 1000), bits.copy()))
