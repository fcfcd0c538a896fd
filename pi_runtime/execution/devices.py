"""Choosing the device of a run, and what this machine is."""

import ctypes
import importlib.util
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pi_runtime.artifact.rows import PROCESS_NBYTES
from pi_runtime.errors import DeviceError, MissingExtraError, Setting, UsageError, install

MARGIN = 0.1
"""Share of the free memory that a budget of nobody's choice leaves to others."""


def resolve_device(name: str) -> str:
    """The device to use, `cpu`, `stand-in` or `cuda:N`, for a name that may also be `auto` or `cuda`.

    `auto` is the first GPU where there is one and torch and Triton are installed. Raises DeviceError for a device that
    is not there, MissingExtraError for what it needs.
    """
    if name == "auto":
        return "cuda:0" if not _missing() and gpu_driver() and _gpus() else "cpu"
    if name in ("cpu", "stand-in"):
        return name
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index == "" or index.isdecimal()):
        raise UsageError("unknown device", setting=Setting("device", name), expected="auto, cpu, stand-in or cuda:N")
    if missing := _missing():
        raise MissingExtraError(
            f"needs {' and '.join(missing)}, not installed",
            setting=Setting("device", name),
            remedy=install("cuda"),
        )
    present = _gpus()
    if int(index or 0) >= present:
        import torch  # noqa: PLC0415

        raise DeviceError(
            "no such GPU",
            setting=Setting("device", name),
            found=f"{present} CUDA devices, by torch {torch.__version__}",
            remedy=(
                *(Setting("device", "cpu"), ", or ", Setting("device", "auto")),
                "; with a GPU here: its driver, and a torch built for CUDA",
            ),
        )
    return f"cuda:{int(index or 0)}"


def _missing() -> list[str]:
    return [package for package in ("torch", "triton") if importlib.util.find_spec(package) is None]


def _gpus() -> int:
    import torch  # noqa: PLC0415  heavy, and needed only where a GPU may be

    return int(torch.cuda.device_count())


def gpu_kernels_are_cold() -> bool:
    """Whether Triton has compiled nothing on this machine yet."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    return not folder.is_dir() or not any(folder.iterdir())


def gpu_driver() -> bool:
    """Whether NVIDIA's driver is here and has a GPU, found without importing torch."""
    try:
        cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return False
    return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def processor_name() -> str:
    """The processor's name, as far as the system knows it."""
    return _proc("cpuinfo", "model name") or platform.processor() or platform.machine()


def available_memory() -> int | None:
    """Bytes of memory that are available without swapping, by Linux's estimate; None on other systems."""
    found = _proc("meminfo", "MemAvailable")
    return None if found is None else int(found.split()[0]) << 10


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a process can take: what is available, within the limits of its cgroups; None on other systems."""
    available = available_memory()
    if available is None:
        return None
    return min([available, *_cgroup_room(root)])


def ram_budget_for(nbytes: int) -> int | None:
    """The budget that keeps a run of so large an artifact within free memory; None where it fits."""
    free = free_memory()
    if free is None or nbytes <= free:
        return None
    return int(free * (1 - MARGIN)) + min(resident_bytes(), PROCESS_NBYTES)  # what the process has is not free any more


def _cgroup_room(root: Path) -> Iterator[int]:
    """What each memory cgroup of this process has left; pages of files that it could drop count as left."""
    names = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    listed = root / "proc/self/cgroup"
    for line in listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []:
        _, kind, path = line.split(":", 2)
        if kind not in names:
            continue
        folder = root / "sys/fs/cgroup" / kind / path.lstrip("/")
        with suppress(OSError, ValueError):  # not mounted here, or `max`
            limit, usage = (int((folder / name).read_text(encoding="utf-8")) for name in names[kind])
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
            files = sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))
            yield limit - usage + files


def resident_bytes() -> int:
    """Bytes of memory that this process takes now; 0 on systems that do not say."""
    found = _proc("self/status", "VmRSS")
    return 0 if found is None else int(found.split()[0]) << 10


def _proc(file: str, key: str) -> str | None:
    """The first value of a key in a file of /proc."""
    path = Path("/proc", file)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
