"""Sessions that are paused: their pages are kept, written to disk, or dropped, whatever wastes least.

While memory suffices all pages are kept. When a request needs some, the waste of each way is memory × expected time
(Abhyankar et al. 2024, InferCept): a paused session of b bytes, beside running requests of B bytes,

    kept       b × the rest of its pause
    on disk    (b + B) × the time to write and read it
    dropped    (b + B) × the time to compute it again

All times are measured: pauses, the disk, and what a token of a prompt and one of an answer take. A pause is expected to
go on for as long as it has lasted, or as others last. So the decision turns while time goes by; `turns_at` says when.
"""

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pi_runtime.engine.memory import EngineMemory
from pi_runtime.engine.sessions import session_file
from pi_runtime.engine.sessions.session_file import read_pages, write_pages
from pi_runtime.engine.stream import Pause, Turns
from pi_runtime.execution.kv_cache import KVCache, common_length, pages_of

LATEST = 0.2
"""Weight of the latest measurement."""


class Measured:
    """A figure that follows its latest measurements."""

    def __init__(self, assumed: float) -> None:
        self.value, self._is_assumed = assumed, True

    def count(self, value: float) -> None:
        """Count a measurement; the first replaces what was assumed."""
        self.value = value if self._is_assumed else self.value + LATEST * (value - self.value)
        self._is_assumed = False


class _Way(NamedTuple):
    """What it takes to give up the pages of a session."""

    turns: Turns
    pause: Pause
    worth_s: float
    """Keeping them for so long wastes as much."""
    to_disk: bool


