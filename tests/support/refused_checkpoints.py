"""Checkpoints that are not opened."""

from pathlib import Path
from typing import Any

import pytest

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError


def refusal(model: str | Path, **arguments: Any) -> str:
    """What is said of a checkpoint that is refused."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model, **arguments)
    assert caught.value.exit_code == 3
    return str(caught.value)
