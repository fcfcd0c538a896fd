"""The command as its user meets it: from `init --sparsify` to tokens, and what it refuses."""

import json
import re
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

from support.documents import assert_as_documented
from support.paths import ROOT
from support.sparsifying import small_recipe

from pi_compile.cli.main import app
from pi_compile.recipe import Recipe, default_recipe
from pi_compile.sparsification import estimate
from pi_compile.sparsification import run as run_room
from pi_compile.sparsification.checkpoints import Checkpoints
from pi_compile.sparsification.recipe import read_sparsify_recipe
from pi_compile.sparsification.training import Watch
from pi_compile.workers import tasks
from pi_runtime import console
from pi_runtime.commands.run import app as pi_run
from pi_runtime.errors import DoesNotFitError, UsageError

Fails = Callable[..., str]


def run(*arguments: object) -> None:
    assert console.run(app, [str(a) for a in arguments]) == 0


def test_the_way_from_a_dense_model_to_tokens(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("init", bases / "model", "--sparsify", "--corpus", bases / "text.txt", "-o", tmp_path / "SPARSIFY.toml")
    assert "next: pi-compile sparsify" in capsys.readouterr().err
    written = read_sparsify_recipe(tmp_path / "SPARSIFY.toml")
    assert (written.target.activation, written.steer.sparsity, written.train.distillation) == ("fatrelu", 0.85, 1.0)
    small = small_recipe(written.model.path, tuple(written.corpus.text), run={"control": True})
    (tmp_path / "SPARSIFY.toml").write_text(small.to_toml())
    run("sparsify", tmp_path / "SPARSIFY.toml", "-o", tmp_path / "sparse", "--json")
    record = json.loads(capsys.readouterr().out)
    assert_as_documented("sparsify", record)
    stored = json.loads((tmp_path / "sparse" / "sparsify.json").read_text())
    assert {"folder": str(tmp_path / "sparse"), **stored} == record
    assert not (tmp_path / "sparse.work").exists()
    card = (tmp_path / "sparse" / "README.md").read_text()
    assert "license: unknown" in card
    assert f"| sparsity, mean over layers | {record['sparsity']:.1%} |" in card
    assert len({path.stat().st_mode for path in (tmp_path / "sparse").iterdir() if path.is_file()}) == 1
    assert (tmp_path / "sparse.checkpoint" / "control" / "step-00000008").is_dir()
    assert (tmp_path / "sparse" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    head, first, *_ = (tmp_path / "sparse" / "curves.csv").read_text().splitlines()
    assert (head.count(","), first.split(",")[:2]) == (first.count(","), ["model", "4"])
    html = (tmp_path / "sparse" / "training.html").read_text()
    assert html.count("<svg") == 4
    assert "http" not in re.sub(r'"Content-Security-Policy"|http-equiv', "", html)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_comes_out_is_built_and_run(
    bases: Path, tmp_path: Path, sparsified: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sparsified(output="sparse", target={"activation": "drelu"})
    recipe = default_recipe("sparse", corpus=[str(bases / "text.txt")]).model_dump()
    recipe["corpus"] |= {"fit_tokens": 500, "tune_tokens": 64, "report_tokens": 64}
    recipe["profile"] |= {"window": 16, "cofiring_tokens": 32}
    recipe["train"] |= {"tokens": 128, "steps": 1}
    (tmp_path / "build.toml").write_text(Recipe.model_validate(recipe).to_toml())
    run("build", tmp_path / "build.toml", "-o", tmp_path / "sparse.pi")
    capsys.readouterr()
    assert console.run(pi_run, [str(tmp_path / "sparse.pi"), "--prompt", "Once", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out


def test_what_is_printed_for_people(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = bases / f"{tmp_path.name}.toml"
    recipe.write_text(small_recipe("qwen3", target={"activation": "drelu"}).to_toml())
    (bases / "qwen3" / "README.md").write_text("---\nlicense: mit\n---\n")
    run("sparsify", recipe, "-o", tmp_path / "out")
    captured = capsys.readouterr()
    assert "2,048 tokens: about" in captured.err
    assert re.search(r"step 8: loss .*, perplexity on the tune text .*% zero \(by layer, %: \d+ \d+\)", captured.err)
    assert 'config.json has hidden_act = "drelu", which only this project reads' in captured.out
    assert "license: mit" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"model": "nowhere"}, 3, "nowhere: no such folder"),
        (
            {"train": {"warmup_steps": 8}},
            3,
            r"train.warmup_steps\n  expected: less than the 8 steps.*\n.*\n  try: lower",
        ),
        ({"target": {"activation": "fatrelu"}}, 3, r"activation = fatrelu\n.*\n  found: .*\n  try: set one of them"),
        ({"train": {"window": 4096}}, 3, r"window = 4096\n  expected: at most 40"),
        ({"corpus": {"text": ["no.txt"]}}, 3, "no.txt: no text found"),
    ],
)
def test_mistakes_are_named(
    bases: Path, tmp_path: Path, fails: Fails, change: dict[str, Any], code: int, said: str
) -> None:
    recipe = bases / f"{tmp_path.name}.toml"
    recipe.write_text(small_recipe(**change).to_toml())
    assert re.search(said, fails(code, "sparsify", recipe, "-o", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_batch_that_cannot_be_shared_evenly() -> None:
    with pytest.raises(UsageError, match=r"batch = 8 cannot be shared by 3 processes\n  expected: a multiple of .* 12"):
        run_room._check_shares(small_recipe(), 3)
    run_room._check_shares(small_recipe(), 2)


def test_wrong_keys_are_all_named(bases: Path, tmp_path: Path, fails: Fails) -> None:
    text = small_recipe().to_toml().replace("penalty = 0.1", "penalty = -1.0").replace("clip =", "clipp =")
    text = text.replace("weights = [1.0]", "weights = []").replace("micro_batch = 4", "micro_batch = 3")
    recipe = bases / f"{tmp_path.name}.toml"
    recipe.write_text(text)
    message = fails(3, "sparsify", recipe, "-o", tmp_path / "out")
    for words in ("stages.1.penalty", "train.clipp: unknown key; did you mean clip?", "corpus.weights", "divide batch"):
        assert words in message


def test_models_that_cannot_be_made_sparse(bases: Path, tmp_path: Path, fails: Fails, demo: Path) -> None:
    from support.families import random_checkpoint

    random_checkpoint(tmp_path / "opt", "opt")
    message = fails(3, "init", tmp_path / "opt", "--sparsify", "-o", tmp_path / "s.toml")
    assert "a opt model cannot be made sparse" in message
    adapted = Path(shutil.copytree(bases / "model", tmp_path / "adapted"))
    (adapted / "adapter_config.json").write_text("{}")
    assert "has an adapter (PEFT)" in fails(3, "init", adapted, "--sparsify", "-o", tmp_path / "s.toml")


def test_another_activation_and_a_model_that_is_sparse(
    bases: Path, tmp_path: Path, fails: Fails, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = Path(shutil.copytree(bases / "model", tmp_path / "sparse"))
    config = json.loads((sparse / "config.json").read_text())
    (sparse / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    run("init", sparse, "--sparsify", "--activation", "drelu", "-o", tmp_path / "s.toml")
    assert "is sparse already (relu)" in capsys.readouterr().err
    written = read_sparsify_recipe(tmp_path / "s.toml")
    assert (written.target.activation, len(written.stages), written.steer.sparsity) == ("drelu", 4, 0.0)
    assert "fatrelu" in fails(2, "init", sparse, "--sparsify", "--activation", "silu", "-o", tmp_path / "t.toml")


def test_a_model_in_place_of_a_recipe(bases: Path, tmp_path: Path, fails: Fails) -> None:
    model = bases / "model"
    message = fails(3, "sparsify", model, "-o", tmp_path / "out")
    assert f"{model}: a folder, not a recipe\n  try: pi-compile init {model} --sparsify -o RECIPE.toml" in message


def test_outputs_that_are_refused(bases: Path, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = bases / f"{tmp_path.name}.toml"
    recipe.write_text(small_recipe().to_toml())
    assert "exists already" in fails(2, "sparsify", recipe, "-o", tmp_path)
    assert "no folder" in fails(2, "sparsify", recipe, "-o", tmp_path / "a" / "b")
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "the disk is too small" in fails(4, "sparsify", recipe, "-o", tmp_path / "out")


def test_what_a_killed_run_has_written_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: SimpleNamespace(free=600))
    needs, work = estimate.Needs(1.0, 1000, 1, 1), tmp_path / "out.work"
    with pytest.raises(DoesNotFitError, match="found: 600 B free\n"):
        estimate.check_room(needs, tmp_path / "out", work)
    (work / "model" / "step-00000004").mkdir(parents=True)
    (work / "model" / "step-00000004" / "model.safetensors").write_bytes(bytes(399))
    with pytest.raises(DoesNotFitError, match=r"found: 600 B free, and 399 B of this run in .*out\.work"):
        estimate.check_room(needs, tmp_path / "out", work)
    (work / "run.json").write_text("{")
    estimate.check_room(needs, tmp_path / "out", work)


def test_a_killed_run_is_not_refused_for_its_own_checkpoints(
    sparsified: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that has just the room of a whole run."""
    found: list[estimate.Needs] = []
    disk = SimpleNamespace(total=0, work=tmp_path / "out.work")
    count, save = estimate.estimate, Checkpoints.save

    def counted(*arguments: Any) -> estimate.Needs:
        found.append(count(*arguments))
        disk.total = found[0].disk_bytes
        return found[-1]

    def free(_folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=disk.total - sum(p.stat().st_size for p in disk.work.rglob("*") if p.is_file()))

    def killed(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_room, "estimate", counted)
    monkeypatch.setattr(estimate.shutil, "disk_usage", free)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            sparsified()
    assert free(tmp_path).free < found[0].disk_bytes - 1000
    assert sparsified()["steps"] == 8


def test_all_gpus_need_a_launcher(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = bases / f"{tmp_path.name}.toml"
    recipe.write_text(small_recipe().to_toml())
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(UsageError, match="accelerate launch -m pi_compile sparsify"):
        run_room.sparsify(recipe, tmp_path / "out", "cuda:all")


def test_a_second_start_waits_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LONGEST", 2 * tasks.SHORTEST)
    told: list[str] = []
    waiting, accelerator = threading.Event(), SimpleNamespace(is_main_process=True)

    def notice(line: str) -> None:
        told.append(line)
        waiting.set()

    def started(watch: Watch) -> run_room._Sparsification:
        return run_room._Sparsification(small_recipe(), tmp_path, tmp_path / "out", accelerator, watch)  # type: ignore[arg-type]

    def second() -> str:
        with pytest.raises(UsageError) as found, started(Watch(notice=notice)).held():
            pass
        return str(found.value)

    with ThreadPoolExecutor() as threads, started(Watch()).held():
        late = threads.submit(second)
        assert waiting.wait(60)
        (tmp_path / "out").mkdir()
        said = late.result(60)
    assert told == [f"{tmp_path / 'out.work'}: another process is at work; waiting for it"]
    assert f"output='{tmp_path / 'out'}': exists already" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_others_put_in_the_outputs_place_costs_no_training(
    sparsified: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = run_room._Sparsification._arm

    def beside(self: Any, *arguments: Any) -> Any:
        found = arm(self, *arguments)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").touch()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(run_room._Sparsification, "_arm", beside)
        with pytest.raises(UsageError, match="exists already"):
            sparsified(run={"control": False})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(run_room._Sparsification, "_train_model", lambda *_: pytest.fail("trains again"))
    assert sparsified(run={"control": False})["steps"] == 8
    assert not (tmp_path / "out.work").exists()


def test_a_folder_of_something_else_is_not_worked_in(sparsified: Any, tmp_path: Path) -> None:
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "notes.txt").touch()
    with pytest.raises(UsageError, match="is not of a training"):
        sparsified()
    assert [path.name for path in (tmp_path / "out.work").iterdir()] == ["notes.txt"]


def test_a_link_that_leads_nowhere_is_in_the_outputs_place(sparsified: Any, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists already"):
        sparsified()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_of_the_docs_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less text than it reads, and always the same: which passages are held out depends on their bytes."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "lines.txt").write_text("\n".join(f"Line {n} of this text says what {n * n} is." for n in range(9000)))
    found = spec_from_file_location("sparsify_example", ROOT / "docs" / "examples" / "sparsify.py")
    assert found is not None
    assert found.loader is not None
    example = module_from_spec(found)
    sys.modules[found.name] = example
    found.loader.exec_module(example)
    read = example.recipe

    def shorter(steps: int) -> Any:
        plan = read(steps)
        short = {"text": [str(text)], "tune_tokens": 512, "report_tokens": 512}
        corpus = plan.corpus.model_copy(update=short)
        train = plan.train.model_copy(update={"batch": 8, "micro_batch": 8})
        return plan.model_copy(update={"corpus": corpus, "train": train})

    monkeypatch.setattr(example, "recipe", shorter)
    example.main(tmp_path, 2, 5)
    assert "never fired" in capsys.readouterr().out