class PausedSessions:
    """Keeps the pages of paused sessions, and gives them up for others. Belongs to the engine's thread."""

    def __init__(self, memory: EngineMemory) -> None:
        self._memory, self.clock = memory, time.perf_counter
        self._turns: dict[Turns, None] = {}
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
        """The caches that are kept."""
        return [t.pause.cache for t in self._turns if t.pause is not None and t.pause.cache is not None]

    @property
    def count(self) -> int:
        """How many sessions are paused."""
        return len(self._turns)

    def pause(self, turns: Turns, cache: KVCache | None) -> None:
        """Keep the cache of a session; None where there is none."""
        turns.pause = Pause(self.clock(), cache=cache)
        if cache is not None:
            cache.truncate(cache.length)  # releases what was reserved behind
            turns.pause.tokens, turns.pause.selected = cache.tokens, cache.selected
        self._turns[turns] = None

    def restore(self, turns: Turns, file: Path, tokens: Sequence[int], selected: Sequence[bool]) -> None:
        """Begin with a session whose first positions a file holds, which is deleted when it is no longer needed."""
        turns.pause = Pause(self.clock(), tuple(tokens), tuple(selected), file=file)
        self._turns[turns] = None

    def save(self, turns: Turns, path: Path, run: Mapping[str, str]) -> None:
        """Write a session to a file: its tokens, and what is kept of their pages. `run` is as `session_file.save` says.

        What is kept stays as it is, of a draft that was read ahead too.
        """
        text, pause, pool = (turns.tokens, turns.selected), turns.pause, self._memory.pool
        held = 0 if pause is None else common_length(pause.tokens, turns.tokens)
        if pause is not None and pause.cache is not None:
            session_file.save(path, run, text, held, map(pool.values, pause.cache.pages))
        elif pause is not None and pause.file is not None and pause.file.exists():
            with pause.file.open("rb") as file:
                session_file.save(path, run, text, held, session_file.stored_pages(file, pool))
        else:
            session_file.save(path, run, text, 0, ())

    def new_file(self) -> Path:
        """A path in a folder of this engine's own."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="pi-sessions-", ignore_cleanup_errors=True)
        self._files += 1
        return Path(self._folder.name) / str(self._files)

    def resume(
        self, turns: Turns, tokens: Sequence[int], selected: Sequence[bool], live: Sequence[KVCache], *, whole: bool
    ) -> KVCache | None:
        """A cache with pages for these tokens, with what is kept of them; None where there are too few pages.

        The last token is never among what it holds, unless `whole`.
        """
        pause = turns.pause
        wanted = tokens if whole else tokens[:-1]
        if pause is None or (pause.cache is None and pause.file is None):
            cache = self._memory.open(tokens, selected, len(wanted), live, turns.salt)
        else:
            cache = pause.cache if pause.cache is not None else self._read(pause, len(tokens), turns.salt)
            if cache is None:
                return None
            cache.truncate(common_length(pause.tokens, wanted))
            pause.tokens, pause.selected = cache.tokens, cache.selected
            pause.cache = cache
            if not self._memory.grow(cache, len(tokens) - cache.length):
                return None
        if cache is not None:
            if pause is not None and not whole:
                self.pause_s.count(self.clock() - pause.began)
            self._forget(turns)
        return cache

    def give_up(self, running: Sequence[KVCache], besides: Turns | None = None, *, must: bool) -> bool:
        """Give up the pages of the session for which that wastes least; False where keeping all wastes less.

        With `must`, one is given up if there is any; `besides` only if there is no other.
        """
        ways = [way for way in self._ways(running) if must or way.turns is not besides]
        wastes = [way.worth_s - max(self.pause_s.value, self.clock() - way.pause.began) for way in ways]
        # Of a session that is to go on only if there is no other.
        best = min(range(len(ways)), key=lambda n: (ways[n].turns is besides, wastes[n]), default=None)
        if best is None or not (must or wastes[best] < 0):
            return False
        self._release(ways[best].pause, to_disk=ways[best].to_disk)
        return True

    def turns_at(self, running: Sequence[KVCache], besides: Turns | None = None) -> float:
        """The time of `clock` from which keeping a session wastes more than giving it up; infinite if none does."""
        ways = (way for way in self._ways(running) if way.turns is not besides)
        return min((way.pause.began + way.worth_s for way in ways), default=float("inf"))

    def _ways(self, running: Sequence[KVCache]) -> Iterator[_Way]:
        """What it takes to give up each session that holds pages."""
        page = self._memory.pool.page_nbytes
        others = page * len({p for cache in running for p in cache.held_pages})
        holders = Counter(p for cache in [*running, *self.caches] for p in cache.held_pages)
        for turns in self._turns:
            pause = turns.pause
            if pause is None or pause.cache is None or not pause.cache.held_pages:
                continue
            held = pause.cache.held_pages
            # Pages that others hold too are not won; those that only the prefix tree holds too are.
            own = page * sum(holders[p] == 1 for p in held)
            answered = sum(pause.selected)
            again_s = answered * self.selected_s.value + (len(pause.selected) - answered) * self.dense_s.value
            disk_s = page * len(held) * self.disk_s.value
            worth_s = (own + others) * min(disk_s, again_s) / own if own else float("inf")
            yield _Way(turns, pause, worth_s, to_disk=disk_s < again_s)

    def forget(self, turns: Turns) -> None:
        """Drop what is kept of a session; the prefix tree keeps its pages until memory is short."""
        if turns.pause is not None and turns.pause.cache is not None:
            self._memory.keep(turns.pause.cache)
        self._forget(turns)

    def close(self) -> None:
        """Drop everything."""
        for turns in tuple(self._turns):
            if turns.pause is not None and turns.pause.cache is not None:
                turns.pause.cache.close()
            self._forget(turns)
        if self._folder is not None:
            self._folder.cleanup()

    def _forget(self, turns: Turns) -> None:
        self._turns.pop(turns, None)
        if turns.pause is not None:
            self._remove(turns.pause)
        turns.pause = None

    def _release(self, pause: Pause, *, to_disk: bool) -> None:
        """Give up the pages of a session."""
        cache = pause.cache
        assert cache is not None
        if to_disk:
            try:
                pause.file, began = self.new_file(), time.perf_counter()
                with pause.file.open("wb") as out:
                    nbytes = write_pages(out, map(cache.pool.values, cache.pages), cache.length)
            except OSError:  # a full disk, or no folder for files: the tokens are computed again instead
                self._remove(pause)
            else:
                # Reading takes about as long again.
                self.disk_s.count(2 * (time.perf_counter() - began) / nbytes)
        self.written += pause.file is not None
        self.dropped += pause.file is None
        if pause.file is None:
            self._memory.keep(cache)
        cache.close()
        pause.cache = None

    def _read(self, pause: Pause, positions: int, salt: str) -> KVCache | None:
        """A cache for so many positions with what a file holds; None where there are too few pages.

        Where the file cannot be read, the cache holds nothing.
        """
        assert pause.file is not None
        cache = self._memory.new_cache(salt)
        if not self._memory.grow(cache, max(positions, len(pause.tokens))):
            return None
        try:
            with pause.file.open("rb") as file:
                read_pages(file, cache, pages_of(len(pause.tokens)))
        except OSError:
            pass
        else:
            cache.count_held(pause.tokens, pause.selected)
        self._remove(pause)
        return cache

    def _remove(self, pause: Pause) -> None:
        if pause.file is not None:
            with contextlib.suppress(OSError):
                pause.file.unlink()
        pause.file = None
