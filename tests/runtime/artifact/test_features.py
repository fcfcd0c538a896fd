"""A file says by name what it uses, and a reader says by name what it lacks."""

import json
from collections.abc import Callable
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

import pytest
from support.forge import put_together, take_apart
from support.synthetic import FACTS, golden_artifact, random_artifact, small_decoder, small_guess_head

from pi_runtime.artifact.decoder import facts
from pi_runtime.artifact.decoding import canonical_json
from pi_runtime.artifact.features import FEATURES
from pi_runtime.artifact.manifest_file import read_manifest
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.verification import verify
from pi_runtime.errors import ArtifactError


@pytest.fixture
def featured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that uses one of two features of a later release, and that release's registry."""
    for name in [*FEATURES]:
        monkeypatch.delitem(FEATURES, name)
    monkeypatch.setitem(FEATURES, "predictors", lambda m: any(layer.rank for layer in m.layers))
    monkeypatch.setitem(FEATURES, "many-experts", lambda m: m.decoder.n_experts > 99)
    return golden_artifact(tmp_path / "new.pi")


def refusal(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(path)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_a_file_lists_what_it_uses(featured: Path) -> None:
    verify(featured)
    with Artifact.open(featured) as artifact:
        assert (artifact.manifest.version, artifact.manifest.features) == (1, ("predictors",))
    data = featured.read_bytes()
    assert data[-90:].startswith(b"pi-artifact/1 sha256-4MiB ")
    assert b'"manifest":"manifest.json","version":1}' in data


VALUES = {"reordered": "block", "sandwich": "block", "clamped_swiglu": "activation", "none": "positions"}
"""Values that came later than their facts, and are features of their own."""


def names_of(given: dict[str, Any]) -> list[str]:
    """The features of a small decoder with some facts, beside those that it has without."""
    usual = {name: own.default for name, own in facts().items() if own.default is not MISSING}
    own = [n for n, value in given.items() if n in usual and value != usual[n] and n != "rotary_frequencies"]
    return sorted(f"decoder.{n}" for n in [*own, *(f"{f}.{v}" for v, f in VALUES.items() if given.get(f) == v)])


def plain_features(path: Path) -> set[str]:
    """The features of a small decoder without any of these facts."""
    with Artifact.open(random_artifact(path, small_decoder())) as artifact:
        return {*artifact.manifest.features}


@pytest.mark.parametrize("kind", FACTS)
def test_facts_of_a_decoder_are_features(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, path = (
        plain_features(tmp_path / "plain.pi"),
        random_artifact(tmp_path / "a.pi", small_decoder(**FACTS[kind])),
    )
    verify(path)
    with Artifact.open(path) as artifact:
        assert sorted({*artifact.manifest.features} - plain) == names_of(FACTS[kind])
    monkeypatch.delitem(FEATURES, names_of(FACTS[kind])[0])
    assert f"found: {names_of(FACTS[kind])[0]}" in refusal(path)


def test_every_fact_has_a_case() -> None:
    """So each is run from disk, in company and on two sides. Those of the ends of a model, and of whole matrices, have
    tests of their own."""
    ends = {"final_norm", "head_bias", "position_offset", "rotary_scale", "shared_norm", "threshold", "last_ff"}
    cases = {name for given in FACTS.values() for name in names_of(given)} | {f"decoder.{name}" for name in ends}
    named = {f"decoder.{name}" for name, own in facts().items() if own.default is not MISSING}
    assert named - cases == {"decoder.rotary_frequencies"}


def test_angles_of_the_other_way_are_a_feature(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(rotary_frequencies=(-1.0, -0.5)))
    with Artifact.open(path) as artifact:
        assert {*artifact.manifest.features} - plain_features(tmp_path / "plain.pi") == {
            "decoder.rotary_frequencies.negative"
        }


def test_what_has_its_default_is_left_out(tmp_path: Path) -> None:
    """And it must not be given: a file has one spelling."""
    with Artifact.open(random_artifact(tmp_path / "a.pi", small_decoder())) as artifact:
        text, plain = canonical_json(artifact.manifest), plain_features(tmp_path / "plain.pi")
    value = json.loads(text)
    assert {"row_plans", "guess", "guess_layers", "plans"}.isdisjoint(value)
    assert {"n_experts", "block", "logit_scale", "threshold"}.isdisjoint(value["decoder"])
    assert plain == {"decoder.rotary_frequencies", "formats.f32"}
    value["decoder"]["n_experts"] = 1
    with pytest.raises(ArtifactError, match="not in canonical JSON"):
        read_manifest(canonical_json(value), "a.pi")


def test_a_feature_that_a_release_lacks_is_refused_by_name(featured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FEATURES, "predictors")
    message = refusal(featured)
    assert "uses what this release lacks" in message
    assert "found: predictors" in message
    assert "expected: features among: many-experts" in message
    monkeypatch.delitem(FEATURES, "many-experts")
    assert "expected: features among: none" in refusal(featured)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.update(features=["many-experts", "predictors"]), "features: ['many-experts', 'predictors'], used"),
        (lambda m: m.update(features=["predictors", "predictors"]), "features: ['predictors', 'predictors'], used"),
        (lambda m: m.update(features=[]), "features: [], used are ['predictors']"),
        (lambda m: m.pop("features"), "features: [], used are ['predictors']"),
        (lambda m: m.update(features="predictors"), "manifest.features: expected"),
        (lambda m: m.update(features=[1]), "manifest.features[0]: expected str"),
        (lambda m: m.pop("version"), "artifact format version None"),
        (lambda m: m.update(version=3), "artifact format version 3"),
        (lambda m: m.update(version=True), "artifact format version True"),
        (lambda m: m.update(version=5), "artifact format version 5"),
        (lambda m: m.update(features=["\x1b[2J" * 9999], new=1), "uses what this release lacks"),
    ],
)
def test_what_is_listed_is_what_is_used(featured: Path, change: Callable[[Any], object], told: str) -> None:
    with Artifact.open(featured) as artifact:
        value = json.loads(canonical_json(artifact.manifest))
    change(value)
    with pytest.raises(ArtifactError) as caught:
        read_manifest(canonical_json(value), "a.pi")
    assert told in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_another_version_in_the_comment_is_refused(featured: Path, tmp_path: Path) -> None:
    entries, forged = take_apart(featured), tmp_path / "forged.pi"
    forged.write_bytes(put_together(entries, prefix=b"pi-artifact/1 sha256-4MiB "))
    assert forged.read_bytes() == featured.read_bytes()
    forged.write_bytes(put_together(entries, prefix=b"pi-artifact/5 sha256-4MiB "))
    assert "artifact format version 5" in refusal(forged)


