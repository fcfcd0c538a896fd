"""A training that is killed anywhere ends in the same bits, and two processes train on the same text as one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from support.paths import ROOT
from support.sparsifying import small_recipe

from pi_compile.errors import TrainingError
from pi_compile.sparsification.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def trained(bases: Path, tmp_path_factory: pytest.TempPathFactory, long: bool) -> dict[int, tuple[Path, list[Any]]]:
    """Trainings in so many processes: their folder, and the digests of weights and text, and processes, of each.

    The first, `whole`, was not killed.
    """
    folder, recipe = tmp_path_factory.mktemp("trained"), bases / "killed.toml"
    recipe.write_text(small_recipe(steer={"sparsity": 0.8}, run={"every": 2, "control": True}).to_toml())
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "support.training_process", str(recipe), "0"]
    for processes, killed in ((1, 20 if long else 1), (2, 5 if long else 0)):
        (folder / str(processes)).mkdir()
        command += [str(folder / str(processes)), str(processes), str(killed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[int, tuple[Path, list[Any]]] = {n: (folder / str(n), []) for n in (1, 2)}
    for line in done.stdout.splitlines():
        name, *row = line.split()
        found[int(Path(name).name)][1].append(row)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one step, which no test changes."""
    folder = tmp_path_factory.mktemp("saved")
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    Checkpoints(folder, accelerator).save(1, {"n": 1})
    accelerator.free_memory()
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), cut, Path.unlink], ids=["empty", "cut", "gone"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "state.json"])
def test_a_damaged_checkpoint_is_named_with_its_remedy(
    saved: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    shutil.copytree(saved, tmp_path / "checkpoints")
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    checkpoints = Checkpoints(tmp_path / "checkpoints", accelerator)
    assert checkpoints.load(1) == {"n": 1}
    damage(checkpoints.path(1) / name)
    with pytest.raises(TrainingError, match=r"not a whole checkpoint\n  found: .+\n  try: remove it"):
        checkpoints.load(1)
    accelerator.free_memory()


def test_a_flipped_bit_among_the_generators_is_seen(saved: Path, tmp_path: Path) -> None:
    """Where accelerate would go on with others."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints", Accelerator(cpu=True))
    flip(checkpoints.path(1) / "random_states_0.pkl")
    with pytest.raises(TrainingError, match="not a whole checkpoint"):
        checkpoints.load(1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_training_ends_in_the_same_bits(trained: dict[int, tuple[Path, list[Any]]], long: bool) -> None:
    whole, *killed = trained[1][1]
    assert len(killed) == (20 if long else 1)
    assert all(row == whole for row in killed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_on_the_same_text_as_one(trained: dict[int, tuple[Path, list[Any]]], long: bool) -> None:
    """In the long form they are killed too."""
    (alone, ((_, text, _), *_)), (together, (whole, *killed)) = trained[1], trained[2]
    assert len(killed) == (5 if long else 0)
    assert all(row == whole for row in killed)
    assert whole[1:] == [text, "2"]
    one, two = (load_file(folder / "whole" / "model.safetensors") for folder in (alone, together))
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-4), name
