"""Measure this machine: the rates of the runtime's kernels, and of a GPU's memory and link if there is one."""

import datetime
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pi_compile.machine.doctor import installed_ram, usable_cores
from pi_compile.machine.profile import Cpu, Disk, Gpu, Link, Machine, Rates
from pi_runtime.artifact.formats import FORMATS, ROW_FORMATS
from pi_runtime.artifact.rows import WORKERS
from pi_runtime.disk.reader import Reader, page_aligned
from pi_runtime.errors import DoesNotFitError, Setting, UsageError, size
from pi_runtime.execution.devices import processor_name
from pi_runtime.kernels.benchmarks import (
    RANK,
    attention_bandwidth,
    gather_bandwidth,
    launch_seconds,
    most_threads,
    neuron_bandwidth,
    neuron_flops,
    predictor_bandwidth,
    product_bandwidth,
    product_flops,
    read_bandwidth,
    timed_matrix,
)

BYTES = 1 << 30
"""Most bytes of the data that rates are measured on, and those of a copy to a GPU."""
DISK_BYTES, LEAST_DISK_BYTES = 1 << 30, 1 << 27
"""Most and fewest bytes of the file that a disk's rates are measured on."""


def check_disk(folder: Path) -> None:
    """Check that a file can be written in a folder. Raises UsageError."""
    if not folder.is_dir():
        raise UsageError(
            "no such folder", setting=Setting("disk", folder), remedy="name a folder on the disk that models are on"
        )
    if not os.access(folder, os.W_OK):
        raise UsageError(
            "no permission to write there",
            setting=Setting("disk", folder),
            expected="a folder where a file can be written, read and removed again",
            remedy="name another folder on that disk",
        )


def measure_machine(
    folder: Path, notice: Callable[[str], None] = lambda _line: None, *, needs_disk: bool = False, briefly: bool = False
) -> Machine:
    """Measure a profile of this machine, with the disk that a folder is on.

    The disk is first, on a file of 1 GiB or a quarter of what is free. Read bandwidth is measured with 1, 2, 4, …
    threads, on 1 GiB or an eighth of RAM. Then follow a GPU, if there is one, and with the best number of threads
    products of every kind in each weight format, and the launch of an operator. `briefly`: on an eighth of these bytes,
    and only in formats that no other one's speed stands for.

    A disk that cannot be measured is left out with a notice; raises UsageError where the profile `needs_disk`, and
    DoesNotFitError where a GPU has too little room.
    """
    most_bytes = BYTES // 8 if briefly else BYTES
    disk, disk_how = _disk(folder, DISK_BYTES // 8 if briefly else DISK_BYTES)
    if disk is None:
        if needs_disk:
            raise UsageError(
                "cannot be measured",
                setting=Setting("disk", folder),
                found=disk_how,
                remedy=("name a folder on another disk, or leave ", Setting("disk"), " out"),
            )
        notice(f"{folder}: the profile has no disk: {disk_how}")
    cores, ram = usable_cores(), installed_ram() or 8 << 30
    size, most = min(most_bytes, ram // 8), min(cores, most_threads())
    counts = sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n < most} | {most})
    rates = {n: read_bandwidth(size, n) / 1e9 for n in counts}
    best = max(counts, key=lambda n: rates[n])
    gpu, link, gpu_how = _gpu()
    formats = [fmt for fmt in ROW_FORMATS if not (briefly and FORMATS[fmt].timed_as)]
    product_rates, launch = _products(formats, size, best)
    by_threads = ", ".join(f"{n}: {rate:.1f}" for n, rate in rates.items())
    today = datetime.datetime.now(datetime.UTC).date()
    return Machine(
        name=platform.node() or "this machine",
        source=f"measured {today} by pi-compile machine. CPU: sums of {size / 2**30:.3g} GiB, GB/s by threads "
        f"{by_threads}; products on {best} threads, gathered where one neuron in ten is read; "
        f"a launch is what slices of a matrix take longer than the whole; attention on cached keys and values; "
        f"operations of matrices, and of FFNs by neuron, times 64 vectors.{disk_how if disk else ''}{gpu_how}",
        cpu=Cpu(
            name=processor_name(),
            cores=cores,
            ram_gib=round(ram / 2**30, 1),
            bandwidth_gb_per_s=round(rates[best], 1),
            launch_us=round(launch * 1e6, 2),
            **product_rates,
            format_gflop_per_s={fmt: round(product_flops(fmt, best) / 1e9, 1) for fmt in formats},
            neurons_gflop_per_s={fmt: round(neuron_flops(fmt, best) / 1e9, 1) for fmt in formats},
            products_gflop_per_s=round(product_flops("f16", best) / 1e9, 1),
            attention_gb_per_s=round(attention_bandwidth(best) / 1e9, 1),
        ),
        gpu=gpu,
        link=link,
        disk=disk,
    )