def test_a_guess_head_is_a_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_decoder(d_embedding=24)
    path = random_artifact(tmp_path / "a.pi", decoder, format="q8", guess=small_guess_head(decoder, format="q8"))
    verify(path)
    with Artifact.open(path) as artifact:
        assert {*artifact.manifest.features} - plain_features(tmp_path / "plain.pi") == {"formats.q8", "guess_head"}
        assert artifact.manifest.guess == small_guess_head(decoder, format="q8")
        assert artifact.values("guess/qkv").shape == (64, 24 + 32)
    monkeypatch.delitem(FEATURES, "guess_head")
    assert "found: guess_head" in refusal(path)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"states": ()}, "guess.states"),
        ({"states": (0, 3)}, "guess.states: (0, 3) are not layers of 2"),
        ({"states": (1, 0)}, "guess.states"),
        ({"format": "u32"}, "guess.format: 'u32'"),
        ({"d_ff": 0}, "guess.d_ff: 0, expected integer in"),
        ({"n_kv_heads": 3}, "guess.n_kv_heads: 3, allowed only as a divisor of n_heads"),
        ({"shortlist": 258}, "guess.shortlist: 258 tokens of 257"),
        ({"norm_eps": 0.0}, "guess.norm_eps"),
        ({"rotary_frequencies": ()}, "guess.rotary_frequencies: 0 with head_dim 16"),
        ({"rotary_frequencies": (-1.0, -0.5)}, "guess.rotary_frequencies: 2"),
        ({"rotary_scale": 0.0}, "guess.rotary_scale: 0.0, expected float > 0"),
    ],
)
def test_an_impossible_guess_head_is_refused(wrong: dict[str, Any], problem: str) -> None:
    decoder = small_decoder()
    head = replace(small_guess_head(decoder), **wrong)
    assert any(found.startswith(problem) for found in head.problems(decoder))
    assert not list(small_guess_head(decoder).problems(decoder))
