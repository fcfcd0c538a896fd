"""The package installed as its users have it, beside the packages of this environment."""

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest


def new_environment(home: Path) -> dict[str, str]:
    """Variables of a new environment in `home`, which sees this one's packages, but not the repository."""
    packages = {path for path in sys.path if path.endswith("site-packages")}
    venv.create(home, with_pip=not any(Path(path, "pip").is_dir() for path in packages))
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "packages.pth").write_text("\n".join(packages))
    environment = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    return environment


def install(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run a `pip install` of the package alone. Skips the test if what builds it cannot be fetched."""
    done = subprocess.run([*command, "--no-deps"], env=environment, capture_output=True, text=True, check=False)
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip("what builds the package cannot be fetched")
    assert done.returncode == 0, done.stderr