def _products(formats: Sequence[str], size: int, threads: int) -> tuple[dict[str, Rates], float]:
    """10⁹ bytes a second by kind of product and format, under the profile's keys, and the seconds of a launch."""
    rates: dict[str, Rates] = {kind: {} for kind in ("format", "neurons", "gather", "predictor")}
    launches = []
    for fmt in formats:
        w = timed_matrix(fmt, size)
        found = (
            product_bandwidth(w, threads),
            neuron_bandwidth(w, threads),
            gather_bandwidth(w, threads),
            predictor_bandwidth(timed_matrix(fmt, size // 4, RANK), threads),
        )
        for by_format, rate in zip(rates.values(), found, strict=True):
            by_format[fmt] = round(rate / 1e9, 1)
        launches.append(launch_seconds(w, threads))
    return {f"{kind}_gb_per_s": by_format for kind, by_format in rates.items()}, median(launches)


def _disk(folder: Path, most: int) -> tuple[Disk | None, str]:
    """Rates of a disk, and how they were measured; or None, and why they were not."""
    free = shutil.disk_usage(folder).free
    probed = min(most, free // 4)
    if not hasattr(os, "O_DIRECT"):
        return None, "this system has no reads past the page cache (O_DIRECT)"
    if probed < LEAST_DISK_BYTES:
        return None, f"{size(free)} free; {size(4 * LEAST_DISK_BYTES)} are needed"
    disk = probe_disk(folder, probed)
    if disk is None:
        return None, "its file system refuses reads past the page cache (O_DIRECT)"
    return disk, f" Disk: pread with O_DIRECT at random places of a file of {probed / 2**30:.3g} GiB."


def _gpu() -> tuple[Gpu | None, Link | None, str]:
    if find_spec("torch") is None:
        return None, None, ""
    import torch  # noqa: PLC0415  seconds to import, and may be missing

    if not torch.cuda.is_available():
        return None, None, ""
    try:
        gpu, link, how = probe(torch)
    except RuntimeError as error:
        if "out of memory" not in str(error):  # of the GPU, and of memory that can be pinned: both say so
            raise
        raise DoesNotFitError(
            "the GPU has no room to be measured",
            expected="2 GiB free there, and 1 GiB of memory that can be pinned",
            found=str(error).partition("\n")[0],
            remedy="free the GPU: end what else uses it",
        ) from None
    return gpu, link, f" {how}"


SIZES_KIB = (4, 8, 16, 32, 64, 256)
DEPTHS = (1, WORKERS, 4 * WORKERS)
"""One read alone, whose time is the device's latency; as many as a run has under way; and more, to see the ceiling."""
SECONDS = 0.25
"""Least time of one measurement."""
_WRITTEN = 1 << 22


def probe_disk(folder: Path, nbytes: int, seconds: float = SECONDS) -> Disk | None:
    """Rates of the disk that a folder is on; None where its file system refuses reads past the page cache.

    A file of `nbytes`, in whole blocks of 4 MiB, is written there and removed again.
    """
    nbytes -= nbytes % _WRITTEN
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".pi-disk-") as file:
        block = np.random.default_rng(0).bytes(_WRITTEN)  # a device may compress what is alike
        for _ in range(nbytes // _WRITTEN):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        path = Path(file.name)
        rates = []
        for depth in DEPTHS:
            reader = Reader(path, _batch(depth), workers=depth, gap=0)
            try:
                if not reader.direct:
                    return None
                align = reader.align
                rates.append([_rate(reader, nbytes, kib << 10, reader.rows, seconds) for kib in SIZES_KIB])
            finally:
                reader.close()
    return Disk(
        name=str(folder.resolve()),
        sizes_kib=list(SIZES_KIB),
        depths=list(DEPTHS),
        read_mb_per_s=[[float(f"{rate / 1e6:.4g}") for rate in row] for row in rates],
        align_bytes=align,
    )


def _batch(depth: int) -> int:
    """Reads of one batch: so many that its beginning and end count little."""
    return 1 if depth == 1 else 8 * depth


def _rate(reader: Reader, file_nbytes: int, size: int, count: int, seconds: float) -> float:
    """Bytes a second at this size of a read."""
    memory = page_aligned(count * size)
    reader.hold(memory)
    # Every second place, so that no two reads are neighbours, which the reader would merge.
    places, rng = file_nbytes // size // 2, np.random.default_rng(size)
    count = min(count, places)
    slot_I = np.arange(count)
    target = int(memory.ctypes.data)

    def read() -> None:
        row_I = 2 * np.sort(rng.choice(places, count, replace=False))
        reader.add_rows(0, row_I, slot_I, 0, size, target)
        reader.submit(0)
        reader.wait(0)

    read()  # compiles, or loads, what it calls
    before, began, passed = reader.bytes_read, time.perf_counter(), 0.0
    while not passed or passed < seconds:
        read()
        passed = time.perf_counter() - began
    return (reader.bytes_read - before) / passed


RESIDUAL = 4096
"""Floats that a layer hands over."""
LAUNCHES = 1000
"""Operations that are launched in a row."""
WIDTH = 4096
"""Rows and columns of the matrices whose product is timed."""


def probe(torch: Any) -> tuple[Gpu, Link, str]:
    """Rates of torch's first GPU and of its link, and how they were measured.

    A copy in GPU memory counts twice, as read and as written. The link is timed with pinned memory in both directions;
    its rate is that of the slower one.
    """
    on_device, on_host = torch.ones(BYTES // 4, device="cuda"), torch.ones(BYTES // 4).pin_memory()
    target = torch.empty_like(on_device)
    device_rate = 2 * BYTES / _seconds(torch, lambda: target.copy_(on_device))
    upload_rate = BYTES / _seconds(torch, lambda: on_device.copy_(on_host, non_blocking=True))
    download_rate = BYTES / _seconds(torch, lambda: on_host.copy_(on_device, non_blocking=True))
    residual, host_residual = torch.zeros(RESIDUAL, device="cuda"), torch.zeros(RESIDUAL).pin_memory()

    def launches() -> None:
        for _ in range(LAUNCHES):
            residual.add_(1)

    def handover() -> None:
        host_residual.copy_(residual, non_blocking=True)
        torch.cuda.synchronize()
        residual.copy_(host_residual, non_blocking=True)

    matrix = torch.ones(WIDTH, WIDTH, device="cuda", dtype=torch.float16)
    product = torch.empty_like(matrix)

    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(
        name=properties.name,
        vram_gib=round(properties.total_memory / 2**30, 1),
        bandwidth_gb_per_s=round(device_rate / 1e9, 1),
        launch_us=round(_seconds(torch, launches) / LAUNCHES * 1e6, 2),
        products_gflop_per_s=round(
            2 * WIDTH**3 / _seconds(torch, lambda: torch.mm(matrix, matrix, out=product)) / 1e9, 1
        ),
    )
    link = Link(
        pcie_gb_per_s=round(min(upload_rate, download_rate) / 1e9, 2),
        sync_us=round(_seconds(torch, handover) * 1e6, 1),
    )
    how = (
        f"GPU: copies of 1 GiB by torch {torch.__version__}, from pinned memory {upload_rate / 1e9:.1f} and to it "
        f"{download_rate / 1e9:.1f} GB/s, {LAUNCHES} additions in a row, {4 * RESIDUAL} bytes to the host and back, "
        f"a product of float16 matrices of {WIDTH} by {WIDTH}"
    )
    return gpu, link, how


def _seconds(torch: Any, work: Callable[[], object], repeats: int = 10) -> float:
    """The shortest wall time of some runs; the device is idle before and after each."""
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
