"""The state of a session: its text, and what is kept of its keys and values while it is paused."""

from dataclasses import dataclass, field
from pathlib import Path

from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sequence.sequence import Origin, TokenSequence


@dataclass(eq=False)
class SuspendedKV:
    """What is kept of the keys and values of a paused session: a cache, or a file, or neither."""

    began: float
    tokens: tuple[int, ...] = ()
    selected: tuple[bool, ...] = ()
    """The positions that cache or file hold."""
    cache: KVCache | None = None
    file: Path | None = None


@dataclass(eq=False)
class SessionState(Origin):
    """The text of a session up to now, as the engine and its caller share it."""

    tokens: list[int] = field(default_factory=list)
    selected: list[bool] = field(default_factory=list)
    """For each token whether it runs with selection, as those of answers do."""
    sequence: TokenSequence | None = None
    """The one that was submitted last, if there is one."""
    suspended: SuspendedKV | None = None
    """Belongs to the engine's thread, and is None while a sequence uses the cache."""
    is_closed: bool = False

    @property
    def holds_cache(self) -> bool:
        """Whether it is paused, and its keys and values are in memory."""
        return self.suspended is not None and self.suspended.cache is not None
