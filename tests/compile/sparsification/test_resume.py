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


def trained(bases: Path, folder: Path, processes: int, killed: int) -> list[list[str]]:
    """Digests of weights and text, and processes, of several trainings; the first, `whole`, was not killed."""
    folder.mkdir()
    recipe = bases / f"{folder.parent.name}-{processes}.toml"
    recipe.write_text(small_recipe(steer={"sparsity": 0.8}, run={"every": 2, "control": True}).to_toml())
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "support.training_process", recipe, folder, *map(str, (processes, 0, killed))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[1:] for line in done.stdout.splitlines()]
    assert len(rows) == 1 + killed
    return rows


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_training_ends_in_the_same_bits(bases: Path, tmp_path: Path, long: bool) -> None:
    whole, *killed = trained(bases, tmp_path / "one", 1, 20 if long else 3)
    assert all(row == whole for row in killed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_on_the_same_text_as_one(bases: Path, tmp_path: Path, long: bool) -> None:
    ((_, text, _),) = trained(bases, tmp_path / "1", 1, 0)
    whole, *killed = trained(bases, tmp_path / "2", 2, 5 if long else 1)
    assert all(row == whole for row in killed)
    assert whole[1:] == [text, "2"]
    one, two = (load_file(tmp_path / processes / "whole" / "model.safetensors") for processes in "12")
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-4), name
