"""What the engine is to run, and what comes of it: requests, alone or of a session, and their outputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import NamedTuple

from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sequence.sequence import ReadSequence, Status, TokenSequence


class Output(NamedTuple):
    """What has come of a request: some text, or its end."""

    text: str
    num_tokens: int
    """How many tokens the answer has with this text; at the end all of them."""
    ended: bool = False
    error: BaseException | None = None
    """What ended it, if it was an error."""


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
class SessionState:
    """The text of a session up to now, as the engine and its caller share it."""

    tokens: list[int] = field(default_factory=list)
    selected: list[bool] = field(default_factory=list)
    """For each token whether it runs with selection, as those of answers do."""
    salt: str = ""
    """What is kept of it is shared only with requests that have the same."""
    client: str = ""
    """Whose session it is."""
    request: "ScheduledRequest | None" = None
    """The one that its caller made last, if there is one."""
    suspended: SuspendedKV | None = None
    """Belongs to the engine's thread, and is None while a request uses the cache."""
    is_closed: bool = False

    @property
    def holds_cache(self) -> bool:
        """Whether it is paused, and its keys and values are in memory."""
        return self.suspended is not None and self.suspended.cache is not None


class ScheduledRequest:
    """A sequence that the engine is to run, with its cache and the outputs that nobody has read yet."""

    def __init__(
        self,
        sequence: TokenSequence,
        block_tokens: int,
        session: SessionState | None = None,
        *,
        salt: str = "",
        client: str = "",
    ) -> None:
        self.sequence, self.session = sequence, session
        """What runs, and the session it is part of, if any."""
        self.salt = salt if session is None else session.salt
        """It shares stored pages only with requests that have the same."""
        self.client = client if session is None else session.client
        """Clients take turns where requests wait."""
        self.samples: list[ScheduledRequest] = []
        """Further answers to its prompt (parallel samples): they begin once it, their leader, has read it."""
        self.cache: KVCache | None = None
        """None while it waits."""
        self.cancelled = False
        """Set by the caller's thread; the engine looks before each step."""
        self.done = Event()
        """Set when the engine has done with it."""
        self.outputs: SimpleQueue[Output] = SimpleQueue()
        self.chars = 0
        """Characters of text up to now."""
        self.notify: Callable[[], object] = lambda: None
        """Called by the engine's thread when something has come."""
        self._block_tokens = min(block_tokens, BLOCK_TOKENS) if sequence.needs_all_logits else block_tokens

    @property
    def reads_ahead(self) -> bool:
        """Whether it is only computed, with nothing for its caller to read."""
        return isinstance(self.sequence, ReadSequence)

    @property
    def is_running(self) -> bool:
        """Whether it has a slot, and neither waits for one nor has ended."""
        return self.sequence.status is Status.RUNNING

    @property
    def is_decoding(self) -> bool:
        """Whether its next token is drawn after one more token has run."""
        return self.sequence.is_decoding

    @property
    def block(self) -> int:
        """How many of its tokens may run in one step."""
        return self.sequence.block_length(self._block_tokens)

    def put(self, output: Output) -> None:
        """Give an output to whoever reads it. Where a reader's function fails, nobody reads: it ends."""
        self.outputs.put(output)
        self.chars += len(output.text)
        try:
            self.notify()
        except Exception:  # it is the reader's, and the thread is everybody's
            self.cancelled = True

    def finish(self, error: BaseException | None) -> None:
        """Say that the engine has done with it, and why if that was an error."""
        self.sequence.status = Status.FINISHED
        self.done.set()
        self.put(Output("", len(self.sequence.tokens) - self.sequence.prompt_tokens, ended=True, error=error))

    def cancel(self) -> None:
        """Let the engine drop it before its next step."""
        self.cancelled = True
