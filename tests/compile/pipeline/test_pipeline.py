"""The stages of a recipe together: nothing twice, nothing stale, and a kill at any moment is survived."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support import hf
from support.paths import SUPPORT
from support.small_project import no_progress, prose, small_project, small_recipe

from pi_compile.checkpoint import open_checkpoint
from pi_compile.cli.main import app
from pi_compile.errors import ProfileError
from pi_compile.machine.profile import bundled_machines
from pi_compile.packing import PackSpec, pack
from pi_compile.pipeline import pipeline as pipeline_module
from pi_compile.pipeline import stages
from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.pipeline.store import code_digest, sources_of
from pi_runtime import console, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.verification import verify
from pi_runtime.errors import DoesNotFitError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, text and `small.toml`, that no test changes."""
    return small_project(tmp_path_factory.mktemp("source"))


@pytest.fixture
def project(tmp_path: Path, source: Path) -> Path:
    """A copy of the test's own."""
    return Path(shutil.copytree(source, tmp_path, dirs_exist_ok=True))


def pipeline(project: Path, output: str = "") -> Pipeline:
    path = project / output if output else None
    return Pipeline(project / "small.toml", "cpu", lambda _line: None, no_progress, output=path)


def build(project: Path) -> tuple[list[str], dict[str, object]]:
    """(stages that ran, report)."""
    p = pipeline(project)
    with p.worker:
        report = p.pack(project / "small.pi")
    return p.ran, report


@dataclass(frozen=True)
class Built:
    """A project that was built once. Its record names the artifact by its path, so it is put back, not copied."""

    folder: Path
    original: Path
    ran: list[str]
    report: dict[str, object]


