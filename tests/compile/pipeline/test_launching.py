"""How many workers a build starts by itself, and what each of them is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pi_compile.pipeline import launching
from pi_compile.pipeline.launching import ALL_GPUS, Build, _room_here
from pi_compile.workers import LONE, Rank
from pi_compile.workers.local_processes import LocalProcesses

GIB = 1 << 30


def build(device: str = "cpu") -> Build:
    return Build(recipe=Path("a.toml"), until="pack", device=device, heartbeat=10.0)


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
