"""One request of an engine, alone or of a session: what its caller reads, and the state that the engine keeps of it."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from typing import NamedTuple

from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sequence.logprobs import TokenLogprobs
from pi_runtime.sequence.sequence import Answer, Scoring
from pi_runtime.sequence.stats import Stats


class Piece(NamedTuple):
    """Text of an answer, and how many tokens the answer has with it."""

    text: str
    tokens: int


class News(NamedTuple):
    """What has come of an answer since it was last read."""

    text: str
    tokens: int
    """How many tokens the answer has with this text; at the end all of them."""
    ended: bool
    error: BaseException | None
    """What ended it, if it was an error."""


@dataclass(eq=False)
class Pause:
    """What is kept of the keys and values of a paused session: a cache, or a file, or neither."""

    began: float
    tokens: tuple[int, ...] = ()
    selected: tuple[bool, ...] = ()
    """The positions that cache or file hold."""
    cache: KVCache | None = None
    file: Path | None = None


@dataclass(eq=False)
class Turns:
    """The text of a session up to now, as the engine and its caller share it."""

    tokens: list[int] = field(default_factory=list)
    selected: list[bool] = field(default_factory=list)
    """For each token whether it runs with selection, as those of answers do."""
    salt: str = ""
    """What is kept of it is shared only with requests that have the same."""
    request: "Request | None" = None
    """The one that its caller made last, if there is one."""
    pause: Pause | None = None
    """Belongs to the engine's thread, and is None while a request uses the cache."""
    is_closed: bool = False


class Request:
    """A request as the engine's thread sees it: an answer, or the scoring of a prompt."""

    def __init__(
        self,
        answer: Answer | Scoring,
        block_tokens: int,
        turns: Turns | None = None,
        *,
        salt: str = "",
        reads_only: bool = False,
    ) -> None:
        self.turns, self.reads_only = turns, reads_only
        """The session it is part of, if any; and whether it ends when all its tokens have run, with none drawn."""
        self.salt = salt if turns is None else turns.salt
        """It shares stored pages only with requests that have the same."""
        self.left = Event()
        """Set when the engine has done with it."""
        self.answer = answer
        self.siblings: list[Request] = []
        """Further answers to its prompt, which begin once it has been read."""
        self.cache: KVCache | None = None
        """None while it waits."""
        self.has_joined = False
        """Whether it has been live; it may wait again since."""
        self.cancelled = False
        """Set by the caller's thread; the engine looks before each step."""
        self.pieces: SimpleQueue[Piece | BaseException | None] = SimpleQueue()
        """Text; at the end None, or the error that ended it."""
        self.chars = 0
        """Characters of text up to now."""
        self.notify: Callable[[], object] = lambda: None
        """Called by the engine's thread when something has come."""
        # Logits of all its tokens are wanted of a scoring.
        self._block_tokens = min(block_tokens, BLOCK_TOKENS) if isinstance(answer, Scoring) else block_tokens

    @property
    def held(self) -> int:
        """Tokens whose keys and values its cache holds."""
        return 0 if self.cache is None else self.cache.length

    @property
    def pending(self) -> int:
        """Tokens that must run before the next one can be drawn; one more where none will be."""
        return len(self.answer.tokens) - self.held + self.reads_only

    @property
    def block(self) -> int:
        """How many of these may run in one step."""
        return len(self.answer.next_block(self.held, self._block_tokens)[0])

    def put(self, piece: Piece | BaseException | None) -> None:
        """Give text, or the end, to whoever reads it. Where a reader's function fails, nobody reads: it ends."""
        self.pieces.put(piece)
        self.chars += len(piece.text) if isinstance(piece, Piece) else 0
        try:
            self.notify()
        except Exception:  # it is the reader's, and the thread is everybody's
            self.cancelled = True

    def cancel(self) -> None:
        """Let the engine drop it before its next step."""
        self.cancelled = True


class Stream(Iterator[str]):
    """An iterator over pieces of generated text, as a `Generation` is. The engine goes on whether it is read or not.

    `finish_reason` is None while it runs, then `end`, `stop`, `length` or `context` as for a generation, or
    `cancelled`. A stream that nobody refers to any more is cancelled. Iterating raises the error that ended this
    request, or the engine.
    """

    def __init__(self, request: Request, answer: Answer, neurons: int) -> None:
        self._request, self._answer, self._neurons = request, answer, neurons
        self.session: object = None
        weakref.finalize(self, request.cancel).atexit = False

    def __next__(self) -> str:
        piece = self._request.pieces.get()
        if isinstance(piece, Piece):
            return piece.text
        self._request.pieces.put(piece)  # for whoever asks again
        if piece is None:
            raise StopIteration
        raise piece

    def listen(self, notify: Callable[[], object]) -> None:
        """Have a function called when something has come, by the engine's thread, which must not wait; and once now.

        It must not refer to the stream, which would then never be dropped.
        """
        self._request.notify = notify
        notify()

    def news(self) -> News:
        """What has come since the last call, without waiting. For those who `listen`, in place of iterating."""
        texts, tokens = [], 0
        try:
            while isinstance(piece := self._request.pieces.get_nowait(), Piece):
                texts.append(piece.text)
                tokens = piece.tokens
        except Empty:
            return News("".join(texts), tokens, False, None)
        self._request.pieces.put(piece)  # for whoever asks again
        return News("".join(texts), len(self.token_ids), True, piece)

    @property
    def is_running(self) -> bool:
        """Whether it has a slot, and neither waits for one nor has ended."""
        return self._request.cache is not None

    @property
    def chars(self) -> int:
        """Characters of text up to now, read or not."""
        return self._request.chars

    @property
    def finish_reason(self) -> str | None:
        """Why the text ended; None while it runs, or where an error ended it."""
        return self._answer.finish_reason

    @property
    def token_ids(self) -> list[int]:
        """The tokens generated up to now."""
        return self._answer.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens generated up to now, if they were asked for."""
        return self._answer.logprobs

    @property
    def ending(self) -> TokenLogprobs | None:
        """The log-probability of the token that ended the text and is no part of it, if they were asked for."""
        return self._answer.ending

    @property
    def seed(self) -> int | None:
        """The seed of its draws: with it the same text comes again. None where it is greedy."""
        return self._answer.seed

    @property
    def stats(self) -> Stats:
        """The figures up to now. Seconds are those of the steps it was part of, the others' work included."""
        return self._answer.stats(self._neurons)

    def cancel(self) -> None:
        """End it before the engine's next step; its memory is free then. Does nothing once it has ended."""
        self._request.cancel()


class Scores:
    """Log-probabilities of a prompt that are being computed. Scores that nobody refers to any more are cancelled."""

    def __init__(self, request: Request, scoring: Scoring) -> None:
        self._request, self._scoring = request, scoring
        weakref.finalize(self, request.cancel).atexit = False

    def result(self) -> list[TokenLogprobs]:
        """Wait for them; raises the error that ended this request, or the engine. Of cancelled ones those found."""
        end = self._request.pieces.get()
        self._request.pieces.put(end)  # for whoever asks again
        if isinstance(end, BaseException):
            raise end
        return self._scoring.logprobs

    def listen(self, notify: Callable[[], object]) -> None:
        """Have a function called by the engine's thread when `result` no longer waits; and once now."""
        self._request.notify = notify
        notify()

    @property
    def done(self) -> bool:
        """Whether `result` no longer waits."""
        return not self._request.pieces.empty()

    def cancel(self) -> None:
        """End it before the engine's next step. Does nothing once it has ended."""
        self._request.cancel()
