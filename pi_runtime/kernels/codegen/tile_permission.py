"""Whether this process may use AMX's tiles: the processor has them, and Linux hands out their 8 KiB a thread on demand.

A process asks once, before its threads start; the answer holds for all of them.
"""

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Set
from functools import cache

FEATURES = frozenset({"amx-tile", "amx-int8"})
"""LLVM's names of what products of bytes need. It lists them where the system has switched the registers on."""
PROCESSORS = ("sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids")
"""LLVM's names of processors that have tiles."""
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
_REASONS = {
    errno.EINVAL: "this system is older than Linux 5.16, which knows them first",
    errno.EOPNOTSUPP: "the system or its virtual machine has them switched off",
    errno.ENOSPC: "a thread's signal stack is too small for them",
}


def refusal(features: Set[str], processor: str) -> str:
    """Why tiles cannot be used on a processor with these LLVM features; '' where they can, or where it has none."""
    if features >= FEATURES and (number := ask()):
        why = _REASONS.get(number, os.strerror(number))
        return f"the system refuses them ({errno.errorcode.get(number, number)}): {why}"
    if processor in PROCESSORS and not features >= FEATURES:
        return "the system or its virtual machine does not show them"
    return ""


@cache
def ask() -> int:
    """Ask for tiles; returns 0, or the number of the system's error."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.syscall(_ARCH_PRCTL, ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XTILEDATA))
    return ctypes.get_errno() if refused else 0
