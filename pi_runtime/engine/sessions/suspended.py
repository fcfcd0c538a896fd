"""Sessions that are paused: their pages are kept, written to disk, or dropped, whatever costs least.

While memory suffices all pages are kept. When a request needs some, the cost of each choice is memory × expected time
(Abhyankar et al. 2024, InferCept): a paused session of b bytes, beside running requests of B bytes,

    kept       b × the rest of its pause
    on disk    (b + B) × the time to write and read it
    dropped    (b + B) × the time to compute it again

All times are measured: pauses, the disk, and what a token of a prompt and one of an answer take. A pause is expected to
go on for as long as it has lasted, or as others last. So the decision turns while time goes by; `evicts_at` says when.
"""

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pi_runtime.engine.memory import EngineMemory
from pi_runtime.engine.session_state import SessionState, SuspendedKV
from pi_runtime.engine.sessions import session_file
from pi_runtime.engine.sessions.session_file import Page, pages_of_cache, pages_of_file, read_pages, write_pages
from pi_runtime.execution.kv_cache import KVCache, common_length

LATEST = 0.2
"""Weight of the latest measurement."""


class Measured:
    """A running average of measurements, which begins with an assumed value."""

    def __init__(self, assumed: float) -> None:
        self.value, self._is_assumed = assumed, True

    def count(self, value: float) -> None:
        """Count a measurement; the first replaces what was assumed."""
        self.value = value if self._is_assumed else self.value + LATEST * (value - self.value)
        self._is_assumed = False


class _Eviction(NamedTuple):
    """What it takes to evict the pages of a session."""

    session: SessionState
    kept: SuspendedKV
    worth_s: float
    """Keeping them for so long costs as much."""
    to_disk: bool


