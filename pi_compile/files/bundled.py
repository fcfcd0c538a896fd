"""Data that comes with the project: in `profiles/` of a clone, inside the package of a wheel."""

from pathlib import Path


def bundled_folder(kind: str) -> Path:
    """The folder of one kind of data: `machines` (profiles), `models` (configs) or `published` (activation curves)."""
    package = Path(__file__).resolve().parents[1]
    in_clone = {"published": "activations/published"}.get(kind, kind)
    return package / kind if (package / kind).is_dir() else package.parent / "profiles" / in_clone
