"""Where an engine's sequences get their caches from: its memory, of which paused sessions hold a part."""

import math

from pi_runtime.engine.core import Caches
from pi_runtime.engine.memory import EngineMemory
from pi_runtime.engine.session_state import SessionState
from pi_runtime.engine.sessions.suspended import SuspendedSessions
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sequence.sequence import ReadSequence, Status, TokenSequence

MEASURED_TOKENS = 8
"""Least tokens of a step that says what a token of a prompt takes."""


class EngineCaches(Caches):
    """Caches in the memory of an engine. Paused sessions give up theirs where that costs least."""

    def __init__(self, memory: EngineMemory, sessions: SuspendedSessions, context: int) -> None:
        super().__init__()
        self._memory, self._sessions, self._context = memory, sessions, context
        self._full_until = -math.inf
        """The time of the sessions' clock until which the first of those that wait finds too little memory."""

    @property
    def may_open(self) -> bool:
        """Whether `open` may succeed: since it failed memory came back, or a paused session became cheap to give up."""
        return self._sessions.clock() >= self._full_until

    def open(self, sequence: TokenSequence) -> KVCache | None:
        """A cache for a sequence that may join; paused sessions are evicted for it where that costs least."""
        session, ahead = _session_of(sequence), sequence.reads_ahead
        tokens, selected, running = sequence.tokens, sequence.selected, [*self.held.values()]
        while True:
            # The newest token of a paused session runs only if all before it are still there.
            if ahead and session is not None and len(tokens) == len(session.tokens) and not session.holds_cache:
                return None
            live = [*running, *self._sessions.caches]
            if session is None:
                cache = self._memory.open(tokens, selected, sequence.num_reusable, live, sequence.origin.salt)
            else:
                cache = self._sessions.resume(session, tokens, selected, live, whole=ahead)
            if cache is not None:
                return cache
            if not self._sessions.evict(running, session, must=not running and not ahead):
                break
        if not ahead:
            assert running, "a sequence that fits alone finds no room though nothing runs"
            self._full_until = self._sessions.evicts_at(running, session)
        return None

    def grow(self, cache: KVCache, count: int) -> bool:
        """Give a cache pages for so many further positions; paused sessions are evicted for it."""
        while not self._memory.grow(cache, count):
            if not self._sessions.evict([*self.held.values()], must=True):
                return False
        return True

    def grow_freely(self, cache: KVCache, count: int) -> bool:
        """Give a cache pages for so many further positions if they are free."""
        return self._memory.grow_freely(cache, count)

    def catch_up(self, sequence: TokenSequence) -> None:
        """Take the full pages that others have stored of a sequence's tokens meanwhile."""
        self._memory.catch_up(self.held[sequence], sequence.tokens, sequence.selected, sequence.num_reusable)

    def share(self, cache: KVCache) -> None:
        """Let later sequences begin with the full pages of a cache, which goes on."""
        self._memory.share(cache)

    def keep(self, cache: KVCache) -> None:
        """Close a cache, and let later sequences begin with what it held."""
        self._memory.keep(cache)

    def release(self, sequence: TokenSequence) -> TokenSequence | None:
        """Keep the pages of a sequence that ends, for later ones or for its session."""
        self._full_until = -math.inf
        session, cache = _session_of(sequence), self.held.get(sequence)
        if session is None:
            if cache is not None:
                self._memory.keep(cache)
            return None
        if sequence.status is not Status.WAITING:
            self._sessions.suspend(session, cache)
        if not sequence.reads_ahead:
            session.tokens, session.selected = sequence.tokens, sequence.selected
        if session.is_closed:
            self._sessions.forget(session)
            return None
        return None if sequence.reads_ahead or sequence.finish_reason is None else self._newest_of(session)

    def forget(self, session: SessionState) -> None:
        """Drop what is kept of a session that nobody will continue."""
        self._sessions.forget(session)
        self._full_until = -math.inf

    def close(self) -> None:
        """Give all memory back."""
        for cache in self.held.values():
            cache.close()
        self.held.clear()
        self._sessions.close()
        self._memory.close()

    def count_step(self, tokens: int, seconds: float, *, decoding: bool) -> None:
        """Count what tokens of one kind took: it says what it costs to compute a session's again."""
        if decoding:
            self._sessions.selected_s.count(seconds / tokens)
        elif tokens >= MEASURED_TOKENS:
            self._sessions.dense_s.count(seconds / tokens)

    def _newest_of(self, session: SessionState) -> TokenSequence | None:
        """A sequence that runs the newest token of a paused session ahead of its next turn; None where none is due."""
        kept = session.suspended
        if kept is None or not len(kept.tokens) + 1 == len(session.tokens) < self._context:
            return None
        ahead = ReadSequence(session.tokens, session.selected)
        ahead.origin = session
        return ahead


def _session_of(sequence: TokenSequence) -> SessionState | None:
    """The session that a sequence is part of, if any."""
    return sequence.origin if isinstance(sequence.origin, SessionState) else None
