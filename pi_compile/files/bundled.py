"""Data that comes with the project: `profiles/` of a clone, which a wheel carries inside the package."""

from pathlib import Path


def bundled(kind: str) -> Path:
    """Folder of one kind of profiles: `machines`, `models` (configs) or `published` (activation curves)."""
    here = Path(__file__).resolve().parents[1]
    in_clone = {"published": "activations/published"}.get(kind, kind)
    return here / kind if (here / kind).is_dir() else here.parent / "profiles" / in_clone
