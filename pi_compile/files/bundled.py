"""Data that comes with the project: `profiles` and `recipes`, in a clone beside the package, else inside it."""

from importlib.resources import files
from pathlib import Path


def bundled_folder(folder: str = "") -> Path:
    """A folder of that data by its path in a clone, such as `profiles/machines` or `recipes/demo`."""
    package = Path(str(files("pi_compile")))
    installed = package / "bundled"
    return (installed if installed.is_dir() else package.parent) / folder
