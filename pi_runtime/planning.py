"""Which of the stored placements a run takes."""

import re
from collections.abc import Sequence

from pi_runtime.artifact.schema import Plan
from pi_runtime.errors import DoesNotFitError, UsageError

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str, flag: str) -> int:
    """`8GiB`, `512 MiB`, `1.5GB`, `4096` → bytes. Raises UsageError naming the flag."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{flag} {text}: not a size", expected="a number with B, KiB, MiB, GiB or TiB, like 8GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def choose_plan(plans: Sequence[Plan], budget: int, where: str) -> Plan:
    """The stored plan that uses most of the budget. Raises DoesNotFitError naming the smallest there is."""
    if not plans:
        raise DoesNotFitError(
            f"{where}: holds no placement: it was packed without one, or for a machine on which no hand-over pays",
            remedy="run it on the CPU (--device cpu, no --vram-budget), or set [place] machine and build it again",
        )
    fitting = [plan for plan in plans if plan.used_bytes <= budget]
    if not fitting:
        smallest = min(plan.used_bytes for plan in plans)
        raise DoesNotFitError(
            f"{where}: no stored placement fits the GPU budget",
            expected=f"at least {smallest} bytes",
            found=f"{budget} bytes",
            remedy=f"--vram-budget {smallest}, or add the budget to [place] vram_gib and build again",
        )
    return max(fitting, key=lambda plan: (plan.used_bytes, plan.vram_bytes))
