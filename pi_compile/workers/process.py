"""The process that a worker is, as far as its machine tells which one that was.

A process is known by its number and its start, among the processes of a boot and a container. A number alone is given
again: a container that is started again has the same ones, and its namespace may have the number of the one before.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROC = Path("/proc")
_STATE, _STARTED = 0, 19
"""Positions in `stat` of the state and the start in clock ticks, counted from behind the name."""


def this_process() -> dict[str, Any]:
    """What `lives_here` needs to know of this process."""
    pid = os.getpid()
    stat = _stat(pid)
    return {"system": _system(), "pid": pid, "started": int(stat[_STARTED]) if stat else 0}


def lives_here(shown: Mapping[str, Any]) -> bool | None:
    """Whether a process of this machine, as it showed itself, still lives.

    None where this process cannot tell: on another machine, in another container, or where the system does not say when
    a process began. Then heartbeats decide, a little later.
    """
    system, pid, started = _system(), shown.get("pid"), shown.get("started")
    if not (system and shown.get("system") == system and started and isinstance(pid, int)):
        return None
    stat = _stat(pid)
    if stat is None:
        return None if _hidden(pid) else False
    return stat[_STATE] not in "ZX" and stat[_STARTED] == str(started)  # a zombie waits for its parent to ask after it


def _system() -> str:
    """A name for the processes that this one can see: of its boot, and its container where it is in one."""
    try:
        if (PROC / "self").readlink().name != str(os.getpid()):
            return ""  # /proc shows the processes of another container
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return ""  # not Linux


def _stat(pid: int) -> list[str] | None:
    """What the system says of a process, from its state on; None where it says nothing."""
    try:
        found = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return found if len(found) > _STARTED else None


def _hidden(pid: int) -> bool:
    """Whether a process is there that `/proc` does not show: of another user, under `hidepid`."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    return False
