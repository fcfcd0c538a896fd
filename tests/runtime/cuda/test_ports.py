"""Every kernel compiles for every GPU that Triton's back ends know, in every format (the session `ports`)."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton.backends.nvidia")

from support.gpu_target import amd, compiling, nvidia
from support.ptx.cases import EVEN, GROUPS

NVIDIA = (75, 80, 86, 89, 90, 100, 120)
AMD = ("gfx90a", "gfx942", "gfx1100")
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program may have; AMD's GPUs have 64 KiB."""
KERNELS = 18


@pytest.mark.parametrize("gpu", [*NVIDIA, *AMD])
def test_kernels_compile(emulator: object, gpu: int | str, long: bool, monkeypatch: Any, tmp_path: Any) -> None:
    if not long:
        pytest.skip("only with --long")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    most, names, compiled = SHARED_KIB.get(gpu, 64), set(), 0  # type: ignore[call-overload]

    def seen(name: str, kernel: Any) -> None:
        nonlocal compiled
        assert kernel.metadata.shared <= most << 10, (name, kernel.metadata.shared)
        names.add(name)
        compiled += 1

    target, hip = (nvidia(gpu), None) if isinstance(gpu, int) else (amd(gpu), "for AMD")
    with patch.object(torch.version, "hip", hip), compiling(target, seen):
        for group in [g for g in GROUPS if not g.endswith(str(EVEN))]:
            for case in GROUPS[group]():
                case.launch()
    assert len(names) == KERNELS
    print(f"{target.backend} {gpu}: {compiled} kernels, by name {len(names)}")
