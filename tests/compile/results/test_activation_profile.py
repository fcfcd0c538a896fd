"""Profile files: what is saved is loaded unchanged, and damaged files are refused."""

import json
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.synthetic import small_decoder

from pi_compile.errors import ProfileError
from pi_compile.results.activation_profile import VERSION, ActivationProfile

LAYERS, NEURONS, TOKENS = 2, 70, 1000
DECODER = replace(small_decoder(), n_layers=LAYERS, d_ff=NEURONS)


def made(**changes: Any) -> ActivationProfile:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, TOKENS + 1, (LAYERS, NEURONS)).astype(np.uint64)
    order = np.stack([rng.permutation(NEURONS) for _ in range(LAYERS)]).astype(np.uint32)
    fields = {"decoder": DECODER, "tokens": TOKENS, "counts": counts, "order": order, "inputs": "digest"}
    return ActivationProfile(**{**fields, **changes})


def stored(path: Path, **changes: Any) -> Path:
    """A file with other arrays than `save` would write."""
    p = made()
    meta = {"version": VERSION, "decoder": asdict(p.decoder), "tokens": p.tokens, "inputs": p.inputs}
    meta |= {"formats": {}, "layers": [], "predictor_format": "", **changes.pop("meta", {})}
    arrays = {"meta": np.array(json.dumps(meta)), "counts": p.counts, "order": p.order, **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_a_saved_profile_comes_back(tmp_path: Path) -> None:
    profile = made()
    profile.save(tmp_path / "a.npz")
    loaded = ActivationProfile.load(tmp_path / "a.npz")
    np.testing.assert_array_equal(loaded.counts, profile.counts)
    np.testing.assert_array_equal(loaded.order, profile.order)
    assert (loaded.decoder, loaded.tokens, loaded.inputs) == (profile.decoder, profile.tokens, profile.inputs)
    assert loaded.digest() == profile.digest()
    assert [f.name for f in tmp_path.iterdir()] == ["a.npz"]
    profile.save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_the_digest_is_of_the_content() -> None:
    profile = made()
    counts, order = profile.counts.copy(), profile.order.copy()
    counts[1, 5] ^= np.uint64(1)
    order[0, [3, 4]] = order[0, [4, 3]]
    others = [
        made(counts=counts),
        made(order=order),
        made(tokens=TOKENS + 1),
        made(decoder=replace(DECODER, norm_eps=1e-3)),
    ]
    assert len({profile.digest(), *(other.digest() for other in others)}) == 5
    assert made(inputs="other").digest() == profile.digest()  # what it was made from does not matter
    assert made(counts=profile.counts.astype(">u8")).digest() == profile.digest()


def test_a_profile_of_a_large_model_is_small_enough_to_commit(tmp_path: Path) -> None:
    """OPT-6.7B: 32 layers of 16384 neurons, counts over a million tokens that follow a power law."""
    rng = np.random.default_rng(0)
    counts = (10**6 * rng.permuted(np.tile(np.arange(1, 16385) ** -0.8, (32, 1)), axis=1)).astype(np.uint64)
    order = np.argsort(-counts.astype(np.int64), axis=1).astype(np.uint32)
    made(decoder=replace(DECODER, n_layers=32, d_ff=16384), tokens=10**6, counts=counts, order=order).save(
        tmp_path / "large.npz"
    )
    assert (tmp_path / "large.npz").stat().st_size < 3_000_000


def test_figures() -> None:
    counts = np.zeros((2, NEURONS), np.uint64)
    counts[0, :7] = [100, 50, 20, 10, 10, 5, 5]
    order = np.tile(np.arange(NEURONS, dtype=np.uint32), (2, 1))[:, ::-1]
    profile = made(counts=counts, order=order)
    np.testing.assert_allclose(profile.density(), [200 / NEURONS / TOKENS, 0])
    curve = profile.cumulative_curve(10)
    assert curve.shape == (2, 11)
    np.testing.assert_allclose(curve[0], [0, *[1] * 10])  # a tenth of 70 neurons are the seven that fire
    np.testing.assert_allclose(profile.cumulative_curve(NEURONS)[0, :4], [0, 0.5, 0.75, 0.85])
    np.testing.assert_array_equal(curve[1], 0)  # nothing fires: no share of nothing
    np.testing.assert_array_equal(profile.ordered_counts()[0, -3:], [20, 50, 100])


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(
        ProfileError, match=r"no such activation profile\n  try: `pi-compile profile RECIPE --export FILE`"
    ):
        ActivationProfile.load(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "a whole"), (b"PK\x03\x04", "a whole"), (b"counts", "an"), (bytes(range(256)) * 9, "an")],
    ids=["empty", "zip", "text", "noise"],
)
def test_another_file(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ProfileError, match=rf"a\.npz: not {message} \.npz file") as caught:
        ActivationProfile.load(tmp_path / "a.npz")
    assert caught.value.exit_code == 3


