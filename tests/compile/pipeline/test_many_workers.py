"""The same bytes whoever builds: any number of workers, any launcher, killed or not."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.killing import kill_worker
from support.paths import SUPPORT
from support.small_project import small_project, small_recipe

from pi_runtime.artifact.verification import verify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="forks and signals"),
]

COMMAND = ["-m", "pi_compile", "build", "small.toml", "-o", "small.pi", "--json"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
WORKERS = (1, 3)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two recipes of one model; in many shards, with predictors to train."""
    folder = small_project(tmp_path_factory.mktemp("project"))
    for name, seed in (("small", 0), ("other", 1)):
        changes: dict[str, Any] = {"profile": {"batch": 4, "layers_at_once": 1 - seed}}
        recipe = small_recipe(**changes, train={"seed": seed, "tokens": 1024}, quality={"perplexity_increase": 0.5})
        (folder / f"{name}.toml").write_text(recipe.to_toml())
    return folder


@pytest.fixture(scope="module")
def told(project: Path, long: bool) -> list[dict[str, Any]]:
    """What builds came to, each as recipes, workers, kills: those of `WORKERS` first."""
    runs = [[["small"], n, 0] for n in WORKERS]
    runs += [[["small"], 3, 20 if long else 2], [["other"], 1, 0], [["small", "other"], 2 if long else 1, 0]]
    runs += [[["small", "small"], 1, 0]]
    command = [sys.executable, "-m", "support.many_workers", project, json.dumps(runs), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SUPPORT.parent, env=ENV)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def alone(told: list[dict[str, Any]]) -> dict[str, str]:
    """The results of one worker."""
    return dict(told[0]["results"]["small"])


def test_any_number_of_workers_makes_the_same_bytes(told: list[dict[str, Any]], alone: dict[str, str]) -> None:
    assert set(alone) == {"corpus", "profile", "train", "placements", "artifact"}
    assert len(alone["placements"].split()) > 1
    for workers, run in zip(WORKERS, told, strict=False):
        assert run["results"]["small"] == alone, workers
        assert run["lost"] == run["twice"] == 0


def test_kills_lose_a_task_each_and_change_nothing(told: list[dict[str, Any]], alone: dict[str, str]) -> None:
    killed = told[len(WORKERS)]
    print(f"{killed['kills']} kills: {killed['lost']} tasks lost, {killed['twice']} done twice")
    assert killed["results"]["small"] == alone
    assert killed["lost"] <= killed["kills"]
    assert killed["twice"] == 0


def test_builds_of_two_recipes_in_one_folder_do_not_meet(told: list[dict[str, Any]], alone: dict[str, str]) -> None:
    other, both = (run["results"] for run in told[-3:-1])
    assert both == {"small": alone, "other": other["other"]}
    assert other["other"]["artifact"] != alone["artifact"]


def test_two_builds_at_once_do_not_disturb_each_other(told: list[dict[str, Any]], alone: dict[str, str]) -> None:
    """A task that one of them has finished is not the other's to do."""
    assert told[-1]["results"] == {"small": alone}
    assert told[-1]["lost"] == told[-1]["twice"] == 0


def test_nothing_is_left_over(told: list[dict[str, Any]]) -> None:
    assert [run["leftover"] for run in told] == [[]] * len(told)


# Each launcher, as users start it: others than the build's own take minutes, in the session `workers`. What they say
# of a process is read in `test_tasks.py`.


@pytest.fixture
def copied(project: Path, tmp_path: Path) -> Path:
    """The project, without results."""
    return Path(shutil.copytree(project, tmp_path / "copy", ignore=shutil.ignore_patterns(".pi-build", "*.pi")))


def check(folder: Path, alone: dict[str, str]) -> None:
    verify(folder / "small.pi")
    assert hashlib.sha256((folder / "small.pi").read_bytes()).hexdigest() == alone["artifact"]
    for stage in ("profile", "train"):
        (path,) = (folder / ".pi-build" / "small").glob(f"{stage}-*.npz")
        assert hashlib.sha256(path.read_bytes()).hexdigest() == alone[stage]


def test_local_processes(copied: Path, alone: dict[str, str]) -> None:
    command = [sys.executable, *COMMAND, "--workers", "2"]
    done = subprocess.run(command, cwd=copied, capture_output=True, text=True, check=True, env=ENV)
    assert json.loads(done.stdout)["sha256"] == alone["artifact"]
    assert not list((copied / ".pi-build" / "small" / "workers").glob("*.json"))
    check(copied, alone)


@pytest.mark.long
def test_torchrun(copied: Path, alone: dict[str, str]) -> None:
    """Two processes, of which one prints the result; both are killed, and all are started again."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "2", *COMMAND]
    process = subprocess.Popen(command, cwd=copied, stdout=subprocess.PIPE, text=True, env=ENV)
    for rank, made in ((0, "layers-0-shard-1.npz"), (1, "pushed-0-fit-0.npz")):
        kill(copied, process, rank, made)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert json.loads(out)["sha256"] == alone["artifact"]
    check(copied, alone)


def kill(folder: Path, launcher: "subprocess.Popen[str]", rank: int, made: str) -> None:
    """Kill the worker of a rank when a task is done, unless the build is quicker."""
    while launcher.poll() is None and not list((folder / ".pi-build").rglob(made)):
        time.sleep(0.005)
    for path in (folder / ".pi-build" / "small" / "workers").glob("*.json"):
        with suppress(OSError, ValueError):
            shown = json.loads(path.read_text())
            if shown["rank"] == rank:
                kill_worker(shown)


@pytest.mark.long
@pytest.mark.parametrize("kills", [1, 2])
def test_a_slurm_array(copied: Path, alone: dict[str, str], kills: int) -> None:
    """Jobs that begin when those before have been killed."""
    made = ["layers-0-shard-1.npz", "pushed-0-fit-0.npz"][:kills]
    array = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": str(kills + 1)}
    for number in range(1, kills + 2):
        env = ENV | array | {"SLURM_ARRAY_TASK_ID": str(number)}
        process = subprocess.Popen([sys.executable, *COMMAND], cwd=copied, stdout=subprocess.PIPE, text=True, env=env)
        if number <= kills:
            kill(copied, process, number - 1, made[number - 1])
        out, _ = process.communicate()
    assert process.returncode == 0
    assert out == ""  # the first job would have said it
    check(copied, alone)
