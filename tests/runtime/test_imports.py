"""Every module can be imported; it says nothing and changes nothing while it is.

That any module can be the first is `lint-imports`' to say: no modules import each other in a circle.
"""

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

# Imports what others have made, then ours: what has changed in the process since is our doing.
UNCHANGED = """
import importlib, os, sys
from importlib.util import find_spec
for name in "numba torch triton transformers datasets huggingface_hub zarr matplotlib".split():
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
# Names the packages that are loaded after ours are.
LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted({m.partition(".")[0] for m in sys.modules}))
"""
# Not pydantic and scipy: typer and numba take them where they are installed.
FOREIGN = {"torch", "transformers", "datasets", "highspy", "zarr", "safetensors", "triton", "llguidance", "pi_compile"}


def modules(package: str, path: list[str]) -> list[str]:
    """Those that are imported; a child process's file is run, in no package."""
    names = [info.name for info in pkgutil.walk_packages(path, f"{package}.")]
    return [package, *(name for name in names if not name.endswith(("__main__", "_worker")))]


def runtime_modules() -> list[str]:
    """Those that can be imported with the extras that are installed, but the GPU's."""
    names = [name for name in modules("pi_runtime", pi_runtime.__path__) if not name.startswith("pi_runtime.cuda.")]
    has_server = all(find_spec(name) is not None for name in ("starlette", "uvicorn", "pydantic"))
    return [name for name in names if has_server or not name.startswith("pi_runtime.server.")]


def run(script: str, names: list[str], environment: dict[str, str] | None = None) -> str:
    """What the script prints; it must print nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", script, *names], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_importing_leaves_variables_settings_and_disk_alone(tmp_path: Path) -> None:
    names = runtime_modules()
    if all(find_spec(name) is not None for name in ("torch", "triton")):
        names += [name for name in modules("pi_runtime", pi_runtime.__path__) if name.startswith("pi_runtime.cuda.")]
    if all(find_spec(name) is not None for name in ("torch", "transformers", "datasets", "scipy")):
        names += modules("pi_compile", pi_compile.__path__)
    if find_spec("ray") is None:
        names = [name for name in names if not name.endswith(".ray_tasks")]
    environment = {**os.environ, "PI_CACHE_DIR": str(tmp_path / "kernels"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    environment = {name: value for name, value in environment.items() if name not in ("PI_ISA", "GOMP_SPINCOUNT")}
    if find_spec("matplotlib") is not None:
        import matplotlib.font_manager  # lists the fonts where nobody has, which takes seconds, and is said on stderr

        environment["MPLCONFIGDIR"] = matplotlib.get_cachedir()
    assert run(UNCHANGED, names, environment) == ""
    assert not (tmp_path / "kernels").exists()


def test_the_runtime_stands_alone() -> None:
    assert set(run(LOADED, runtime_modules()).split()) & FOREIGN == set()


@pytest.mark.skipif(any(find_spec(name) is None for name in ("torch", "triton")), reason="needs the cuda extra")
def test_the_gpu_tier_needs_torch_and_triton_alone() -> None:
    names = [name for name in modules("pi_runtime", pi_runtime.__path__) if name.startswith("pi_runtime.cuda.")]
    assert set(run(LOADED, names).split()) & FOREIGN == {"torch", "triton"}
