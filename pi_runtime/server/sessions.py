"""The sessions of a server: which there are, whose turn it is, and when one that nobody uses is dropped.

Everything here belongs to the event loop's thread; what takes long goes to the service's threads.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pi_runtime.engine.sessions.session import Session
from pi_runtime.server.api.served import new_id
from pi_runtime.server.api.sessions import State
from pi_runtime.server.errors import ApiError
from pi_runtime.server.in_flight import InFlight

REMEMBERED = 1000
"""Sessions that are no more, of which it is still known why."""


class ServedSession:
    """One session of the server: whose it is, and what it does at present."""

    def __init__(self, owner: str, session: Session, defaults: Mapping[str, Any]) -> None:
        self.id, self.created = new_id("session_"), int(time.time())
        self.owner = owner
        """The owner of its key: for all others it is not there."""
        self.session, self.defaults = session, defaults
        self.turn: InFlight | None = None
        """The turn that is being answered."""
        self.is_paused = False
        """Whether the latest turn ended with a stop token."""
        self.lock = asyncio.Lock()
        """Held while something changes the session; what is typed fast waits for it."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> State:
        """Whether the session answers, is paused, or is idle."""
        if self.turn is not None:
            return "answering"
        return "paused" if self.is_paused else "idle"

    def check_idle(self) -> None:
        """Raise ApiError (409) while a turn is being answered."""
        if self.turn is not None:
            raise ApiError(
                409, "the session is still answering: read its answer to the end, or leave it", code="session_busy"
            )


class Sessions:
    """All sessions of a server, by their ids. At most `most`, and `most_each` of one owner; one that is idle so long
    is dropped."""

    def __init__(self, most: int, most_each: int, idle_s: float) -> None:
        self._most, self._most_each, self.idle_s = most, most_each, idle_s
        self._entries: dict[str, ServedSession] = {}
        self._gone: OrderedDict[tuple[str, str], str] = OrderedDict()
        """Why sessions are no more, by owner and id."""

    def of(self, owner: str) -> list[ServedSession]:
        """The sessions of an owner, the oldest first."""
        return [session for session in self._entries.values() if session.owner == owner]

    def check_room(self, owner: str) -> None:
        """Raise ApiError (429) where there are as many as there may be, of all or of this owner."""
        if len(self.of(owner)) >= self._most_each:
            raise _too_many(f"you hold {self._most_each} sessions, which is the most; delete one")
        if len(self._entries) >= self._most:
            raise _too_many(f"the server holds {self._most} sessions, which is the most")

    def add(self, session: ServedSession) -> None:
        """Keep a session. Raises ApiError (429) where there is no room."""
        self.check_room(session.owner)
        self._entries[session.id] = session
        self.touch(session)

    def find(self, session_id: str, owner: str) -> ServedSession:
        """An owner's session. Raises ApiError (404), which says to its owner what became of it where that is known."""
        session = self._entries.get(session_id)
        if session is None or session.owner != owner:
            why = self._gone.get((owner, session_id), f"there is no session {session_id[:80]!r}")
            raise ApiError(404, why, code="session_not_found")
        return session

    def touch(self, session: ServedSession) -> None:
        """Begin to count the idle time of a session anew."""
        if session.timer is not None:
            session.timer.cancel()
        if session.id in self._entries:
            session.timer = asyncio.get_running_loop().call_later(self.idle_s, self._expire, session)

    def remove(self, session: ServedSession, why: str) -> None:
        """End a session and the turn that is being answered, and remember why."""
        del self._entries[session.id]
        self._gone[session.owner, session.id] = why
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        if session.timer is not None:
            session.timer.cancel()
        if session.turn is not None:
            session.turn.fail(ApiError(409, why, code="session_deleted"))
        session.session.close()

    def _expire(self, session: ServedSession) -> None:
        if session.turn is not None or session.lock.locked():
            self.touch(session)
        else:
            self.remove(session, f"the session was dropped: nobody used it for {self.idle_s:g} s")

    @asynccontextmanager
    async def changing(self, session: ServedSession) -> AsyncIterator[None]:
        """Lock a session for as long as the block runs. Raises ApiError (409) while a turn is being answered."""
        session.check_idle()
        async with session.lock:
            self.find(session.id, session.owner)
            session.check_idle()
            try:
                yield
            finally:
                self.touch(session)


def _too_many(said: str) -> ApiError:
    return ApiError(429, said, code="too_many_sessions", headers={"Retry-After": "5"})
