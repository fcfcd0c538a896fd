"""What a graphics card and its link give, by plain probes of torch."""

import time
from collections.abc import Callable
from typing import Any

from pi_compile.machine.profile import Gpu, Link

BYTES = 1 << 30
HANDED = 4096
"""float32 that a layer hands over: one residual."""
LAUNCHES = 1000
SIDE = 4096
"""Of the square matrices whose product is timed."""


def probe(torch: Any) -> tuple[Gpu, Link, str]:
    """Bandwidths, launch and hand-over of torch's first GPU, and how they were had.

    Copies inside the card count twice, read and written. The link is timed with pinned memory in both directions; its
    rate is the slower one.
    """
    there = torch.ones(BYTES // 4, device="cuda")
    other = torch.empty_like(there)
    here = torch.ones(BYTES // 4).pin_memory()
    inside = 2 * BYTES / _seconds(torch, lambda: other.copy_(there))
    up = BYTES / _seconds(torch, lambda: there.copy_(here, non_blocking=True))
    down = BYTES / _seconds(torch, lambda: here.copy_(there, non_blocking=True))
    small, small_here = torch.zeros(HANDED, device="cuda"), torch.zeros(HANDED).pin_memory()

    def launches() -> None:
        for _ in range(LAUNCHES):
            small.add_(1)

    def handover() -> None:
        small_here.copy_(small, non_blocking=True)
        torch.cuda.synchronize()
        small.copy_(small_here, non_blocking=True)

    square = torch.ones(SIDE, SIDE, device="cuda", dtype=torch.float16)
    product = torch.empty_like(square)

    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(
        name=properties.name,
        vram_gib=round(properties.total_memory / 2**30, 1),
        bandwidth_gb_per_s=round(inside / 1e9, 1),
        launch_us=round(_seconds(torch, launches) / LAUNCHES * 1e6, 2),
        products_gflop_per_s=round(
            2 * SIDE**3 / _seconds(torch, lambda: torch.mm(square, square, out=product)) / 1e9, 1
        ),
    )
    link = Link(pcie_gb_per_s=round(min(up, down) / 1e9, 2), sync_us=round(_seconds(torch, handover) * 1e6, 1))
    how = (
        f"GPU: copies of 1 GiB by torch {torch.__version__}, pinned to the card {up / 1e9:.1f} and back "
        f"{down / 1e9:.1f} GB/s, {LAUNCHES} additions in a row, {4 * HANDED} bytes there and back, "
        f"a product of float16 matrices of {SIDE} by {SIDE}"
    )
    return gpu, link, how


def _seconds(torch: Any, work: Callable[[], object], repeats: int = 10) -> float:
    """Best wall time of one run, the device idle before and after."""
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
