"""A session: a text that is continued in turns, whose keys and values are kept between them as long as that pays.

Between two turns the session is paused: a tool works, or somebody types. What is typed is read ahead.
"""

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self, Unpack

from pi_runtime.engine.model import Model
from pi_runtime.engine.session_state import SessionState
from pi_runtime.engine.stream import Stream
from pi_runtime.errors import UsageError
from pi_runtime.execution.kv_cache import common_length
from pi_runtime.sequence.sequence import Origin, TokenSequence
from pi_runtime.sequence.settings import AnswerSettings, names_settings

NEXT = (" ", "a", "1", ".", "\n")
"""Beginnings of what may be typed next: a token that stays with each of them is read ahead."""


class Host(Protocol):
    """What a session asks of its engine."""

    model: Model

    def submit(self, sequence: TokenSequence, origin: Origin) -> None:
        """Let a sequence of a session run, in place of what was being read ahead of it."""

    def save_session(self, session: SessionState, path: Path) -> None:
        """Write what is known of a session to a file."""

    def forget(self, session: SessionState) -> None:
        """Drop what is kept of a session."""


class Session:
    """A text that is continued in turns by one engine. Make one with `Engine.session`.

    Its tokens are those that were given and those that were generated, up to the one that completed a stop string.
    Threads that use it take turns. A session that nobody refers to any more is closed.
    """

    def __init__(self, engine: Host, state: SessionState | None = None) -> None:
        self._engine, self._state = engine, SessionState() if state is None else state
        self._draft = ""
        self._lock = threading.RLock()
        self._read: list[int] = []
        """What the engine was asked to read ahead."""
        self._close = weakref.finalize(self, engine.forget, self._state)
        self._close.atexit = False

    @property
    def tokens(self) -> list[int]:
        """All tokens up to now, without what is typed."""
        return list(self._state.tokens)

    @property
    def draft(self) -> str:
        """What has been typed since the last turn."""
        return self._draft

    @names_settings
    def generate(
        self,
        prompt: str | Sequence[int] = (),
        *,
        stop_tokens: Sequence[int] = (),
        **settings: Unpack[AnswerSettings],
    ) -> Stream:
        """Append text or tokens, and generate until a stop string, one of `stop_tokens`, or the end.

        Without a prompt the text goes on where it paused. A token of `stop_tokens` becomes part of the text; one that
        ends a text does not. Raises UsageError while an earlier turn is still being answered.
        """
        with self._lock:
            state = self._idle()
            ids = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
            answer = self._engine.model.new_answer(
                [*state.tokens, *ids], selected=state.selected, stop_tokens=stop_tokens, **settings
            )
            self._engine.submit(answer, state)
            stream = Stream(answer, self._engine.model.executor.neurons)
            stream.session, self._draft = self, ""
            return stream

    def type(self, text: str) -> None:
        """Append to the draft, and let the engine read the tokens of it that no longer change."""
        with self._lock:
            self.edit(self._draft + text)

    def edit(self, text: str, at: int | None = None) -> None:
        """Replace the draft, or what follows its first `at` characters. What begins as before is not read again."""
        with self._lock:
            if at is not None and not 0 <= at <= len(self._draft):
                raise UsageError(f"position {at} of the draft", expected=f"0 to {len(self._draft)}")
            draft = text if at is None else self._draft[:at] + text
            state, stable = self._idle(), self._stable(draft)
            # One position is left for the first token of the answer.
            tokens = [*state.tokens, *stable][: self._engine.model.context - 1]
            self._draft = draft
            if len(tokens) > len(state.tokens) and tokens != self._read:
                self._read = tokens
                self._engine.submit(self._engine.model.new_reading(tokens, state.selected), state)

    @names_settings
    def answer(self, *, stop_tokens: Sequence[int] = (), **settings: Unpack[AnswerSettings]) -> Stream:
        """Append the draft and generate: what `generate` gives for the same text in one piece."""
        with self._lock:
            return self.generate(self._draft, stop_tokens=stop_tokens, **settings)

    def save(self, path: str | Path) -> None:
        """Write tokens, keys and values to a file, for `Engine.load_session`; the draft is not part of it.

        The file is written whole or not at all. Raises UsageError while a turn is being answered.
        """
        with self._lock:
            self._engine.save_session(self._idle(), Path(path))

    def close(self) -> None:
        """Drop what is kept. Does nothing the second time."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _idle(self) -> SessionState:
        """Its state, if no answer is being written."""
        state = self._state
        if state.is_closed:
            raise UsageError("the session is closed")
        sequence = state.sequence
        if sequence is not None and not sequence.reads_ahead and not sequence.done.is_set():
            if sequence.finish_reason is None and not sequence.cancelled:
                raise UsageError("the session is still answering", remedy="read the stream to its end, or cancel it")
            sequence.done.wait()
        return state

    def _encode(self, text: str) -> list[int]:
        """The tokens of a further text; the first of a session begins as every prompt does."""
        return self._engine.model.tokenizer.encode(text, prefix=not self._state.tokens) if text else []

    def _stable(self, draft: str) -> list[int]:
        """The first tokens of a draft, up to the longest suffix that changes with what may follow.

        What follows may still change others with some tokenizers. Then they are read again: a turn is always run on
        the tokens of its whole text.
        """
        ids = self._encode(draft)
        stable = len(ids)
        for more in NEXT if draft else ():
            stable = common_length(ids[:stable], self._encode(draft + more))
        return ids[:stable]
