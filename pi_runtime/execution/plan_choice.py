"""Choosing one of the stored placements for a run."""

import re

from pi_runtime.artifact.footprint import gpu_workspace_bytes, kv_bytes
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.errors import DoesNotFitError, UsageError

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str, flag: str) -> int:
    """Parse a size in bytes: `8GiB`, `512 MiB`, `1.5GB`, `4096`. Raises UsageError naming the flag."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{flag} {text}: not a size", expected="a number with B, KiB, MiB, GiB or TiB, like 8GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def gpu_bytes(plan: Plan, manifest: Manifest, context: int) -> int:
    """GPU bytes that a plan needs with a cache of `context` positions instead of those it was solved for."""
    if plan.used_bytes == 0:
        return 0

    def of_context(positions: int) -> int:
        cache = kv_bytes(manifest.decoder, manifest.formats["attention"], positions)
        return plan.attention.count("gpu") * cache + gpu_workspace_bytes(manifest.decoder, 0, positions, 1)

    return plan.used_bytes + of_context(context) - of_context(plan.context)


def choose_plan(manifest: Manifest, budget: int, context: int, where: str) -> Plan:
    """The stored plan that uses most of the budget with a cache of `context` positions.

    Raises DoesNotFitError naming the smallest plan.
    """
    plans = manifest.plans
    if not plans:
        raise no_placement(where)
    needed = [gpu_bytes(plan, manifest, context) for plan in plans]
    fitting = [(nbytes, plan.vram_bytes, n) for n, (nbytes, plan) in enumerate(zip(needed, plans, strict=True))]
    fitting = [found for found in fitting if found[0] <= budget]
    if not fitting:
        smallest, shorter = min(needed), min(plan.context for plan in plans)
        fits = shorter < context and min(gpu_bytes(plan, manifest, shorter) for plan in plans) <= budget
        raise DoesNotFitError(
            f"{where}: no stored placement fits the GPU budget with a context of {context} tokens",
            expected=f"at least {smallest} bytes",
            found=f"{budget} bytes",
            remedy=f"--vram-budget {smallest}, {f'--ctx-size {shorter}, ' if fits else ''}"
            "or add the budget to [place] vram_gib and build again",
        )
    return plans[max(fitting)[2]]


def no_placement(where: str) -> DoesNotFitError:
    """The error for an artifact without plans."""
    return DoesNotFitError(
        f"{where}: holds no placement: it was packed without one, or for a machine on which no hand-over pays",
        remedy="run it on the CPU (--device cpu, no --vram-budget), or set [place] machine and build it again",
    )
