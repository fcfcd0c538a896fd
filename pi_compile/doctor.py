"""What this machine and installation can do, and what is missing."""

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from pi_runtime.console import size

EXTRAS = {
    "runtime": ("numpy", "numba", "tokenizers", "jinja2", "typer", "rich"),
    "place": ("highspy", "pydantic", "scipy"),
    "compile": ("torch", "transformers", "datasets", "safetensors", "zarr"),
    "cuda": ("torch", "triton"),
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `remedy` is empty where nothing is to be done."""

    topic: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at Python, processor, memory, threads, kernel cache, GPU and the packages of each extra."""
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("cores", str(_cores())),
        _memory(),
        *_kernels(),
        _gpu(),
        *(_extra(name, packages) for name, packages in EXTRAS.items()),
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> Finding:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return Finding("memory", "unknown on this system")
    return Finding("memory", size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))


def _kernels() -> list[Finding]:
    if find_spec("numba") is None:
        return []
    from llvmlite import binding  # noqa: PLC0415  slow to load, and may be missing

    from pi_runtime.kernels.compiling import cache_folder, is_cold, threading_layer  # noqa: PLC0415

    features = binding.get_host_cpu_features()
    notable = [f for f in ("avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512vnni", "neon") if features.get(f)]
    layer = threading_layer()
    slow = "install libgomp (Debian: libgomp1): without OpenMP each parallel step waits some ten times longer"
    folder = cache_folder()
    state = "compiled on first run" if is_cold() else "ready"
    return [
        Finding("processor", f"{binding.get_host_cpu_name()}: {', '.join(notable) or 'no vector extension we use'}"),
        Finding("threading layer", layer, "" if layer in ("omp", "tbb") else slow),
        Finding("kernels", f"{state}, in {folder}, {size(shutil.disk_usage(folder).free)} free"),
    ]


def _gpu() -> Finding:
    if find_spec("torch") is None:
        return Finding("gpu", "not looked for: torch is not installed", "pip install 'pi-toolchain[cuda]'")
    import torch  # noqa: PLC0415

    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return Finding("gpu", ", ".join(names) or "none: everything runs on the CPU")


def _extra(name: str, packages: tuple[str, ...]) -> Finding:
    missing = [p for p in packages if find_spec(p) is None]
    if not missing:
        versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
        return Finding(f"extra {name}", versions)
    install = "pip install pi-toolchain" if name == "runtime" else f"pip install 'pi-toolchain[{name}]'"
    return Finding(f"extra {name}", f"missing {', '.join(missing)}", f"{install} ({sys.executable})")
