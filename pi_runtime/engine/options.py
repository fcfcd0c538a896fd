"""How a model is opened and how an engine runs: what the Python API, `pi-run` and `pi-serve` share.

The names are those of the keywords of `load` and `Engine`; how the command line spells them it knows itself.
"""

from dataclasses import dataclass
from pathlib import Path

from pi_runtime.errors import Setting, UsageError


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How an artifact is opened; `load` says what each option means."""

    mode: str = "auto"
    """`auto`, `dense`, `gate` or `predicted`."""
    context: int | None = None
    """Positions to hold; None for what the model allows, up to 4,096."""
    threads: int | None = None
    """CPU threads; None for all."""
    device: str = "auto"
    """`auto`, `cpu`, `stand-in` or `cuda:N`."""
    vram_budget: int | None = None
    """Bytes of GPU memory; None for what is free."""
    ram_budget: int | None = None
    """Bytes of memory; None for what is free."""
    kv_budget: int | None = None
    """Bytes for keys and values; None for the usual."""
    cache_format: str = "auto"
    """How keys and values are held: `auto`, `f32`, `f16`, `q8` or `q4`."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs; `Engine` says what each option means. Raises UsageError for impossible ones."""

    slots: int = 8
    """Most sequences that run at once."""
    piece: int | None = None
    """Most tokens of prompts in one step; None goes by times."""
    decode_share: float = 0.4
    """Share of their speed that answers keep while prompts are read."""
    speculate: str | int = "auto"
    """Tokens that are drafted at a time: `auto`, `off` or a number."""
    kv_disk: Path | None = None
    """Folder for keys and values that memory has no room for; None for none."""
    kv_disk_budget: int | None = None
    """Bytes that they may take there; None for 8 GiB."""

    def __post_init__(self) -> None:
        if not 0 <= self.decode_share < 1:
            raise UsageError(setting=Setting("decode_share", self.decode_share), expected="0 or more, and less than 1")
        if self.kv_disk is None and self.kv_disk_budget is not None:
            raise UsageError((Setting("kv_disk_budget"), " goes with ", Setting("kv_disk"), " alone"))
        for name, value in (("slots", self.slots), ("piece", self.piece)):
            if value is not None and value < 1:
                raise UsageError(setting=Setting(name, value), expected="1 or more")
