"""`pi-compile` as its user meets it: the flags, what goes where, and the way from a checkpoint to text."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from support.documents import assert_as_documented, sometimes
from support.paths import GOLDEN

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.hf import edit_json, random_llama
from support.small_project import prose

from pi_compile.cli.main import app
from pi_compile.cli.rendering import artifact_text
from pi_compile.machine.profile import read_machine
from pi_compile.recipe import Recipe, default_recipe, read_recipe
from pi_runtime import console
from pi_runtime.artifact import inspection
from pi_runtime.artifact.verification import verify
from pi_runtime.commands.run import app as pi_run
from pi_runtime.kernels.codegen import jit

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that must succeed; returns its stdout."""

    def run(*arguments: object, app: typer.Typer = app) -> str:
        code = console.run(app, [str(a) for a in arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return run


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and text."""
    folder = tmp_path_factory.mktemp("project")
    random_llama(folder / "models" / "tiny", intermediate_size=128, num_hidden_layers=2)
    (folder / "text").mkdir()
    for n in range(2):
        (folder / "text" / f"{n}.txt").write_text(prose(n, 1500))
    return folder


@pytest.fixture(scope="module")
def built(project: Path) -> Path:
    """A recipe whose stages are made."""
    data = default_recipe("models/tiny", corpus=["text"]).model_dump()
    data["corpus"] |= {"fit_tokens": 1500, "tune_tokens": 128, "report_tokens": 128}
    data["profile"] |= {"window": 32, "cofiring_tokens": 64}
    data["train"] |= {"tokens": 256, "steps": 2}
    recipe = project / "small.toml"
    recipe.write_text(Recipe.model_validate(data).to_toml())
    assert console.run(app, ["build", str(recipe), "-o", str(project / "small.pi")]) == 0
    return recipe


# Flags and help.


@pytest.mark.slow
def test_help_is_whole_and_light() -> None:
    """Help of everything in one process: every flag is there, no text is cut, and nothing heavy is loaded."""
    commands: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    calls = [[], *([name] for name in commands)]
    code = f"""
import sys
from pi_compile.cli.main import app
from pi_runtime.commands.run import app as pi_run
from pi_runtime import console
for arguments in {calls}:
    assert console.run(app, [*arguments, "--help"]) == 0
    print("=====")
assert console.run(pi_run, ["--help"]) == 0
# Not pydantic, which some versions of typer load themselves.
heavy = {{"torch", "transformers", "numba", "numpy", "datasets", "tokenizers", "scipy", "zarr", "matplotlib"}}
print("=====", *(heavy & set(sys.modules)))
"""
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    overview, *texts, run_help, loaded = done.stdout.split("=====")
    assert loaded.split() == []
    assert "..." not in overview.partition("Build:")[2]
    assert all(f"\n{title}:\n" in overview for title in ("Build", "Look", "Tools", "Examples"))
    for (name, command), text in zip(commands.items(), texts, strict=True):
        assert f"\n  {name} " in overview
        assert all(flag in text for parameter in command.params for flag in parameter.opts if flag[0] == "-"), name
    assert "--prompt" in run_help


# From a checkpoint to text.


def test_the_way_from_a_checkpoint_to_text(run: Run, project: Path, tmp_path: Path) -> None:
    recipe, artifact = tmp_path / "tiny.toml", tmp_path / "tiny.pi"
    run("init", project / "models" / "tiny", "-o", recipe)
    assert read_recipe(recipe).model.path == os.path.relpath(project / "models" / "tiny", tmp_path)
    run("pack", "--plain", recipe, "-o", artifact)
    assert "2 layers" in run("inspect", artifact)
    assert run("verify", artifact).startswith(f"{artifact}: every byte is as it was written (")
    once = run(artifact, "--prompt", "Once upon", "-n", 6, app=pi_run)
    report = json.loads(run(artifact, "--prompt", "Once upon", "-n", 6, "--json", app=pi_run))
    assert report["text"] + "\n" == once
    assert_as_documented("pi-run", report)
    assert report["stats"]["generated_tokens"] <= 6


def test_paths_are_relative_to_the_recipe(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written from one folder, read from another, moved together with its model."""
    monkeypatch.chdir(project)
    (project / "recipes").mkdir(exist_ok=True)
    arguments = ["init", "models/tiny", "--corpus", "text", "-o", "recipes/tiny.toml"]
    assert console.run(app, arguments) == 0
    recipe = read_recipe(project / "recipes" / "tiny.toml")
    assert recipe.model.path == "../models/tiny"
    assert recipe.corpus.text == ["../text"]
    shutil.copytree(project / "models", tmp_path / "moved" / "models")
    shutil.copytree(project / "recipes", tmp_path / "moved" / "recipes")
    monkeypatch.chdir(tmp_path)
    assert console.run(app, ["pack", "--plain", "moved/recipes/tiny.toml"]) == 0
    verify(tmp_path / "tiny.pi")  # the recipe's name, in the working folder


def test_init_pins_a_hub_model(run: Run, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = shutil.copytree(project / "models" / "tiny", tmp_path / "snapshots" / commit)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    run("init", "owner/name", "-o", "r.toml")
    section = read_recipe(Path("r.toml")).model
    assert (section.path, section.revision) == ("owner/name", commit)
    run("pack", "--plain", "r.toml")
    verify("r.pi")


def test_ignored_keys_are_known_from_the_first_command_to_the_last(run: Run, tmp_path: Path) -> None:
    """SmolLM2's keys need no flag; others go from `init` to recipe, artifact, `inspect` and `eval`."""
    model, recipe, artifact = tmp_path / "model", tmp_path / "r.toml", tmp_path / "a.pi"
    random_llama(model)
    edit_json(model / "config.json", is_llama_config=True, **{"transformers.js_config": {"dtype": "q4"}})
    run("init", model, "-o", recipe)
    assert read_recipe(recipe).model.ignore_config == []
    run("pack", "--plain", recipe, "-o", artifact)
    assert "ignored_config" not in json.loads(run("inspect", artifact, "--json"))["provenance"]["checkpoint"]
    assert "ignored keys" not in run("inspect", artifact)

    edit_json(model / "config.json", moon_phase=0.5, tide=1)
    flags = ["--ignore-config", "tide", "--ignore-config", "moon_phase", "--ignore-config", "tide"]
    run("init", model, "-o", recipe, "--force", *flags)
    assert read_recipe(recipe).model.ignore_config == ["tide", "moon_phase"]
    run("pack", "--plain", recipe, "-o", artifact)
    report = json.loads(run("inspect", artifact, "--json"))
    assert report["recipe"]["model"]["ignore_config"] == ["tide", "moon_phase"]
    assert report["provenance"]["checkpoint"]["ignored_config"] == ["moon_phase", "tide"]
    assert re.search(r"^ignored keys +moon_phase, tide: declared to be without effect$", run("inspect", artifact), re.M)
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a neuron. " * 20)
    run("eval", artifact, "--text", text, "--tokens", 64, "--window", 32, "--model", model)
    assert "model" in run("plan", model, "--machine", "pc-low", "--curve", "reglu-70b", "--density", "0.2", *flags)
    run("plan", recipe, "--curve", "reglu-70b", "--density", "0.2")


def test_force_replaces_a_recipe(run: Run, project: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("old")
    run("init", project / "models" / "tiny", "-o", recipe, "--force")
    assert read_recipe(recipe)
    assert [p.name for p in tmp_path.iterdir()] == ["r.toml"]


def test_a_second_build_does_nothing(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = built.with_suffix(".pi").stat().st_mtime_ns
    assert console.run(app, ["build", str(built), "-o", str(built.with_suffix(".pi"))]) == 0
    assert "nothing to do: everything is up to date" in capsys.readouterr().err
    assert built.with_suffix(".pi").stat().st_mtime_ns == before


# What is printed.


def test_what_is_exported_places_as_the_model_does(run: Run, built: Path) -> None:
    from pi_compile.pipeline.recipe_placement import place_recipe

    recipe = read_recipe(built)
    own, again = built.with_name("own.toml"), built.with_name("again.toml")
    for path, activations in ((own, ""), (again, "a.npz")):
        section = recipe.place.model_copy(update={"machine": "stand-in", "activations": activations})
        path.write_text(recipe.model_copy(update={"place": section}).to_toml())
    run("train", own, "--export", built.with_name("a.npz"))
    plans = json.loads(run("place", own, "--json"))["plans"]
    assert len(plans) > 1
    assert [p.plan.digest for p in place_recipe(again).placements] == [plan["digest"] for plan in plans]


@pytest.mark.parametrize("command", ["profile", "train", "place", "pack", "build"])
def test_json_of_a_stage(run: Run, built: Path, tmp_path: Path, command: str) -> None:
    output = ["-o", tmp_path / "small.pi"] if command in ("pack", "build") else []
    report = json.loads(run(command, built, *output, "--json"))
    assert_as_documented(command, report)
    assert report["ran"] == (["pack"] if output else [])


def test_json_of_plain_packing(run: Run, built: Path, tmp_path: Path) -> None:
    report = json.loads(run("pack", "--plain", built, "-o", tmp_path / "a.pi", "--json"))
    assert_as_documented("pack", report)
    assert report["artifact"] == str(tmp_path / "a.pi")
    assert report["bytes"] == (tmp_path / "a.pi").stat().st_size


def test_quantising_is_reported(run: Run, built: Path, tmp_path: Path) -> None:
    recipe = built.parent / "quantised.toml"
    text = built.read_text().replace('ffn = "keep"', 'ffn = "q4"').replace('embedding = "keep"', 'embedding = "q8"')
    recipe.write_text(text.replace("perplexity_increase", "rounding_increase = 0.0\nperplexity_increase"))
    report = json.loads(run("pack", "--plain", recipe, "-o", tmp_path / "a.pi", "--json"))
    assert_as_documented("pack", report, {"quantisation"})
    assert [(row["part"], row["format"]) for row in report["quantisation"]] == [("embedding", "q8"), ("ffn", "q4")]
    header, *rows = run("pack", "--plain", recipe, "-o", tmp_path / "b.pi").splitlines()
    assert header.split() == ["part", "format", "relative", "rms", "error", "largest", "error"]
    assert [row.split()[:2] for row in rows] == [["embedding", "q8"], ["ffn", "q4"]]
    assert run("pack", "--plain", built, "-o", tmp_path / "c.pi") == ""


def test_json_of_init(run: Run, project: Path, tmp_path: Path) -> None:
    report = json.loads(run("init", project / "models" / "tiny", "-o", tmp_path / "r.toml", "--json"))
    assert_as_documented("init", report)
    assert report["recipe"] == str(tmp_path / "r.toml")
    assert Recipe.model_validate({k: v for k, v in report.items() if k != "recipe"}) == read_recipe(tmp_path / "r.toml")


def test_json_of_eval(run: Run, built: Path, tmp_path: Path) -> None:
    text, task = built.parent / "text" / "1.txt", tmp_path / "task.jsonl"
    task.write_text('{"ctx": "Once upon a", "choices": [" time", " neuron there was"], "label": 0}\n' * 3)
    artifact, scored = built.with_suffix(".pi"), ["--text", text, "--tokens", 64, "--window", 32]
    scored += ["--cache-format", "q8"]
    asked = ["--task", task, "--limit", 2]
    report = json.loads(run("eval", artifact, *scored, *asked, "--json"))
    assert_as_documented("eval", report, sometimes("eval"))
    assert report["tokens"] == 64
    assert len(report["layers"]) == 2
    (found,) = report["tasks"]
    assert found["items"] == 2
    assert found["modes"].keys() == set(report["perplexity"]) - {"checkpoint"}
    assert json.loads(run("eval", artifact, *asked, "--json")) == {"tasks": [found]}
    assert_as_documented("eval", json.loads(run("eval", artifact, *scored, "--json")), sometimes("eval") - {"tasks"})
    lines = run("eval", artifact, *asked).splitlines()
    assert lines[:3] == [f"task    {task}, multiple choice, 2 questions", "chance  0.5000", ""]
    assert lines[3].split() == ["mode", "acc", "acc", "norm", "agreement"]
    assert re.match(r"dense +(0 \(0 to 0\.6576\)|1\.0000 \(0\.3424 to 1\.0000\)) ", lines[4])


def test_json_of_machine(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi_compile.machine.measurement.read_bandwidth", lambda *_: 12.5e9)
    monkeypatch.setattr("pi_compile.machine.measurement.BYTES", 1 << 20)
    monkeypatch.setattr("pi_compile.machine.measurement.DISK_BYTES", 0)
    report = json.loads(run("machine", "-o", tmp_path / "m.toml", "--json"))
    assert_as_documented("machine", report)
    assert report["cpu"]["bandwidth_gb_per_s"] == 12.5
    assert json.loads(json.dumps(read_machine(tmp_path / "m.toml").model_dump())) == report


def test_json_of_inspect(run: Run) -> None:
    report = json.loads(run("inspect", GOLDEN, "--json"))
    assert_as_documented("inspect", report)
    assert sum(report["bytes_by_part"].values()) == report["bytes"] == GOLDEN.stat().st_size
    assert report["decoder"]["d_ff"] == 40
    usual = {"threshold": 0.0}
    assert report["layers"] == [{"rung": "predicted", "rank": 3, **usual}, {"rung": "gate", "rank": None, **usual}]
    assert [plan["gpu_neuron_share"] for plan in report["plans"]] == [0.1, 1.0]


def test_json_of_verify(run: Run) -> None:
    report = json.loads(run("verify", GOLDEN, "--json"))
    assert_as_documented("verify", report)
    assert report["digest"].encode() == GOLDEN.read_bytes()[-64:]


def test_json_of_doctor(run: Run) -> None:
    report = json.loads(run("doctor", "--json"))
    assert_as_documented("doctor", report)
    assert all(finding.keys() == {"found", "remedy"} for finding in report.values())
    assert f"torch {torch.__version__}" in report["extra compile"]["found"]
    assert str(jit.cache_folder()) in report["kernels"]["found"]


def test_inspect_is_pleasant_to_read(run: Run, built: Path) -> None:
    known, stored, *_plans = run("inspect", built.with_suffix(".pi")).split("\n\n")
    lines = known.splitlines()
    assert {"artifact", "model", "layers", "profile", "plans"} <= {line.split()[0] for line in lines}
    assert all(line[14] == " " and line[15] != " " for line in lines), "values stand below each other"
    assert any("neurons ordered by their counts over 1,5" in line or "over 1,4" in line for line in lines)
    assert max(map(len, lines[1:])) <= 100  # the first has the path
    assert stored.splitlines()[0].split() == ["stored", "format", "bytes", "share"]


@pytest.mark.parametrize(
    ("number", "text"), [(950, "950"), (60_300, "60.3 k"), (1_100_000, "1.1 M"), (6_738_415_616, "6.7 B")]
)
def test_parameters_are_rounded(number: int, text: str) -> None:
    report = {**inspection.inspect(GOLDEN), "parameters": number}
    assert f"llama, {text} parameters" in artifact_text(report)


def test_names_in_an_artifact_do_not_steer_the_terminal() -> None:
    report = inspection.inspect(GOLDEN)
    hostile = {**report, "decoder": {**report["decoder"], "family": "\x1b[2Jllama"}}
    hostile["provenance"] = {
        "pi_toolchain": ["\x1b"],
        "checkpoint": {"files": {"\x9b1m": 3}, "ignored_config": ["\x1b[2J", 4]},
    }
    text = artifact_text(hostile)
    assert all(line.isprintable() for line in text.split("\n"))
    assert "�[2Jllama" in text


@pytest.mark.slow
def test_a_reader_that_has_had_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "pi_compile", "inspect", str(GOLDEN)],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")
