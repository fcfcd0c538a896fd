"""Rates of a GPU and its link, measured with plain torch operations."""

import time
from collections.abc import Callable
from typing import Any

from pi_compile.machine.profile import Gpu, Link

BYTES = 1 << 30
"""Size of a timed copy."""
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
