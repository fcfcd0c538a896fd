"""How many workers a build starts by itself, and what each of them is."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.pinned import say_cores

from pi_compile.pipeline import launching
from pi_compile.pipeline.launching import ALL_GPUS, Build, _room_here
from pi_compile.workers import LONE, Rank
from pi_compile.workers.local_processes import LocalProcesses

GIB = 1 << 30


def build(device: str = "cpu", **settings: Any) -> Build:
    return Build(recipe=Path("a.toml"), until="pack", device=device, heartbeat=10.0, **settings)


def pipeline(threads: int = 1, need: int = GIB, rank: Rank = LONE) -> Any:
    profile = SimpleNamespace(threads=threads)
    return SimpleNamespace(recipe=SimpleNamespace(profile=profile), memory_bytes=need, rank=rank)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 cores, 10 GiB free, 2 GPUs."""
    monkeypatch.setattr(launching, "usable_cores", lambda: 16)
    monkeypatch.setattr(launching, "available_memory", lambda: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("threads", "need", "workers"),
    [(1, GIB // 2, 16), (1, GIB, 8), (4, GIB, 4), (32, GIB, 1), (1, 20 * GIB, 1)],
    ids=["cores", "memory", "threads", "more-threads-than-cores", "little-memory"],
)
def test_as_many_as_cores_and_memory_have_room_for(threads: int, need: int, workers: int) -> None:
    assert _room_here(build(), pipeline(threads, need)) == workers


def test_one_where_a_launcher_starts_them_or_a_gpu_is_named() -> None:
    assert _room_here(build(), pipeline(rank=Rank(1, 4, 1, "slurm"))) == 1
    assert _room_here(build("cuda:1"), pipeline()) == 1


def test_a_worker_for_each_gpu() -> None:
    assert _room_here(build(ALL_GPUS), pipeline()) == 2
    devices = [build(ALL_GPUS).pipeline(Rank(n, 4, n % 2)).device for n in range(4)]
    assert devices == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert build("cuda:1").pipeline(LONE).device == "cuda:1"


def test_local_workers_of_a_launchers_processes_have_ranks_of_their_own() -> None:
    ranks = [LocalProcesses(print, Rank(n, 2, n, "torchrun"), 3).rank for n in range(2)]
    assert ranks == [Rank(0, 6, 0, "torchrun"), Rank(3, 6, 3, "torchrun")]


def test_workers_of_a_node_are_as_many_as_its_cores() -> None:
    nodes = {0: {0, 1, 2}, 1: set(range(3, 16))}
    assert _room_here(build(numa="0", nodes=nodes), pipeline()) == 3
    assert _room_here(build(numa="spread", nodes=nodes), pipeline(need=GIB // 2)) == 16


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="two cores on Linux")
def test_local_workers_take_the_nodes_in_turns(tmp_path: Path) -> None:
    """Also those that a worker starts that is pinned already."""
    first, second, *_ = cores = sorted(os.sched_getaffinity(0))
    pinned = build(numa="spread", nodes={0: {first}, 1: {second}})
    workers = LocalProcesses(partial(say_cores, pinned, tmp_path), LONE, 3)
    try:
        pinned.pin(workers.rank)
        assert os.sched_getaffinity(0) == {first}
        workers.start()
        until = time.monotonic() + 120
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        os.sched_setaffinity(0, cores)
        workers.end()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"1": str(second), "2": str(first)}
