"""NUMA nodes: which cores they have, and who is pinned to them. The nodes are made up, from cores of this machine."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pi_runtime.errors import UsageError
from pi_runtime.execution import numa

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of nodes")
CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def write_nodes(folder: Path, *lists: str) -> None:
    for node, cores in enumerate(lists):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{cores}\n")


def in_a_thread(run: Callable[[], None]) -> tuple[set[int], set[int]]:
    """The cores of a thread that has run something, and of one that it has started since."""
    found: list[set[int]] = []

    def look() -> None:
        found.append(os.sched_getaffinity(0))

    def first() -> None:
        run()
        look()
        second = threading.Thread(target=look)
        second.start()
        second.join()

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    return found[0], found[1]


@pytest.mark.parametrize(
    ("text", "cores"), [("", set()), ("3", {3}), ("0-2", {0, 1, 2}), ("0-1,8,10-11", {0, 1, 8, 10, 11})]
)
def test_the_cores_of_a_node(tmp_path: Path, text: str, cores: set[int]) -> None:
    write_nodes(tmp_path, text)
    assert numa._cores(tmp_path / "node0") == cores


def test_a_node_has_the_cores_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "NODES", tmp_path)
    write_nodes(tmp_path, f"{CORES[0]},4095", "4096-4097", "")
    assert numa.usable_nodes() == {0: {CORES[0]}}


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
@pytest.mark.parametrize(
    ("name", "number", "core"), [("0", 0, 0), ("1", 0, 1), ("1", 5, 1), ("spread", 0, 0), ("spread", 5, 1)]
)
def test_a_thread_and_those_that_it_starts_stay_on_a_node(name: str, number: int, core: int) -> None:
    nodes = {0: {CORES[0]}, 1: {CORES[1]}}
    assert in_a_thread(lambda: numa.pin(name, nodes, number)) == ({CORES[core]},) * 2
    assert len(os.sched_getaffinity(0)) == len(CORES)


@pytest.mark.parametrize("name", ["1", "-1", "all", ""])
def test_a_node_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match=f"numa={name!r}: no such node\n.*spread\n  found: nodes 0"):
        numa.pin(name, {0: {CORES[0]}})


def test_a_system_without_nodes() -> None:
    with pytest.raises(UsageError, match="no NUMA nodes"):
        numa.pin("spread", {})
