"""Synthetic sparse models fire as they are told to, and their predictors name what fires."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sparse_model import Activity, Spec, build
from sparse_model.activity import TOKENS
from sparse_model.matrices import power_law
from support.synthetic import byte_tokenizer, small_decoder

from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.artifact.verification import verify
from pi_runtime.kernels import reference

DECODER = small_decoder(
    d_model=128, d_ff=512, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=500, context_length=128
)


def spec(format_name: str = "f32", density: float = 0.1) -> Spec:
    return Spec(decoder=DECODER, formats=dict.fromkeys(PARTS, format_name), density=density, rank=48)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[float, Path], dict[float, Activity]]:
    """f32 at 10 %: the exact predictor, and one that names half as many again."""
    folder = tmp_path_factory.mktemp("sparse")
    paths = {1.0: folder / "exact.pi", 1.5: folder / "more.pi"}
    return paths, build(spec(), paths, byte_tokenizer())


def decoded(path: Path, mode: str, tokens: int = TOKENS) -> np.ndarray:
    """(tokens, layers, 2): rows of `first` read and neurons kept while decoding pseudo-random tokens."""
    with load(path, mode=mode) as model:
        cache = model.new_cache()
        ids = np.random.default_rng(7).integers(0, DECODER.vocab_size, tokens)
        return np.stack([model.decode(int(token), cache)[1] for token in ids])


def active_sets(path: Path) -> np.ndarray:
    """(layers, tokens, neurons): what fires in the reference's layers."""
    found = []
    with Artifact.open(path) as artifact:
        ids = np.random.default_rng(7).integers(0, DECODER.vocab_size, TOKENS)
        x_TD = artifact.values("embedding")[ids]
        for n in range(DECODER.n_layers):
            w = reference.ArtifactWeights(artifact, f"layers/{n}/")
            x_TD = x_TD + reference.attention(DECODER, w, reference.norm(DECODER, w, "attention/norm", x_TD))
            normed_TD = reference.norm(DECODER, w, "ffn/norm", x_TD)
            found.append(normed_TD @ w["ffn/first"].T > 0)
            x_TD = x_TD + reference.ffn(DECODER, w, normed_TD)
    return np.stack(found)


def test_the_density_while_decoding_is_the_one_set_in_every_layer(built) -> None:
    paths, activities = built
    density_L = decoded(paths[1.0], "gate")[:, :, 1].mean(0) / DECODER.d_ff
    np.testing.assert_allclose(density_L, 0.1, rtol=0.2)
    np.testing.assert_allclose(activities[1.0].density_L, density_L, rtol=0.1)


@pytest.mark.parametrize("density", [0.02, 0.5, 1.0])
def test_other_densities(tmp_path: Path, density: float) -> None:
    build(spec(density=density), {1.0: tmp_path / "a.pi"}, byte_tokenizer())
    density_L = decoded(tmp_path / "a.pi", "gate")[:, :, 1].mean(0) / DECODER.d_ff
    np.testing.assert_allclose(density_L, density, rtol=0.2)


def test_the_predictor_names_what_fires(built) -> None:
    paths, activities = built
    kept, fire = decoded(paths[1.0], "predicted").sum((0, 1))[1], decoded(paths[1.0], "gate").sum((0, 1))[1]
    assert kept / fire > 0.99
    assert activities[1.0].recall > 0.99
    assert activities[1.0].read_over_active == pytest.approx(1, abs=0.01)


def test_the_other_predictor_reads_half_as_many_again(built) -> None:
    paths, activities = built
    read, kept = decoded(paths[1.5], "predicted").sum((0, 1))
    assert 1.4 < read / kept < 1.6
    assert activities[1.5].read_over_active == pytest.approx(1.5, abs=0.01)
    assert activities[1.5].recall == 1


def test_sets_change_from_token_to_token_and_hot_neurons_come_first(built) -> None:
    active_LTF = active_sets(built[0][1.0])
    common = (active_LTF[:, 1:] & active_LTF[:, :-1]).sum() / active_LTF[:, :-1].sum()
    assert 0.1 < common < 0.7
    frequency_LF = active_LTF.mean(1)
    assert (frequency_LF[:, :16].mean(1) > 3 * frequency_LF[:, 64:].mean(1)).all()
    # Far fewer than half of the neurons have most of the mass.
    assert (frequency_LF[:, :128].sum(1) > 0.6 * frequency_LF.sum(1)).all()


def test_overlap_and_runs_are_those_of_the_sets(built) -> None:
    activity, active_LTF = built[1][1.0], active_sets(built[0][1.0])
    common = (active_LTF[:, 1:] & active_LTF[:, :-1]).sum() / active_LTF[:, :-1].sum()
    starts = active_LTF[:, :, 0].sum() + (active_LTF[:, :, 1:] & ~active_LTF[:, :, :-1]).sum()
    # Other tokens than those measured, so alike and not equal.
    assert activity.overlap == pytest.approx(common, rel=0.15)
    assert activity.run_length == pytest.approx(active_LTF.sum() / starts, rel=0.1)
    assert activity.overlap_independent == pytest.approx(activity.overlap, rel=0.3)
    assert activity.run_length_independent == pytest.approx(activity.run_length, rel=0.3)


@pytest.mark.parametrize("format_name", ["f16", "bf16", "q8", "q4"])
def test_an_artifact_of_every_format(tmp_path: Path, format_name: str) -> None:
    """Stored whole and well-formed; the reference's neurons fire at the density set also after rounding."""
    path = tmp_path / "a.pi"
    build(spec(format_name), {1.0: path}, byte_tokenizer())
    verify(path)
    np.testing.assert_allclose(active_sets(path).mean((1, 2)), 0.1, rtol=0.2)


def test_the_model_generates_endlessly(built) -> None:
    with load(built[0][1.0]) as model:
        generation = model.generate([1, 2, 3], max_tokens=8)
        assert isinstance(model, Model)
        list(generation)
        assert generation.finish_reason == "length"


@pytest.mark.parametrize("exponent", [0.5, 0.83, 1.0, 1.5])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.9, 1.0])
def test_a_power_law_of_the_mean_wanted(density: float, exponent: float) -> None:
    frequencies = power_law(density, 4096, exponent)
    assert frequencies.mean() == pytest.approx(density, rel=1e-3)
    assert (np.diff(frequencies) <= 0).all()
    assert frequencies.max() < 1


def test_a_steeper_law_shares_neurons_as_measured_models_do() -> None:
    # OPT-6.7B, by the router settings of Polar Sparsity's repository.
    measured = {1: 0.095, 2: 0.153, 4: 0.206, 8: 0.290, 16: 0.398, 32: 0.517}
    frequencies = power_law(0.1, 8192, 1.5)
    for batch, share in measured.items():
        assert (1 - (1 - frequencies) ** batch).mean() == pytest.approx(share, rel=0.11)


def test_the_exponent_sets_what_tokens_share(tmp_path: Path) -> None:
    overlaps = []
    for exponent in (0.83, 1.5):
        path = tmp_path / f"{exponent}.pi"
        overlaps.append(build(replace(spec(), exponent=exponent), {1.0: path}, byte_tokenizer())[1.0].overlap)
    assert overlaps[0] + 0.1 < overlaps[1]


def test_same_spec_same_bytes(tmp_path: Path) -> None:
    small = replace(DECODER, n_layers=1)
    for name in ("a", "b"):
        build(replace(spec(), decoder=small), {1.0: tmp_path / name}, byte_tokenizer())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
