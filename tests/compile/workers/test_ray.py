"""Workers on a Ray cluster: two nodes on this machine, by Ray's own test cluster. `nox -s workers` runs it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster
from support.killing import kill_worker
from support.small_project import small_project

from pi_runtime.artifact.verification import verify

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
COMMAND = [sys.executable, "-m", "pi_compile", "build", "small.toml", "-o", "small.pi", "--json", "--heartbeat", "1"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def alone(project: Path) -> str:
    """sha256 of the artifact by one worker."""
    done = subprocess.run([*COMMAND, "--workers", "1"], cwd=project, capture_output=True, text=True, check=True)
    shutil.rmtree(project / ".pi-build")
    return str(json.loads(done.stdout)["sha256"])


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without processors, and a node with two."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # on a busy machine the usual 30 s are too few
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def start(project: Path, cluster: Cluster, *arguments: str) -> "subprocess.Popen[str]":
    env = {key: value for key, value in os.environ.items() if key != "PI_WORKERS"}
    command = [*COMMAND, "--ray", cluster.address, *arguments]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def check(project: Path, process: "subprocess.Popen[str]", alone: str) -> None:
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out)["sha256"] == alone
    verify(project / "small.pi")
    assert hashlib.sha256((project / "small.pi").read_bytes()).hexdigest() == alone
    shutil.rmtree(project / ".pi-build")
    (project / "small.pi").unlink()


@pytest.mark.timeout(900)
def test_two_nodes_make_the_same_bytes(project: Path, cluster: Cluster, alone: str) -> None:
    check(project, start(project, cluster), alone)


@pytest.mark.timeout(900)
def test_two_kills_change_nothing(project: Path, cluster: Cluster, alone: str) -> None:
    """A worker's process first, which Ray starts again, then one of the machines."""
    node = cluster.add_node(num_cpus=1)
    process = start(project, cluster, "--workers", "2", "--heartbeat", "0.2")
    workers = project / ".pi-build" / "small" / "workers"
    killed = 0
    while process.poll() is None and not killed:
        for path in workers.glob("*.json"):
            shown = json.loads(path.read_text())
            if shown["launcher"] == "ray" and shown["rank"] and shown["stage"]:
                killed += kill_worker(shown)
                break
        time.sleep(0.01)
    assert killed, process.communicate()
    cluster.remove_node(node)
    check(project, process, alone)


@pytest.mark.timeout(300)
def test_a_cluster_without_room_is_said(project: Path, cluster: Cluster) -> None:
    (project / "wide.toml").write_text((project / "small.toml").read_text().replace("threads = 1", "threads = 64"))
    for workers in ([], ["--workers", "2"]):
        command = [*COMMAND[:4], "wide.toml", "--ray", cluster.address, *workers]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 4
        assert "the Ray cluster has no room for a worker" in done.stderr


def test_no_cluster_is_said(project: Path) -> None:
    done = subprocess.run([*COMMAND, "--ray", "127.0.0.1:1"], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--ray 127.0.0.1:1: no cluster answers" in done.stderr