def test_a_folder_and_a_bare_array(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    for path in (tmp_path, tmp_path / "a.npy"):
        with pytest.raises(ProfileError):
            ActivationProfile.load(path)


def test_a_damaged_file_is_refused_or_means_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    made().save(path)
    good, digest = path.read_bytes(), made().digest()
    refused = 0
    for place in range(0, len(good), 3):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        path.write_bytes(bad)
        try:
            assert ActivationProfile.load(path).digest() == digest
        except ProfileError:
            refused += 1
    for size in range(0, len(good), 16):
        path.write_bytes(good[:size])
        with pytest.raises(ProfileError):
            ActivationProfile.load(path)
    assert refused > 0.2 * len(good)  # what remains are dates and attributes of the ZIP


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"counts": None}, "not an activation profile\n  found: 'counts'", id="no-counts"),
        pytest.param({"meta": {"tokens": "many"}}, "meta.tokens: expected int, found 'many'", id="no-number"),
        pytest.param({"meta": {"decoder": {}}}, "meta.decoder.d_model: missing", id="no-decoder"),
        pytest.param({"meta": {"more": 1}}, "meta.more: unknown key", id="unknown-key"),
        pytest.param({"meta": {"version": 1}}, "meta.version: expected 2, found 1", id="version"),
        pytest.param({"meta": {"tokens": TOKENS // 2}}, "counts above the 500 tokens", id="counts-above-tokens"),
        pytest.param({"meta": {"tokens": 0}, "counts": np.zeros((2, 70), np.uint8)}, "the 0 tokens", id="no-tokens"),
        pytest.param(
            {"counts": np.zeros((2, 71), np.uint8)}, "an array of shape (2, 71), expected (2, 70)", id="shape"
        ),
        pytest.param({"counts": np.zeros((2, 70))}, "not an activation profile", id="floats"),
        pytest.param({"counts": np.full((2, 70), -1)}, "not an activation profile", id="negative"),
        pytest.param({"order": np.zeros((2, 70), np.uint8)}, "does not name every neuron once", id="order"),
        pytest.param({"order": np.array([{}])}, "not a whole .npz file", id="pickle"),
    ],
)
def test_a_file_that_contradicts_itself(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        ActivationProfile.load(stored(tmp_path / "a.npz", **changes))
    assert message in str(caught.value)
    assert "a.npz: " in str(caught.value)


def test_an_entry_that_is_no_array(tmp_path: Path) -> None:
    made().save(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz") as old, zipfile.ZipFile(tmp_path / "b.npz", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"counts" if name == "order.npy" else old.read(name))
    with pytest.raises(ProfileError, match="order is no array"):
        ActivationProfile.load(tmp_path / "b.npz")


def test_persistence_is_kept_and_checked(tmp_path: Path) -> None:
    """It enters what placing goes by, and nothing that training and packing go by."""
    persistence = np.array([[100, 40, 50, 60, 100], [90, 0, 0, 3, 3]], np.uint64)
    profile = made(persistence=persistence)
    profile.save(tmp_path / "a.npz")
    loaded = ActivationProfile.load(tmp_path / "a.npz")
    assert loaded.persistence is not None
    np.testing.assert_array_equal(loaded.persistence, persistence)
    np.testing.assert_allclose(loaded.persistent_shares()[0], [0.4, 0.5, 0.6, 1.0])  # type: ignore[index]
    assert loaded.digest() == made().digest()
    assert loaded.placing_digest() == profile.placing_digest() != made().placing_digest()
    for wrong in ([[100, 50, 40, 60, 100]] * 2, [[100, 40, 50, 60, 101]] * 2):
        with pytest.raises(ProfileError, match="more activations that persisted"):
            ActivationProfile.load(stored(tmp_path / "b.npz", persistence=np.array(wrong, np.uint64)))
