"""Counts from published curves: they keep density and curve, and are the same integers everywhere."""

import hashlib
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.synthetic import small_decoder

from pi_compile.errors import ProfileError
from pi_compile.files import bundled_folder
from pi_compile.planning.activation_curves import WHOLE, Curve, curve_counts, find_curve, read_curve
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.errors import UsageError

SHAPE = small_decoder("llama")
NAMES = sorted(path.stem for path in bundled_folder("profiles/activations/published").glob("*.csv"))


def shape(neurons: int, layers: int = 1) -> Decoder:
    return replace(SHAPE, n_layers=layers, d_ff=neurons)


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_curve_names_its_source(name: str) -> None:
    curve = find_curve(name)
    assert "Source: " in curve.source
    assert all(len(column) == 101 for column in curve.shares)


@pytest.mark.parametrize(
    ("name", "at_20"), [("opt-30b-mlp", 75.5), ("reglu-70b-mlp", 58), ("opt-30b", 64), ("reglu-70b", 84)]
)
def test_published_shares_are_met(name: str, at_20: float) -> None:
    """Figure 4: share of the top 20 %, of low enough density that nothing is clipped."""
    counts = curve_counts(find_curve(name), shape(1000), Decimal("0.001"))[0].astype(np.int64)
    assert 100 * counts[:200].sum() / counts.sum() == pytest.approx(at_20, abs=0.5)
    assert counts.sum() == pytest.approx(0.001 * 1000 * 10**6, rel=1e-6)


def test_each_layer_has_its_own_curve() -> None:
    counts = curve_counts(find_curve("bamboo-7b"), shape(512, layers=32), Decimal("0.1")).astype(np.int64)
    top = counts[:, : 512 // 5].sum(1) / counts.sum(1)
    assert 0.43 < top.min() < top.max() < 0.75
    assert top.mean() == pytest.approx(0.61, abs=0.01)  # the figure's mean over layers
    half = curve_counts(find_curve("bamboo-7b"), shape(512, layers=16), Decimal("0.1")).astype(np.int64)
    np.testing.assert_array_equal(half, counts[::2])


def test_what_is_above_one_is_spread_downwards() -> None:
    curve = Curve(name="c", source="s", shares=((0, WHOLE // 2, 3 * WHOLE // 4, 7 * WHOLE // 8, WHOLE),))
    found = curve_counts(curve, shape(4), Decimal("0.75"), tokens=100)[0]
    # Frequencies 1.5, 0.75, 0.375, 0.375: of 150 + 75 + 37.5 + 37.5 the first two keep 100, the third the rest.
    assert found.tolist() == [100, 100, 63, 37]


@given(
    rises=st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any),
    neurons=st.integers(1, 97),
    density=st.decimals("0.001", 1, places=3),
    tokens=st.integers(1, 10**7),
)
def test_counts_are_possible_and_complete(rises: list[int], neurons: int, density: Decimal, tokens: int) -> None:
    mass = np.cumsum([0, *rises])
    curve = Curve(name="c", source="s", shares=(tuple(int(m) * WHOLE // int(mass[-1]) for m in mass),))
    counts = curve_counts(curve, shape(neurons), density, tokens)[0].astype(np.int64)
    assert counts.max() <= tokens
    assert (np.diff(counts) <= 0).all()
    assert counts.sum() == int(density * neurons * tokens)


def test_experts_share_the_tokens() -> None:
    one = curve_counts(find_curve("bamboo-7b"), shape(64), Decimal("0.15"), tokens=1000)
    many = replace(shape(64), n_experts=8, experts_per_token=2)
    counts = curve_counts(find_curve("bamboo-7b"), many, Decimal("0.15"), tokens=4000)
    np.testing.assert_array_equal(counts, np.tile(one, (1, 8)))


def test_the_same_integers_everywhere() -> None:
    counts = curve_counts(find_curve("opt-30b"), shape(28672), Decimal("0.03"))
    found = hashlib.sha256(counts.astype("<u8").tobytes()).hexdigest()
    assert found == "03efe1696469218f362601c5789429f874dd67fa830f225c9a72109526ec9960"


@pytest.mark.parametrize("density", ["0", "-0.1", "1.01"])
def test_a_density_is_a_share(density: str) -> None:
    with pytest.raises(UsageError, match=r"^density="):
        curve_counts(find_curve("opt-30b"), shape(8), Decimal(density))


def test_an_unknown_curve_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="curve='bamboo-7b"):
        find_curve("bamboo7b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,y\n0,0\n100,x\n", "not an activation curve"),
        ("x,y\n0,0\n70,80\n100,100\n", "evenly spaced"),
        ("x,y\n0,0\n50,80\n100,90\n", "rise to 100 %"),
        ("x,y\n0,0\n50,80\n100,100\n1,2,3\n", "not an activation curve"),
        ("x,y\n", "not an activation curve"),
    ],
)
def test_a_broken_curve_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(ProfileError, match=message):
        read_curve(tmp_path / "c.csv")
