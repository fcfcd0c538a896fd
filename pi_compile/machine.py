"""Measure this machine: read bandwidth of its RAM, and of a GPU where torch sees one."""

import datetime
import os
import platform
import time
from importlib.util import find_spec
from typing import Any

from pi_compile.machine_file import Cpu, Gpu, Link, Machine
from pi_runtime.measure import read_bandwidth

BYTES = 1 << 30


def measure_machine() -> Machine:
    """Best read bandwidth by 1, 2, 4 … threads (1 GiB, or an eighth of RAM); a GPU's copies if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 << 30
    threads = sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n < cores} | {cores})
    rates = {n: read_bandwidth(min(BYTES, ram // 8), n) / 1e9 for n in threads}
    gpu, link = _gpu()
    by_threads = ", ".join(f"{n}: {rate:.1f}" for n, rate in rates.items())
    today = datetime.datetime.now(datetime.UTC).date()
    return Machine(
        name=platform.node() or "this machine",
        source=f"measured {today} by pi-compile machine: sums of 1 GiB, GB/s by threads {by_threads}",
        cpu=Cpu(
            name=platform.processor() or platform.machine(),
            cores=cores,
            ram_gib=round(ram / 2**30, 1),
            bandwidth_gb_per_s=round(max(rates.values()), 1),
        ),
        gpu=gpu,
        link=link,
    )


def _gpu() -> tuple[Gpu | None, Link | None]:
    if find_spec("torch") is None:
        return None, None
    import torch  # noqa: PLC0415  seconds to import, and may be missing

    if not torch.cuda.is_available():
        return None, None
    there = torch.ones(BYTES // 4, device="cuda")
    other, here = torch.empty_like(there), torch.ones(BYTES // 4).pin_memory()
    small = torch.zeros(4096, device="cuda")
    small_here = torch.zeros(4096).pin_memory()
    copy = 2 * BYTES / _seconds(torch, lambda: other.copy_(there))
    up = BYTES / _seconds(torch, lambda: there.copy_(here, non_blocking=True))
    sync = _seconds(torch, lambda: (small.copy_(small_here, non_blocking=True), small_here.copy_(small)))
    properties: Any = torch.cuda.get_device_properties(0)
    return (
        Gpu(
            name=properties.name,
            vram_gib=round(properties.total_memory / 2**30, 1),
            bandwidth_gb_per_s=round(copy / 1e9, 1),
        ),
        Link(pcie_gb_per_s=round(up / 1e9, 1), sync_us=round(sync * 1e6, 1)),
    )


def _seconds(torch: Any, work: Any, repeats: int = 10) -> float:
    """Best wall time of one run, the device idle before and after."""
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
