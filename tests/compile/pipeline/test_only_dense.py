"""A recipe whose layers can only be dense is built without profile and training, with placements all the same."""

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
from support.hf import edit_json
from support.small_project import no_progress, small_project

from pi_compile.pipeline.packed import pack_plain
from pi_compile.pipeline.pipeline import Pipeline, forecast
from pi_compile.pipeline.summary import built_line
from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.verification import verify
from pi_runtime.errors import DeviceError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("source"))


@pytest.fixture
def recipe(source: Path, tmp_path: Path) -> Path:
    """A recipe of a model with SiLU, for a machine whose GPU pays."""
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    edit_json(next(tmp_path.glob("**/config.json")), hidden_act="silu")
    return tmp_path / "small.toml"


def built(recipe: Path) -> tuple[list[str], list[str], Path]:
    """The stages that ran, what was said, and the artifact."""
    said: list[str] = []
    output = recipe.with_suffix(".pi")
    with (found := Pipeline(recipe, "cpu", said.append, no_progress, output=output)).worker:
        found.pack(output)
    return found.ran, said, output


def test_profile_and_train_are_left_out(recipe: Path) -> None:
    ran, said, output = built(recipe)
    assert ran == ["pack"]
    assert [line for line in said if "left out" in line] == [
        "profile and train are left out: with silu no neuron is ever exactly zero, so every layer is dense"
    ]
    with Artifact.open(output) as artifact:
        assert {layer.rung for layer in artifact.manifest.layers} == {"dense"}
        assert artifact.manifest.plans
        assert artifact.manifest.profiled_tokens == 0
    assert built(recipe)[0] == []


def test_what_is_built_says_that_nothing_is_gained(recipe: Path) -> None:
    for machine, stored in (
        ("stand-in", ";"),
        ("laptop", ", stored as whole matrices, as fast as a plain pack;"),
    ):
        recipe.write_text(recipe.read_text().replace('"stand-in"', f'"{machine}"'))
        _, _, output = built(recipe)
        line = f"nothing is gained by skipping here: every layer is dense{stored} the quality budget is not spent"
        assert built_line(None, 0.01, output) == line
        assert forecast(Pipeline(recipe, "cpu", print, no_progress), output) == ""


def test_without_a_gpu_ffns_are_those_of_a_plain_artifact(recipe: Path) -> None:
    """So the artifact of a recipe that skips nothing is as quick as the same weights packed plainly."""
    recipe.write_text(recipe.read_text().replace('"stand-in"', '"laptop"'))
    _, _, output = built(recipe)
    plain = recipe.with_name("plain.pi")
    pack_plain(recipe, plain, progress=no_progress, notice=lambda _line: None)
    with Artifact.open(output) as mixed, Artifact.open(plain) as whole:
        assert (mixed.manifest.ffn_layout, whole.manifest.ffn_layout) == ("mixed", "matrices")
        assert {n: e.sha256 for n, e in mixed.manifest.arrays.items()} == {
            n: e.sha256 for n, e in whole.manifest.arrays.items()
        }
    for asked in ({"device": "stand-in"}, {"ram_budget": "1GiB"}):
        with pytest.raises(DeviceError, match="whole matrices"):
            load(output, **asked)


def test_it_runs_by_its_placement(recipe: Path) -> None:
    _, _, output = built(recipe)
    with load(output, device="stand-in") as by_plan, load(output, device="cpu") as alone:
        answers = ["".join(model.generate("once upon", max_tokens=5)) for model in (by_plan, alone)]
    assert answers[0] == answers[1]


def test_a_rung_that_skips_small_values_is_looked_for(recipe: Path) -> None:
    text = recipe.read_text()
    line = next(line for line in text.splitlines() if line.startswith("rungs"))
    recipe.write_text(text.replace(line, 'rungs = ["dense", "threshold"]'))
    recipe.write_text(recipe.read_text().replace('"stand-in"', '"laptop"'))
    ran, _, output = built(recipe)
    assert "train" in ran
    with Artifact.open(output) as artifact:
        m = artifact.manifest
        names = {n for n, layer in enumerate(m.layers) if layer.rung == "dense"}
        assert {n for n in range(len(m.layers)) if f"layers/{n}/ffn/down" in m.arrays} == names
        assert {n for n in range(len(m.layers)) if f"layers/{n}/ffn/order" not in m.arrays} == names
    verify(output)
    with load(output) as model:
        assert model.logits([1, 5, 9]).shape[0] == 3


@pytest.mark.parametrize(
    ("machine", "ram_gib", "matrices"), [("laptop", 0.0, True), ("laptop", 0.01, False), ("stand-in", 0.0, False)]
)
def test_rungs_are_priced_against_matrices_where_they_are_stored(
    recipe: Path, machine: str, ram_gib: float, matrices: bool
) -> None:
    """Without a GPU, and where the RAM that the recipe allows holds the model."""
    text = recipe.read_text().replace('"stand-in"', f'"{machine}"')
    recipe.write_text(re.sub(r"(?m)^ram_gib = .*", f"ram_gib = {ram_gib}", text))
    pipeline = Pipeline(recipe, "cpu", print, no_progress)
    assert pipeline.recipe.place.ram_gib == ram_gib
    assert pipeline._train_spec.processor.matrices == matrices


def quantised(recipe: Path) -> Path:
    """The recipe with its FFN in q4, rounded on text, whatever that costs."""
    text = recipe.read_text().replace('ffn = "keep"', 'ffn = "q4"')
    text = text.replace("perplexity_increase", "rounding_increase = 1.0\nperplexity_increase")
    recipe.write_text(f"{text}\n[quantise]\ntokens = 640\n")
    return recipe


@pytest.mark.parametrize(
    ("machine", "names"), [("stand-in", ("ffn/first", "ffn/rest")), ("laptop", ("ffn/first", "ffn/up", "ffn/down"))]
)
def test_weights_are_rounded_on_text(recipe: Path, machine: str, names: tuple[str, ...]) -> None:
    """By neuron and as whole matrices, by a build and packed plainly."""
    nearest, plain = (recipe.with_name(f"{name}.pi") for name in ("nearest", "plain"))
    layout = "neurons" if machine == "stand-in" else "matrices"
    recipe.write_text(recipe.read_text().replace('"stand-in"', f'"{machine}"'))
    quantised(recipe)
    ran, said, output = built(recipe)
    assert ran == ["corpus", "quantise", "pack"]
    assert any(line.startswith("quantising on 640 tokens") for line in said)
    assert any(line.startswith("rounding costs ") for line in said)
    assert built(recipe)[0] == []
    pack_plain(recipe, plain, layout=layout, progress=no_progress, notice=said.append)
    recipe.write_text(recipe.read_text().replace("tokens = 640", "tokens = 0"))
    pack_plain(recipe, nearest, layout=layout, progress=no_progress, notice=said.append)
    with Artifact.open(nearest) as artifact:
        digests = {name: entry.sha256 for name, entry in artifact.manifest.arrays.items()}
    for path in (output, plain):
        with Artifact.open(path) as artifact:
            assert artifact.manifest.recipe["quantise"] == {"tokens": 640}
            other = {n for n, entry in artifact.manifest.arrays.items() if entry.sha256 != digests[n]}
        assert {n.split("/", 2)[-1] for n in other} == {*names, *(f"{name}_scales" for name in names)}
        with load(path) as model, load(nearest) as unfitted:
            assert not np.array_equal(model.logits([1, 5, 9]), unfitted.logits([1, 5, 9]))
