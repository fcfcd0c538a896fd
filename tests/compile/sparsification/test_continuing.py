"""A finished run goes on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

from support.sparsifying import small_recipe

from pi_compile.errors import TrainingError
from pi_compile.sparsification.run import resume
from pi_compile.sparsification.training import StepReport, Watch
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
