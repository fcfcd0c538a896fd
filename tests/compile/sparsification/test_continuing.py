"""A finished run goes on, trackers are told, and a folder is uploaded."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import huggingface_hub
from accelerate import tracking
from accelerate.utils import LoggerType, ProjectConfiguration
from huggingface_hub.errors import LocalTokenNotFoundError
from support.sparsifying import small_recipe

from pi_compile.cli.main import app
from pi_compile.errors import TrainingError
from pi_compile.sparsification import trackers
from pi_compile.sparsification.run import resume
from pi_compile.sparsification.training import StepReport, Watch
from pi_runtime import console
from pi_runtime.errors import InputError

Fails = Callable[..., str]


def test_a_finished_run_goes_on(sparsified: Any, tmp_path: Path) -> None:
    """In the text where it ended, at the learning rate that it fell to, with the curves from the beginning."""
    sparsified(output="whole", run={"control": True})
    reports: list[StepReport] = []
    record = resume(tmp_path / "whole", 4, tmp_path / "longer", watch=Watch(step=reports.append))
    assert (record["steps"], record["tokens"], record["schedule"]) == (12, 12 * 8 * 32, 8)
    rates = [report.learning_rate for report in reports if report.step > 8]
    assert rates == [small_recipe().train.final_learning_rate] * 8
    rows = [row.split(",")[:2] for row in (tmp_path / "longer" / "curves.csv").read_text().splitlines()[1:]]
    assert rows == [[arm, step] for arm in ("model", "control") for step in ("4", "8", "12")]
    assert (tmp_path / "longer.checkpoint" / "model" / "step-00000012").is_dir()
    assert (tmp_path / "whole.checkpoint" / "model" / "step-00000008").is_dir()


@pytest.mark.long
def test_a_run_that_ended_early_goes_on_as_if_it_had_not(sparsified: Any, tmp_path: Path) -> None:
    sparsified(output="early", stop={"sparsity": 0.01})
    early, whole = resume(tmp_path / "early", 4, tmp_path / "more"), sparsified(output="whole")
    assert (early["steps"], early["resumed_after"], early["schedule"]) == (8, 4, 8)
    assert (early["text"], early["sparsity"]) == (whole["text"], whole["sparsity"])


def test_what_a_run_does_not_go_on_from(sparsified: Any, tmp_path: Path, fails: Fails) -> None:
    sparsified()
    kept = tmp_path / "out.checkpoint"
    facts = json.loads((kept / "run.json").read_text())
    (kept / "run.json").write_text(json.dumps(facts | {"model": "0" * 64}))
    with pytest.raises(TrainingError, match="is of another model or text"):
        resume(tmp_path / "out", 4, tmp_path / "more")
    (kept / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json: damaged"):
        resume(tmp_path / "out", 4, tmp_path / "more")
    shutil.rmtree(kept)
    go_on = ("sparsify", "--resume", tmp_path / "out", "-o", tmp_path / "more")
    assert "nothing to go on from" in fails(2, *go_on, "--steps", 4)
    assert "--resume and --steps belong together" in fails(2, *go_on)


def test_trackers_are_told(
    sparsified: Any, bases: Path, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for wandb, as accelerate calls it."""
    found: dict[str, list[Any]] = {"init": [], "config": [], "log": [], "finish": []}
    run = SimpleNamespace(
        log=lambda values, step: found["log"].append((step, values)), finish=lambda: found["finish"].append(True)
    )

    def init(**options: Any) -> Any:
        found["init"].append(options)
        return run

    config = SimpleNamespace(update=lambda values, **_: found["config"].append(values))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, config=config))
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.WANDB])
    sparsified(track=["wandb"], run={"control": True})
    assert found["init"] == [{"project": "out", "name": f"out-{arm}"} for arm in ("model", "control")]
    assert found["config"][0]["train.batch"] == 8
    assert [step for step, values in found["log"] if "tune text/perplexity" in values] == [4, 8, 4, 8]
    assert {"training/loss", "training/learning_rate"} <= found["log"][0][1].keys()
    assert len(found["finish"]) == 2
    recipe = next(bases.glob(f"{tmp_path.name}-*.toml"))
    asked = ("sparsify", recipe, "-o", tmp_path / "other", "--track")
    assert "trackio: is not installed" in fails(2, *asked, "trackio")
    assert "expected: aim or" in fails(2, *asked, "paper")


def test_files_of_trackers_are_in_the_folder_of_work(tmp_path: Path) -> None:
    project, started = ProjectConfiguration(logging_dir="."), []
    accelerator: Any = SimpleNamespace(
        project_configuration=project, log_with=[], init_trackers=lambda *a: started.append(a)
    )
    trackers.start(accelerator, "out", "model", tmp_path / "events", small_recipe())
    assert (project.logging_dir, len(started)) == (str(tmp_path / "events" / "model"), 1)


def test_a_folder_is_uploaded(
    bases: Path, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = bases / f"{tmp_path.name}.toml"
    recipe.write_text(small_recipe().to_toml())
    asked = ("sparsify", recipe, "-o", tmp_path / "out", "--push", "ann/sparse")
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.HfApi, "whoami", lambda _: (_ for _ in ()).throw(LocalTokenNotFoundError("none")))
        assert "hf auth login" in fails(3, *asked)
    assert not (tmp_path / "out").exists(), "asked before it trains"
    sent: list[Any] = []

    def create(_api: Any, name: str, **options: Any) -> Any:
        sent.append(options)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

    def upload(_api: Any, *, repo_id: str, folder_path: Path, **_options: Any) -> None:
        sent.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda _: {"name": "ann"})
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    assert console.run(app, [str(a) for a in asked]) == 0
    assert sent[0] == {"private": True, "exist_ok": True}
    assert sent[1][0] == "ann/sparse"
    assert {"README.md", "model.safetensors"} <= set(sent[1][1])
    assert "https://huggingface.co/ann/sparse: uploaded" in capsys.readouterr().err
