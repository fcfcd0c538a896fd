"""Placement against brute force, and the rules around it."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from synthetic import small_decoder

from pi_compile.activations import ActivationProfile
from pi_compile.cost import least_neurons, neuron_bytes
from pi_compile.errors import ProfileError
from pi_compile.knapsack import Choice, solve
from pi_compile.machine_file import Cpu, Gpu, Link, Machine, find_machine, library, read_machine
from pi_compile.placement import Layer, ladder, layers_of, place
from pi_runtime.artifact.sizes import PARTS

FORMATS = dict.fromkeys(PARTS, "f16")


def machine(sync_us: float = 0.0) -> Machine:
    return Machine(
        name="m",
        source="test",
        cpu=Cpu(name="c", cores=2, ram_gib=8.0, bandwidth_gb_per_s=40.0),
        gpu=Gpu(name="g", vram_gib=8.0, bandwidth_gb_per_s=400.0),
        link=Link(pcie_gb_per_s=16.0, sync_us=sync_us),
    )


def profile(counts: np.ndarray, tokens: int = 1000) -> ActivationProfile:
    decoder = small_decoder(n_layers=counts.shape[0], d_ff=counts.shape[1])
    order = np.argsort(-counts, axis=1, kind="stable").astype(np.uint32)
    return ActivationProfile(decoder=decoder, tokens=tokens, counts=counts.astype(np.uint64), order=order, inputs="x")


def greedy(layers: list[Layer], budget: int) -> tuple[int, ...]:
    """Cuts by a simple rule: the groups with most activations a byte, until the budget is used."""
    picks, left = [0] * len(layers), budget
    while True:
        best, choice = 0.0, None
        for n, layer in enumerate(layers):
            j = picks[n] + 1
            if j < len(layer.cuts) and (cost := int(layer.nbytes[j] - layer.nbytes[j - 1])) <= left:
                worth = int(layer.masses[j] - layer.masses[j - 1]) / cost
                if choice is None or worth > best:
                    best, choice = worth, (n, cost)
        if choice is None:
            return tuple(int(layer.cuts[j]) for layer, j in zip(layers, picks, strict=True))
        picks[choice[0]] += 1
        left -= choice[1]


def best_of_all(choices: list[Choice], capacity: int) -> tuple[int, ...]:
    """The tie rule spelt out: most value, least weight, then the heaviest options first."""

    def rank(picks: tuple[int, ...]) -> tuple[int, ...]:
        weights = [int(c.weights[j]) for c, j in zip(choices, picks, strict=True)]
        return (sum(int(c.values[j]) for c, j in zip(choices, picks, strict=True)), -sum(weights), *weights)

    every = itertools.product(*(range(len(c.weights)) for c in choices))
    fitting = (p for p in every if sum(int(c.weights[j]) for c, j in zip(choices, p, strict=True)) <= capacity)
    return max(fitting, key=rank)


@pytest.mark.parametrize("spread", [3, 50, 10**9], ids="values below {}".format)
def test_the_knapsack_equals_brute_force_on_random_instances(spread: int) -> None:
    rng = np.random.default_rng(spread)
    for _ in range(700):
        choices = []
        for _ in range(rng.integers(1, 5)):
            n = rng.integers(1, 5)
            weights = np.concatenate([[0], np.cumsum(rng.integers(1, spread, n))])
            values = np.concatenate([[0], rng.integers(0, spread, n)])
            choices.append(Choice(weights.astype(np.int64), values.astype(np.int64)))
        capacity = int(rng.integers(0, 1 + sum(int(c.weights[-1]) for c in choices)))
        found = solve(choices, capacity)
        assert found.picks == best_of_all(choices, capacity), (choices, capacity)
        assert found.value <= found.relaxed


@pytest.mark.parametrize("sync_us", [0.0, 0.3, 0.8])
def test_cuts_equal_the_best_subset_of_groups(sync_us: float) -> None:
    """Over all subsets of 64-neuron groups, hand-over rule included; the last group is ragged."""
    rng = np.random.default_rng(7)
    for _ in range(60):
        counts = rng.integers(0, 1000, (2, 64 * 3 + 20))
        p, m = profile(counts), machine(sync_us)
        ranks = [None, 5]
        sizes = [neuron_bytes(p.decoder, FORMATS, rank) for rank in ranks]
        budget = int(rng.integers(0, sum(sizes) * counts.shape[1] + 1))
        found = place(layers_of(p, FORMATS, ranks, m), budget, int(counts.sum()))

        ordered = p.ordered_counts().astype(int)
        groups = [slice(s, min(s + 64, ordered.shape[1])) for s in range(0, ordered.shape[1], 64)]
        best = 0
        for chosen in itertools.product(itertools.product([0, 1], repeat=len(groups)), repeat=2):
            neurons = [sum(g.stop - g.start for g, on in zip(groups, c, strict=True) if on) for c in chosen]
            least = [least_neurons(m, size) for size in sizes]
            enough = all(n == 0 or n >= (c or 0) for n, c in zip(neurons, least, strict=True))
            # With a ragged last group only prefixes are cuts of whole groups: a set may skip to it, a prefix may not.
            ragged = any(c[-1] and not all(c) for c in chosen)
            if enough and not ragged and sum(n * s for n, s in zip(neurons, sizes, strict=True)) <= budget:
                mass = sum(
                    ordered[n, g].sum() for n, c in enumerate(chosen) for g, on in zip(groups, c, strict=True) if on
                )
                best = max(best, int(mass))
        assert found.hot_mass == best
        assert found.used_bytes <= budget


def test_more_budget_never_holds_less_and_greedy_never_more() -> None:
    p = profile(np.random.default_rng(1).integers(0, 1000, (4, 640)))
    layers = layers_of(p, FORMATS, [None] * 4, machine(0.2))
    whole = sum(int(layer.nbytes[-1]) for layer in layers)
    masses = [place(layers, whole * share // 20, 10**9).hot_mass for share in range(21)]
    assert masses == sorted(masses)
    assert masses[-1] == int(p.counts.sum())
    for share in (3, 9, 15):
        budget = whole * share // 20
        cuts = greedy(layers, budget)
        mass = sum(int(la.masses[np.searchsorted(la.cuts, cut)]) for la, cut in zip(layers, cuts, strict=True))
        assert mass <= place(layers, budget, 10**9).hot_mass


def test_the_digest_knows_counts_and_budget() -> None:
    counts = np.random.default_rng(2).integers(1, 1000, (2, 256))
    layers = layers_of(profile(counts), FORMATS, [None, None], machine())
    one = place(layers, 50_000, int(counts.sum()))
    assert one.digest() == place(layers, 50_000, int(counts.sum())).digest()
    assert one.digest() != place(layers, 50_001, int(counts.sum())).digest()
    counts[0, counts[0].argmax()] += 1
    assert one.digest() != place(layers_of(profile(counts, 2000), FORMATS, [None, None], machine()), 50_000, 0).digest()


def test_least_neurons_pays_for_the_hand_over_exactly() -> None:
    m, nbytes = machine(sync_us=50.0), 3 * 8192
    least = least_neurons(m, nbytes)
    assert least is not None
    gain = nbytes / 40e9 - nbytes / 400e9
    assert least * gain >= 50e-6 > (least - 1) * gain
    slow = m.model_copy(update={"gpu": Gpu(name="g", vram_gib=1.0, bandwidth_gb_per_s=30.0)})
    assert least_neurons(slow, nbytes) is None
    assert least_neurons(m.model_copy(update={"gpu": None, "link": None}), nbytes) is None


def test_a_neuron_is_all_its_rows() -> None:
    gated, plain = small_decoder(d_model=100), small_decoder("opt", d_model=100)
    assert neuron_bytes(gated, FORMATS, None) == 3 * 256  # 200 bytes, padded to cache lines
    assert neuron_bytes(gated, FORMATS, 40) == 3 * 256 + 128 + 4
    assert neuron_bytes(plain, FORMATS, None) == 2 * 256 + 4


def test_the_ladder_rises_and_takes_further_budgets() -> None:
    p = profile(np.random.default_rng(3).integers(0, 1000, (3, 640)))
    plans = ladder(p, FORMATS, [None] * 3, machine(), [60_000])
    budgets = [plan.vram_bytes for plan in plans]
    assert 60_000 in budgets
    assert budgets == sorted(set(budgets))
    assert plans[-1].cuts == (640, 640, 640)
    assert all(plan.used_bytes <= plan.vram_bytes for plan in plans)
    assert ladder(p, FORMATS, [None] * 3, machine().model_copy(update={"gpu": None})) == ()


def test_a_layer_with_one_group_only() -> None:
    layer = Layer(cuts=np.array([0, 40]), masses=np.array([0, 9]), nbytes=np.array([0, 400]))
    assert place([layer], 399, 9).cuts == (0,)
    assert place([layer], 400, 9).cuts == (40,)


@pytest.mark.parametrize("path", sorted(library().glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_machines_are_read_and_written_alike(path: Path, tmp_path: Path) -> None:
    found = find_machine(path.stem, tmp_path)
    (tmp_path / "again.toml").write_text(found.to_toml())
    assert find_machine("again.toml", tmp_path) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 1", "name: Input should be a valid string"),
        ('name = "m"\nsource = "s"\n[cpu]\ncores = 2\nbandwith_gb_per_s = 3.0', "did you mean bandwidth_gb_per_s"),
        ("not toml", "not a machine profile"),
    ],
)
def test_a_wrong_machine_profile_names_the_key(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(ProfileError, match=message) as caught:
        read_machine(tmp_path / "m.toml")
    assert caught.value.exit_code == 3


def test_an_unknown_machine_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="pc-high, pc-low"):
        find_machine("pc-medium", tmp_path)
