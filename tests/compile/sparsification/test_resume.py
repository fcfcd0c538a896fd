"""A training that is killed anywhere ends in the same bits, and two processes train on the same text as one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from safetensors.torch import load_file
from support.paths import ROOT
from support.sparsifying import small_recipe


@pytest.mark.slow
def test_killed_trainings_and_pairs(bases: Path, tmp_path: Path, long: bool) -> None:
    recipe = bases / f"{tmp_path.name}.toml"
    recipe.write_text(small_recipe(steer={"sparsity": 0.8}, run={"every": 2, "control": True}).to_toml())
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "support.training_process", recipe, tmp_path, "0", "20" if long else "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    (whole,) = (row for row in rows if row[0] == "whole")
    for row in rows:
        # The same text for all, and the same weights for the same number of processes.
        assert row[2] == whole[2]
        if row[0] == "killed":
            assert row[1] == whole[1]
    (pair,), (killed,) = ([row for row in rows if row[0] == name] for name in ("pair", "killed-pair"))
    assert pair[3] == killed[3] == "2"
    assert pair[1] == killed[1]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "pair"))
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-4), name