@pytest.fixture(scope="module")
def first_build(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder, original = tmp_path_factory.mktemp("built") / "project", tmp_path_factory.mktemp("original") / "project"
    shutil.copytree(source, folder)
    ran, report = build(folder)
    shutil.copytree(folder, original)
    return Built(folder, original, ran, report)


@pytest.fixture
def built(first_build: Built) -> Path:
    """The built project as it was after its first build."""
    shutil.rmtree(first_build.folder)
    return Path(shutil.copytree(first_build.original, first_build.folder))


@pytest.fixture(scope="module")
def report(first_build: Built) -> dict[str, object]:
    """What the first build reported."""
    return first_build.report


def test_a_build_makes_a_whole_artifact(built: Path, first_build: Built) -> None:
    project, report = built, first_build.report
    assert first_build.ran == ["corpus", "profile", "train", "pack"]
    verify(project / "small.pi")
    assert hashlib.sha256((project / "small.pi").read_bytes()).hexdigest() == report["sha256"]
    with load(project / "small.pi") as model:
        assert model.manifest.profiled_tokens == 2976  # whole windows of 32
        assert [plan.vram_bytes for plan in model.manifest.plans] == sorted(
            {p.vram_bytes for p in model.manifest.plans}
        )
        assert "".join(model.generate("the quick", max_tokens=4))
    with load(project / "small.pi", device="stand-in") as model:
        assert "".join(model.generate("the quick", max_tokens=4))


def test_the_public_functions_make_the_same_bytes(
    built: Path, report: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a researcher calls them, with the settings of the recipe."""
    monkeypatch.chdir(built)
    recipe = small_recipe().model_dump()
    corpus, training, machine, formats = (recipe[name] for name in ("corpus", "train", "place", "pack"))
    checkpoint = open_checkpoint("model")
    streams = stages.read_corpus(checkpoint, corpus.pop("text"), **corpus, window=32)
    counts = stages.profile(checkpoint, streams.fit, **recipe["profile"])
    predictors = stages.train(checkpoint, counts, streams, "stand-in", **training, window=32, formats=formats)
    placements = stages.place(checkpoint, counts, predictors, machine["machine"], context=machine["context"])
    packed = stages.pack(
        checkpoint,
        "again.pi",
        profile=counts,
        predictors=predictors,
        placements=placements,
        formats=formats,
        recipe=small_recipe().model_dump(),
    )
    assert len(placements) > 1
    assert packed.sha256 == report["sha256"]


def test_a_second_build_does_nothing(built: Path, report: dict[str, object]) -> None:
    written = (built / "small.pi").stat().st_mtime_ns
    assert build(built) == ([], report)
    assert (built / "small.pi").stat().st_mtime_ns == written


def test_a_recipe_that_is_built_is_planned_with_what_it_measured(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console.run(app, ["plan", str(built / "small.toml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trained"]
    assert found["activation"] == "measured by the last build of small.toml on 2,976 tokens"
    assert found["machine_source"] == "chosen, not measured"


def test_a_damaged_output_is_packed_again(built: Path, report: dict[str, object]) -> None:
    data = bytearray((built / "small.pi").read_bytes())
    data[5000] ^= 1
    (built / "small.pi").write_bytes(data)
    assert build(built) == (["pack"], report)


def change_model(project: Path) -> None:
    file = project / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def change_text(project: Path) -> None:
    (project / "text" / "1.txt").write_text(prose(1, 1500)[:-1] + "y")


def change_recipe(**changes: dict[str, object]) -> object:
    return lambda project: (project / "small.toml").write_text(small_recipe(**changes).to_toml())


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        pytest.param(change_model, ["profile", "train", "pack"], id="model"),
        pytest.param(change_text, ["corpus", "profile", "train", "pack"], id="text"),
        pytest.param(
            change_recipe(profile={"window": 16}),
            ["corpus", "profile", "train", "pack"],
            id="profile-section",
            marks=pytest.mark.long,
        ),
        pytest.param(change_recipe(train={"seed": 1}), ["train", "pack"], id="train-section"),
        pytest.param(
            change_recipe(quality={"perplexity_increase": 0.5}),
            ["train", "pack"],
            id="quality-section",
            marks=pytest.mark.long,
        ),
        pytest.param(change_recipe(place={"vram_gib": [0.0001]}), ["pack"], id="place-section"),
        # Rungs are chosen for the machine; here they come out the same.
        pytest.param(
            change_recipe(place={"machine": "pc-low"}), ["train", "pack"], id="machine", marks=pytest.mark.long
        ),
        pytest.param(change_recipe(pack={"head": "f16", "embedding": "f16"}), ["pack"], id="pack-section"),
        pytest.param(change_recipe(quantise={"tokens": 512}), ["quantise", "pack"], id="quantise-section"),
    ],
)
def test_what_changed_and_what_depends_on_it_runs_again(built: Path, change: object, stages: list[str]) -> None:
    change(built)  # type: ignore[operator]
    assert build(built)[0] == stages
    assert build(built)[0] == []


@pytest.mark.parametrize(
    ("module", "stages"),
    [
        # Where the same result comes out, nothing after it depends on the code.
        pytest.param("pi_compile.corpus.streams", ["corpus"], marks=pytest.mark.long),
        ("pi_compile.calibration.profiling", ["profile"]),
        ("pi_compile.torch_model.predictor", ["train"]),
        pytest.param("pi_compile.torch_model.decoder", ["profile", "train"], marks=pytest.mark.long),
        pytest.param("pi_compile.cost_model.token_time", ["train"], marks=pytest.mark.long),
        ("pi_compile.results.predictor_set", ["train", "pack"]),
        ("pi_compile.packing", ["pack"]),
        ("pi_compile.pipeline.summary", []),
    ],
)
def test_changed_code_runs_its_stages_again(
    built: Path, report: dict[str, object], module: str, stages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = {True: "edited", False: ""}
    monkeypatch.setattr(pipeline_module, "code_digest", lambda m: code_digest(m) + edited[module in sources_of(m)])
    assert build(built) == (stages, report)  # no digest of code enters the artifact


@pytest.mark.slow
def test_a_build_killed_again_and_again_ends_in_the_same_bytes(project: Path, long: bool) -> None:
    kills = 40 if long else 3
    command = [sys.executable, "-m", "support.kill_builds", project / "small.toml", project / "small.pi"]
    done = subprocess.run([*command, str(kills), "1"], capture_output=True, text=True, check=False, cwd=SUPPORT.parent)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["killed"] == kills
    assert result["sha256"] == result["undisturbed"]
    assert hashlib.sha256((project / "small.pi").read_bytes()).hexdigest() == result["sha256"]
    verify(project / "small.pi")
    assert not list(project.glob(".*.tmp"))
    assert not list((project / ".pi-build" / "small").glob("*.work"))


def test_builds_with_other_inputs_are_strangers(project: Path) -> None:
    """Else one would remove what the other works on."""
    found = [pipeline(project).build, pipeline(project, "a.pi").build, pipeline(project, "b.pi").build]
    assert pipeline(project, "a.pi").build == found[1]
    (project / "text" / "0.txt").write_text(prose(5, 1500))
    found.append(pipeline(project).build)
    change_model(project)
    found.append(pipeline(project).build)
    machine = (bundled_machines() / "stand-in.toml").read_text()
    (project / "small.toml").write_text(small_recipe(place={"machine": "mine.toml"}).to_toml())
    for name in ("one", "two"):
        (project / "mine.toml").write_text(machine + f"# {name}\n")
        found.append(pipeline(project).build)
    assert len(set(found)) == len(found)


def test_two_outputs_at_once_have_a_report_each(built: Path, report: dict[str, object]) -> None:
    """The other packs after this one has, and before it reports."""
    first, second = pipeline(built, "first.pi"), pipeline(built, "second.pi")
    share = first.store.share

    def then_the_other(*arguments: Any) -> None:
        share(*arguments)
        assert second.pack(built / "second.pi")["artifact"] == str(built / "second.pi")

    first.store.share = then_the_other  # type: ignore[method-assign]
    with first.worker, second.worker:
        found = first.pack(built / "first.pi")
    assert found == report | {"artifact": str(built / "first.pi")}
    with first.worker, second.worker:
        assert first.pack(built / "first.pi") == found
    assert first.ran == ["pack"]


def test_a_quality_budget_out_of_reach_ends_the_build(project: Path, fails: Callable[..., str]) -> None:
    """Where no exact rung is allowed: exit code 5, the layers, and no artifact."""
    recipe = small_recipe(train={"rungs": ["predicted"]}, quality={"perplexity_increase": 1e-9})
    (project / "small.toml").write_text(recipe.to_toml())
    message = fails(5, "build", project / "small.toml", "-o", project / "small.pi")
    assert "training on 512 tokens: about " in message
    assert "the quality budget is out of reach with the rungs that [train] rungs allows" in message
    assert "most is lost in layers " in message
    assert "(predicted, error " in message
    assert not (project / "small.pi").exists()


def test_every_rung_may_be_in_one_artifact(project: Path) -> None:
    rungs = ["dense", "gate", "threshold", "predicted"]
    recipe = small_recipe(
        train={"rungs": rungs}, quality={"perplexity_increase": 0.5}, pack={"predictor": "auto", "ffn": "q8"}
    )
    (project / "small.toml").write_text(recipe.to_toml())
    build(project)
    verify(project / "small.pi")
    with Artifact.open(project / "small.pi") as artifact:
        manifest = artifact.manifest
    assert {layer.rung for layer in manifest.layers} - {"dense", "gate"}
    assert manifest.formats["predictor"] in ("f16", "q8", "q4")


def test_a_budget_that_fits_nothing_names_the_nearest(built: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"at least \d+ bytes") as caught:
        load(built / "small.pi", vram_budget=1)
    assert caught.value.exit_code == 4


def test_a_recipe_budget_that_holds_no_cut_is_refused(project: Path) -> None:
    (project / "small.toml").write_text(small_recipe(place={"vram_gib": [1e-6]}).to_toml())
    with pytest.raises(DoesNotFitError, match="vram_gib: 1073 bytes") as caught:
        build(project)
    assert "at least" in str(caught.value)


def test_a_machine_on_which_no_hand_over_pays_gets_no_placement(project: Path) -> None:
    (project / "small.toml").write_text(small_recipe(place={"machine": "pc-low"}).to_toml())
    build(project)
    with load(project / "small.pi") as model:
        assert model.manifest.plans == ()


def test_a_profile_of_another_model_is_refused(built: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Path(shutil.copytree(built, tmp_path_factory.mktemp("other"), dirs_exist_ok=True))
    hf.random_llama(other / "model", intermediate_size=192, num_hidden_layers=3)
    profile = pipeline(other).profile
    (own,) = (built / ".pi-build" / "small").glob("profile-*.npz")
    (foreign,) = (other / ".pi-build" / "small").glob("profile-*.npz")
    shutil.copy(foreign, own)
    with pytest.raises(ProfileError, match="stale"):
        build(built)
    with pytest.raises(ProfileError, match="of another model"):
        pack(open_checkpoint(built / "model"), PackSpec(), built / "b.pi", recipe={}, profile=profile)


def test_a_damaged_record_of_what_was_packed_only_packs_again(built: Path, report: dict[str, object]) -> None:
    (record,) = (built / ".pi-build" / "small").glob("packed-*.json")
    record.write_text('{"key": "a')
    assert build(built) == (["pack"], report)
