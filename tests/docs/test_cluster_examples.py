"""The files for clusters in docs/examples parse, and what they start has the flags that they name."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from support.documents import DOCS
from support.serving import wait_until

from pi_compile.cli.main import app

EXAMPLES = DOCS / "examples"
Stub = Callable[[str, str], Path]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Puts a command on the path that writes its arguments, one a line, and then does what it is told."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def made(name: str, then: str = ":") -> Path:
        log, command = tmp_path / f"{name}.log", tmp_path / name
        command.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {log}.part\nmv {log}.part {log}\n{then}\n')
        command.chmod(0o755)
        return log

    return made


def check_build(arguments: list[str]) -> None:
    """Parse the arguments of `pi-compile build` as it does."""
    name, *rest = arguments
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    assert group.commands[name].make_context(name, rest).params["recipe"] == Path("model.toml")


def test_slurm_s_job_starts_a_worker_and_hands_on_its_exit_code(stub: Stub) -> None:
    log = stub("pi-compile", "exit 3")
    done = subprocess.run(["bash", EXAMPLES / "slurm.sh", "model.toml", "model.pi"], check=False)
    assert done.returncode == 3
    check_build(log.read_text().splitlines())


def test_slurm_s_job_asks_to_be_started_again_before_its_time_is_over(stub: Stub) -> None:
    asked = stub("scontrol")
    log = stub("pi-compile", f"until [ -e {asked} ]; do sleep 0.05; done; exit 4")
    environment = os.environ | {"SLURM_JOB_ID": "71"}
    with subprocess.Popen(["bash", EXAMPLES / "slurm.sh", "model.toml", "model.pi"], env=environment) as job:
        wait_until(log.exists)
        job.send_signal(signal.SIGUSR1)
        wait_until(asked.exists)
        assert asked.read_text().splitlines() == ["requeue", "71"]
        assert job.wait(60) == 4


def test_slurm_s_directives_come_before_the_first_command() -> None:
    lines = (EXAMPLES / "slurm.sh").read_text("utf-8").splitlines()
    head = [line for n, line in enumerate(lines) if all(not before or before[0] == "#" for before in lines[:n])]
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert directives
    assert set(directives) <= set(head)
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in directives)


def test_torchrun_starts_a_worker_a_gpu(stub: Stub) -> None:
    run = pytest.importorskip("torch.distributed.run")
    log = stub("torchrun", "")
    subprocess.run(["bash", EXAMPLES / "torchrun.sh", "head.example", "2", "model.toml", "model.pi"], check=True)
    read = run.get_args_parser().parse_args(log.read_text().splitlines())
    assert (read.nnodes, read.nproc_per_node, read.module, read.training_script) == ("2", "8", True, "pi_compile")
    assert read.rdzv_endpoint == "head.example:29500"
    check_build(read.training_script_args)


def test_ray_s_cluster_has_the_machines_it_names() -> None:
    yaml = pytest.importorskip("yaml")
    text = (EXAMPLES / "ray.yaml").read_text("utf-8")
    found = yaml.safe_load(text)
    workers = found["provider"]["worker_ips"]
    assert found["min_workers"] == found["max_workers"] == len(workers)
    port = re.search(r"--port=(\d+)", found["head_start_ray_commands"][-1])
    assert port
    assert found["worker_start_ray_commands"][-1].endswith(f"$RAY_HEAD_IP:{port[1]}")
    (command,) = re.findall(r"ray exec ray\.yaml '.*&& pi-compile (.*)'", text)
    check_build(shlex.split(command))
