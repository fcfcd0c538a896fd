"""Where an engine's requests get their caches from: its memory, of which paused sessions hold a part."""

import math

from pi_runtime.engine.memory import EngineMemory
from pi_runtime.engine.request import ScheduledRequest, SessionState
from pi_runtime.engine.scheduler import Scheduler
from pi_runtime.engine.sessions.suspended import SuspendedSessions
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sequence.sequence import ReadSequence, Status

MEASURED_TOKENS = 8
"""Least tokens of a step that says what a token of a prompt takes."""


class EngineCaches:
    """Caches in the memory of an engine. Paused sessions give up theirs where that costs least."""

    def __init__(
        self,
        memory: EngineMemory,
        sessions: SuspendedSessions,
        scheduler: Scheduler[ScheduledRequest],
        context: int,
        block_tokens: int,
    ) -> None:
        self._memory, self._sessions, self._scheduler = memory, sessions, scheduler
        self._context, self._block_tokens = context, block_tokens
        self._full_until = -math.inf
        """The time of the sessions' clock until which the first of those that wait finds too little memory."""

    @property
    def _running(self) -> list[KVCache]:
        """The caches of the requests that have joined."""
        return [request.cache for request in self._scheduler.live if request.cache is not None]

    @property
    def may_open(self) -> bool:
        """Whether memory was given back, or a session's is worth less, since there was too little."""
        return self._sessions.clock() >= self._full_until

    def open(self, request: ScheduledRequest) -> KVCache | None:
        """A cache for a request that may join; paused sessions are evicted for it where that costs least."""
        sequence, session, ahead = request.sequence, request.session, request.reads_ahead
        tokens, selected, running = sequence.tokens, sequence.selected, self._running
        while True:
            # The newest token of a paused session runs only if all before it are still there.
            if ahead and session is not None and len(tokens) == len(session.tokens) and not session.holds_cache:
                return None
            live = [*running, *self._sessions.caches]
            if session is None:
                cache = self._memory.open(tokens, selected, sequence.num_reusable, live, request.salt)
            else:
                cache = self._sessions.resume(session, tokens, selected, live, whole=ahead)
            if cache is not None:
                return cache
            if not self._sessions.evict(running, session, must=not running and not ahead):
                break
        if not ahead:
            assert running, "a request that fits alone finds no room though nothing runs"
            self._full_until = self._sessions.evicts_at(running, session)
        return None

    def grow(self, cache: KVCache, count: int) -> bool:
        """Give a cache pages for so many further positions; paused sessions are evicted for it."""
        while not self._memory.grow(cache, count):
            if not self._sessions.evict(self._running, must=True):
                return False
        return True

    def grow_freely(self, cache: KVCache, count: int) -> bool:
        """Give a cache pages for so many further positions if they are free."""
        return self._memory.grow_freely(cache, count)

    def catch_up(self, cache: KVCache, request: ScheduledRequest) -> None:
        """Take the full pages that others have stored of a request's tokens meanwhile."""
        sequence = request.sequence
        self._memory.catch_up(cache, sequence.tokens, sequence.selected, sequence.num_reusable)

    def share(self, cache: KVCache) -> None:
        """Let later requests begin with the full pages of a cache, which goes on."""
        self._memory.share(cache)

    def keep(self, cache: KVCache) -> None:
        """Close a cache, and let later requests begin with what it held."""
        self._memory.keep(cache)

    def release(self, request: ScheduledRequest) -> ScheduledRequest | None:
        """Keep the pages of a request that ends, for later ones or for its session."""
        self._full_until = -math.inf
        sequence, session = request.sequence, request.session
        if session is None:
            if request.cache is not None:
                self._memory.keep(request.cache)
            return None
        if sequence.status is not Status.WAITING:
            self._sessions.suspend(session, request.cache)
        if not request.reads_ahead:
            session.tokens, session.selected = sequence.tokens, sequence.selected
        if session.is_closed:
            self._sessions.forget(session)
            return None
        return None if request.reads_ahead or sequence.finish_reason is None else self._newest_of(session)

    def forget(self, session: SessionState) -> None:
        """Drop what is kept of a session that nobody will continue."""
        self._sessions.forget(session)
        self._full_until = -math.inf

    def close(self) -> None:
        """Give all memory back."""
        self._sessions.close()
        self._memory.close()

    def count_step(self, tokens: int, seconds: float, *, decoding: bool) -> None:
        """Count what tokens of one kind took: it says what it costs to compute a session's again."""
        if decoding:
            self._sessions.selected_s.count(seconds / tokens)
        elif tokens >= MEASURED_TOKENS:
            self._sessions.dense_s.count(seconds / tokens)

    def _newest_of(self, session: SessionState) -> ScheduledRequest | None:
        """A request for a paused session's newest token, which no step has run yet, so that only new ones are left."""
        kept = session.suspended
        if kept is None or not len(kept.tokens) + 1 == len(session.tokens) < self._context:
            return None
        return ScheduledRequest(ReadSequence(session.tokens, session.selected), self._block_tokens, session)