class SuspendedSessions:
    """Keeps the pages of paused sessions, and evicts them for others. Belongs to the engine's thread."""

    def __init__(self, memory: EngineMemory) -> None:
        self._memory, self.clock = memory, time.perf_counter
        self._paused: dict[SessionState, None] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0
        self.pause_s = Measured(1.0)
        self.dense_s, self.selected_s = Measured(0.01), Measured(0.05)
        """Seconds of a token of a prompt, and of one of an answer."""
        self.disk_s = Measured(4e-9)
        """Seconds to write and read a byte."""
        self.written = self.dropped = 0

    @property
    def caches(self) -> list[KVCache]:
        """The caches of paused sessions that are in memory."""
        return [s.suspended.cache for s in self._paused if s.suspended is not None and s.suspended.cache is not None]

    @property
    def count(self) -> int:
        """How many sessions are paused."""
        return len(self._paused)

    def suspend(self, session: SessionState, cache: KVCache | None) -> None:
        """Keep the cache of a session; None where there is none."""
        session.suspended = SuspendedKV(self.clock(), cache=cache)
        if cache is not None:
            cache.truncate(cache.length)  # releases what was reserved behind
            session.suspended.tokens, session.suspended.selected = cache.tokens, cache.selected
        self._paused[session] = None

    def restore(self, session: SessionState, stored: session_file.StoredSession) -> None:
        """Begin with a session that was loaded. What was computed of it goes to a file until it goes on."""
        if held := stored.held:
            file = self._new_file()
            file.write_bytes(stored.pages.data)
            tokens, selected = tuple(stored.tokens[:held]), tuple(stored.selected[:held])
            session.suspended = SuspendedKV(self.clock(), tokens, selected, file=file)
            self._paused[session] = None

    def save(self, session: SessionState, path: Path, run: Mapping[str, str]) -> None:
        """Write a session to a file: its tokens, and what is kept of their pages. `run` is as `session_file.save` says.

        What is kept stays as it is, of a draft that was read ahead too.
        """
        text, kept, classes = (session.tokens, session.selected), session.suspended, self._memory.pool.classes
        held = 0 if kept is None else self._held(kept, session.tokens)
        if kept is not None and kept.cache is not None:
            session_file.save(path, run, text, held, classes, pages_of_cache(kept.cache))
        elif kept is not None and kept.file is not None and kept.file.exists():
            with kept.file.open("rb") as file:
                pages = pages_of_file(file, classes, len(kept.tokens))
                session_file.save(path, run, text, held, classes, pages)
        else:
            session_file.save(path, run, text, 0, classes, _no_page)

    def _held(self, kept: SuspendedKV, tokens: Sequence[int]) -> int:
        """How many of these tokens what is kept can go on from: 0 where a window's pages are gone."""
        length = common_length(kept.tokens, tokens)
        if kept.cache is not None:
            return length if kept.cache.holds(length) else 0
        stored = ((one.first_page(len(kept.tokens)), one.first_page(length)) for one in self._memory.pool.classes)
        return length if all(first == wanted for first, wanted in stored) else 0

    def _new_file(self) -> Path:
        """A path in a folder of this engine's own."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="pi-sessions-", ignore_cleanup_errors=True)
        self._files += 1
        return Path(self._folder.name) / str(self._files)

    def resume(
        self,
        session: SessionState,
        tokens: Sequence[int],
        selected: Sequence[bool],
        live: Sequence[KVCache],
        *,
        whole: bool,
    ) -> KVCache | None:
        """A cache with pages for these tokens, with what is kept of them; None where there are too few pages.

        The last token is never among what it holds, unless `whole`.
        """
        kept = session.suspended
        wanted = tokens if whole else tokens[:-1]
        if kept is not None and self._held(kept, wanted) < common_length(kept.tokens, wanted):
            # A window's pages are gone: the prefix tree may have more.
            self._drop(kept)
        if kept is None or (kept.cache is None and kept.file is None):
            cache = self._memory.open(tokens, selected, len(wanted), live, session.salt)
        else:
            cache = kept.cache if kept.cache is not None else self._read(kept, len(tokens), session.salt)
            if cache is None:
                return None
            cache.truncate(common_length(kept.tokens, wanted))
            kept.tokens, kept.selected = cache.tokens, cache.selected
            kept.cache = cache
            if not self._memory.grow(cache, len(tokens) - cache.length):
                return None
        if cache is not None:
            if kept is not None and not whole:
                self.pause_s.count(self.clock() - kept.began)
            self._forget(session)
        return cache

    def evict(self, running: Sequence[KVCache], besides: SessionState | None = None, *, must: bool) -> bool:
        """Give up the pages of the session for which that costs least; False where keeping all costs less.

        With `must`, one is evicted if there is any; `besides` only if there is no other.
        """
        evictions = [e for e in self._evictions(running) if must or e.session is not besides]
        costs = [e.worth_s - max(self.pause_s.value, self.clock() - e.kept.began) for e in evictions]
        # Of a session that is to go on only if there is no other.
        best = min(range(len(evictions)), key=lambda n: (evictions[n].session is besides, costs[n]), default=None)
        if best is None or not (must or costs[best] < 0):
            return False
        self._release(evictions[best].kept, to_disk=evictions[best].to_disk)
        return True

    def evicts_at(self, running: Sequence[KVCache], besides: SessionState | None = None) -> float:
        """The time of `clock` from which keeping a session costs more than giving it up; infinite if none does."""
        evictions = (e for e in self._evictions(running) if e.session is not besides)
        return min((e.kept.began + e.worth_s for e in evictions), default=float("inf"))

    def _evictions(self, running: Sequence[KVCache]) -> Iterator[_Eviction]:
        """What it takes to evict each session that holds pages."""
        pool = self._memory.pool
        others = pool.nbytes({p for cache in running for p in cache.held_pages})
        holders = Counter(p for cache in [*running, *self.caches] for p in cache.held_pages)
        for session in self._paused:
            kept = session.suspended
            if kept is None or kept.cache is None or not kept.cache.held_pages:
                continue
            held = kept.cache.held_pages
            # Pages that others hold too are not won; those that only the prefix tree holds too are.
            own = pool.nbytes(p for p in held if holders[p] == 1)
            answered = sum(kept.selected)
            again_s = answered * self.selected_s.value + (len(kept.selected) - answered) * self.dense_s.value
            disk_s = pool.nbytes(held) * self.disk_s.value
            worth_s = (own + others) * min(disk_s, again_s) / own if own else float("inf")
            yield _Eviction(session, kept, worth_s, to_disk=disk_s < again_s)

    def forget(self, session: SessionState) -> None:
        """Drop what is kept of a session; the prefix tree keeps its pages until memory is short."""
        if session.suspended is not None:
            self._drop(session.suspended)
        self._forget(session)

    def close(self) -> None:
        """Drop everything."""
        for session in tuple(self._paused):
            if session.suspended is not None and session.suspended.cache is not None:
                session.suspended.cache.close()
            self._forget(session)
        if self._folder is not None:
            self._folder.cleanup()

    def _forget(self, session: SessionState) -> None:
        self._paused.pop(session, None)
        if session.suspended is not None:
            self._remove(session.suspended)
        session.suspended = None

    def _release(self, kept: SuspendedKV, *, to_disk: bool) -> None:
        """Give up the pages of a session."""
        cache = kept.cache
        assert cache is not None
        if to_disk:
            try:
                kept.file, began = self._new_file(), time.perf_counter()
                with kept.file.open("wb") as out:
                    nbytes = write_pages(out, cache.pool.classes, pages_of_cache(cache), cache.length)
            except OSError:  # a full disk, or no folder for files: the tokens are computed again instead
                self._remove(kept)
            else:
                # Reading takes about as long again.
                self.disk_s.count(2 * (time.perf_counter() - began) / max(1, nbytes))
        self.written += kept.file is not None
        self.dropped += kept.file is None
        if kept.file is None:
            self._drop(kept)
        cache.close()
        kept.cache = None

    def _drop(self, kept: SuspendedKV) -> None:
        """Drop what is kept; the prefix tree takes the pages."""
        if kept.cache is not None:
            self._memory.keep(kept.cache)
        kept.cache = None
        self._remove(kept)

    def _read(self, kept: SuspendedKV, positions: int, salt: str) -> KVCache | None:
        """A cache for so many positions with what a file holds; None where there are too few pages.

        Where the file cannot be read, the cache holds nothing.
        """
        assert kept.file is not None
        cache = self._memory.new_cache(salt)
        cache.begin(kept.tokens, kept.selected)
        if not self._memory.grow(cache, max(0, positions - len(kept.tokens))):
            return None
        try:
            with kept.file.open("rb") as file:
                read_pages(file, cache)
        except OSError:
            cache.close()
        self._remove(kept)
        return cache

    def _remove(self, kept: SuspendedKV) -> None:
        if kept.file is not None:
            with contextlib.suppress(OSError):
                kept.file.unlink()
        kept.file = None


def _no_page(kind: int, place: int) -> Page:
    """The pages of a session of which nothing is kept: none is asked for."""
    raise AssertionError((kind, place))
