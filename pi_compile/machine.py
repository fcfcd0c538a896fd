"""Measure this machine: what its RAM gives to the runtime's kernels, and a GPU's memory and link if there is one."""

import datetime
import os
import platform
from importlib.util import find_spec
from pathlib import Path

from pi_compile.gpu_probe import probe
from pi_compile.machine_file import Cpu, Gpu, Link, Machine
from pi_runtime.measure import (
    MEASURED,
    gather_bandwidth,
    launch_seconds,
    most_threads,
    product_bandwidth,
    product_flops,
    read_bandwidth,
)

BYTES = 1 << 30


def measure_machine() -> Machine:
    """Read bandwidth by 1, 2, 4 … threads (1 GiB, or an eighth of RAM); at the best of them, products in each weight
    format and the launch of an operator; a GPU's memory, launch and link if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 << 30
    size, most = min(BYTES, ram // 8), min(cores, most_threads())
    counts = sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n < most} | {most})
    rates = {n: read_bandwidth(size, n) / 1e9 for n in counts}
    best = max(counts, key=lambda n: rates[n])
    gpu, link, gpu_how = _gpu()
    by_threads = ", ".join(f"{n}: {rate:.1f}" for n, rate in rates.items())
    today = datetime.datetime.now(datetime.UTC).date()
    return Machine(
        name=platform.node() or "this machine",
        source=f"measured {today} by pi-compile machine. CPU: sums of {size / 2**30:.3g} GiB, GB/s by threads "
        f"{by_threads}; products on {best} threads, gathered where one row in ten is read; "
        f"operations of an f16 matrix times 64 vectors.{gpu_how}",
        cpu=Cpu(
            name=_processor(),
            cores=cores,
            ram_gib=round(ram / 2**30, 1),
            bandwidth_gb_per_s=round(rates[best], 1),
            launch_us=round(launch_seconds(best) * 1e6, 2),
            format_gb_per_s={fmt: round(product_bandwidth(fmt, size, best) / 1e9, 1) for fmt in MEASURED},
            products_gflop_per_s=round(product_flops("f16", best) / 1e9, 1),
            gather_gb_per_s={fmt: round(gather_bandwidth(fmt, size, best) / 1e9, 1) for fmt in MEASURED},
        ),
        gpu=gpu,
        link=link,
    )


def _processor() -> str:
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _gpu() -> tuple[Gpu | None, Link | None, str]:
    if find_spec("torch") is None:
        return None, None, ""
    import torch  # noqa: PLC0415  seconds to import, and may be missing

    if not torch.cuda.is_available():
        return None, None, ""
    gpu, link, how = probe(torch)
    return gpu, link, f" {how}"
