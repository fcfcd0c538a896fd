"""Every module can be imported, by itself and first; it says nothing and changes nothing while it is."""

import os
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import pi_compile
import pi_runtime

pytestmark = pytest.mark.slow

# Imports each module with none of ours loaded before, so that a circle shows whichever way it is entered.
ALONE = """
import importlib, sys
for name in sys.argv[1:]:
    for ours in [m for m in sys.modules if m.partition(".")[0] in ("pi_runtime", "pi_compile")]:
        del sys.modules[ours]
    importlib.import_module(name)
sys.stderr.write(" ".join(sorted({m.partition(".")[0] for m in sys.modules})))
"""
# Not pydantic and scipy: typer and numba take them where they are installed.
FOREIGN = {"torch", "transformers", "datasets", "highspy", "zarr", "safetensors", "triton", "pi_compile"}


def modules(package: str, path: list[str]) -> list[str]:
    names = [info.name for info in pkgutil.walk_packages(path, f"{package}.")]
    return [package, *(name for name in names if not name.endswith("__main__"))]


# Imports what others have made, then all of ours: what has changed in the process since is our doing.
UNCHANGED = """
import importlib, os, sys
from importlib.util import find_spec
for name in "numba torch triton transformers datasets huggingface_hub zarr matplotlib highspy".split():
    if find_spec(name) is not None:
        importlib.import_module(name)
import numba, llvmlite.binding
def state():
    return dict(os.environ), {n: v for n, v in vars(numba.config).items() if n.isupper()}
before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
for then, now in zip(before, state()):
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            print(name, then.get(name), now.get(name))
"""


def test_importing_leaves_variables_settings_and_disk_alone(tmp_path: Path) -> None:
    names = modules("pi_runtime", pi_runtime.__path__)
    if any(find_spec(name) is None for name in ("torch", "triton")):
        names = [name for name in names if not name.startswith("pi_runtime.cuda.")]
    if all(find_spec(name) is not None for name in ("torch", "transformers", "datasets", "highspy")):
        names += modules("pi_compile", pi_compile.__path__)
    environment = {**os.environ, "PI_CACHE_DIR": str(tmp_path / "kernels"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    environment = {name: value for name, value in environment.items() if name not in ("PI_ISA", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", UNCHANGED, *names], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == ""
    assert not (tmp_path / "kernels").exists()


def import_alone(names: list[str]) -> set[str]:
    """Top-level packages loaded in the end."""
    done = subprocess.run([sys.executable, "-c", ALONE, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "\n" not in done.stderr, done.stderr
    return set(done.stderr.split())


def test_the_runtime_stands_alone() -> None:
    names = [name for name in modules("pi_runtime", pi_runtime.__path__) if not name.startswith("pi_runtime.cuda.")]
    assert import_alone(names) & FOREIGN == set()


@pytest.mark.skipif(any(find_spec(name) is None for name in ("torch", "triton")), reason="needs the cuda extra")
def test_every_module_of_the_gpu_tier() -> None:
    names = [name for name in modules("pi_runtime", pi_runtime.__path__) if name.startswith("pi_runtime.cuda.")]
    assert import_alone(names) & FOREIGN == {"torch", "triton"}


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torch", "transformers", "datasets", "highspy")),
    reason="needs the compile extra",
)
def test_every_module_of_the_compiler() -> None:
    import_alone(modules("pi_compile", pi_compile.__path__))
