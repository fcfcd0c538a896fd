"""Hugging Face checkpoints: finding, understanding and reading them, block by block."""

from pi_compile.checkpoint.adapter import families
from pi_compile.checkpoint.reading import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "families", "open_checkpoint"]
