"""Checkpoints of Hugging Face's form and GGUF files: finding, checking and reading them, block by block.

Modules that read weights are imported on first use: a config can be read where what they need is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pi_compile.checkpoint.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("pi_compile.checkpoint.checkpoint"), name)
