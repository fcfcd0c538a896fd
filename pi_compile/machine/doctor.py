"""Diagnosis of this machine and installation: what they can do, and what is missing."""

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from pi_compile.files import bundled_folder
from pi_runtime.errors import install, size
from pi_runtime.execution.devices import available_memory, gpu_driver

EXTRAS = {
    "runtime": ("numpy", "numba", "tokenizers", "jinja2", "typer", "rich"),
    "place": ("highspy", "pydantic", "scipy"),
    "report": ("matplotlib",),
    "pack": ("gguf", "huggingface_hub", "pydantic", "safetensors", "transformers"),
    "compile": ("torch", "accelerate", "datasets", "zarr"),
    "cuda": ("torch", "triton"),
    "grammar": ("llguidance",),
    "serve": ("pydantic", "starlette", "uvicorn"),
    "ray": ("ray",),
}
"""Packages of the installation itself (`runtime`) and of each extra."""
_NOTABLE = ("avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512vnni", "amx-int8", "neon")


@dataclass(frozen=True)
class Finding:
    """One topic of the diagnosis. `remedy` is empty where there is nothing to do."""

    topic: str
    found: str
    remedy: str = ""


def diagnose() -> list[Finding]:
    """Diagnose Python, processor, memory, threads, kernel cache, GPU, bundled data and the packages of each extra."""
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("cores", str(usable_cores())),
        _memory(),
        *_kernels(),
        _gpu(),
        Finding("bundled data", f"{bundled_folder()}: profiles, recipes, and a model in recipes/demo"),
        *(_extra(name, packages) for name, packages in EXTRAS.items()),
    ]


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed_ram() -> int | None:
    """Bytes of RAM; None where the system does not say."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory() -> Finding:
    ram = installed_ram()
    return Finding("memory", "unknown on this system" if ram is None else f"{size(ram)}{_available()}")


def _available() -> str:
    found = available_memory()
    return "" if found is None else f", {size(found)} available"


def _kernels() -> list[Finding]:
    if find_spec("numba") is None:
        return []
    from llvmlite import binding  # noqa: PLC0415  slow to load, and may be missing

    from pi_runtime.kernels.codegen.isa import refusal  # noqa: PLC0415
    from pi_runtime.kernels.codegen.jit import cache_folder, is_cold  # noqa: PLC0415
    from pi_runtime.kernels.codegen.threads import threading_layer  # noqa: PLC0415

    features, name = binding.get_host_cpu_features(), binding.get_host_cpu_name()
    refused = refusal({feature for feature, there in features.items() if there}, name)
    notable = ", ".join(f for f in _NOTABLE if features.get(f)) or "no vector extension that kernels use"
    layer = threading_layer()
    slow = "install libgomp (Debian: libgomp1): without OpenMP each parallel step waits some ten times longer"
    folder = cache_folder()
    state = "compiled on first run" if is_cold() else "ready"
    return [
        Finding("processor", f"{name}: {notable}" + (f"; AMX is not used: {refused}" if refused else "")),
        Finding("threading layer", layer, "" if layer in ("omp", "tbb") else slow),
        Finding("kernels", f"{state}, in {folder}, {size(shutil.disk_usage(folder).free)} free"),
    ]


def _gpu() -> Finding:
    if find_spec("torch") is None:
        return Finding("gpu", "not looked for: torch is not installed", f"with a GPU: {_install('cuda')}")
    import torch  # noqa: PLC0415

    cards = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    text = ", ".join(f"cuda:{n} {card.name}, {size(card.total_memory)}" for n, card in enumerate(cards))
    if not cards and gpu_driver():
        return Finding("gpu", f"one that torch {torch.__version__} cannot use", "a torch built for CUDA in its place")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    needed = "install a C compiler and Python's headers (gcc, python3-dev): Triton builds what starts kernels"
    return Finding("gpu", text or "none: everything runs on the CPU", needed if cards and not compiler else "")


def _extra(name: str, packages: tuple[str, ...]) -> Finding:
    topic = name if name == "runtime" else f"extra {name}"
    missing = [p for p in packages if find_spec(p) is None]
    if not missing:
        return Finding(topic, ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages))
    needed = {
        "cuda": "with a GPU: ",
        "ray": "for a Ray cluster: ",
        "serve": "for a server: ",
        "grammar": "for answers within a grammar: ",
    }.get(name, "")
    return Finding(topic, f"missing {', '.join(missing)}", needed + _install(name))


def _install(extra: str) -> str:
    return f"{sys.executable} -m {install('' if extra == 'runtime' else extra)}"
