"""NUMA nodes: a process that stays on one of them computes beside its memory.

Linux puts a page on the node of the thread that touches it first. So a process that is pinned before it has threads and
data has both on its node. What it maps from a file lies where whoever read it first put it.
"""

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from pi_runtime.errors import Setting, UsageError

SPREAD = "spread"
"""In place of a node's number: processes of one machine take the nodes in turns."""
NODES = Path("/sys/devices/system/node")
Nodes = Mapping[int, Collection[int]]
"""The cores of each node."""


def pin(numa: str, nodes: Nodes, number: int = 0) -> None:
    """Keep this thread, and those that it starts from now on, on a node: `N`, or `spread` for that of process `number`.

    Raises UsageError for a node that is not there, or on which this process may not run.
    """
    if numa == SPREAD and nodes:
        node = sorted(nodes)[number % len(nodes)]
    elif numa.isdecimal() and int(numa) in nodes:
        node = int(numa)
    else:
        found = f"nodes {', '.join(map(str, sorted(nodes)))}" if nodes else f"no NUMA nodes on {sys.platform}"
        raise UsageError(
            "no such node", setting=Setting("numa", numa), expected=f"a node's number, or {SPREAD}", found=found
        )
    os.sched_setaffinity(0, nodes[node])


def usable_nodes() -> Nodes:
    """The cores of each node on which this process may run; nodes without any are left out."""
    if sys.platform != "linux":
        return {}
    allowed = os.sched_getaffinity(0)
    cores = {int(path.name[4:]): _cores(path) & allowed for path in NODES.glob("node[0-9]*")}
    return {node: found for node, found in cores.items() if found}


def _cores(node: Path) -> set[int]:
    """Linux's list of a node's cores, like `0-3,8-11`."""
    ends = ([int(n) for n in part.split("-")] for part in (node / "cpulist").read_text().split(",") if part.strip())
    return {core for first, *last in ends for core in range(first, (last or [first])[0] + 1)}
