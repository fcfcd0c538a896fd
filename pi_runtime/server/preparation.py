"""Preparing: requests are read, checked and tokenized by a few threads, on which clients take turns.

What waits for a thread waits on the event loop, so a request whose client leaves is dropped at once, with its body. One
client has all threads but one at most, however much it sends: the last one is for somebody else. One whose requests
take long has a single one: much of their work is done by one process for all, the template's, where others wait for it.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from pi_runtime.server.errors import ApiError, refused

T = TypeVar("T")

WORKERS = 4
"""Threads that prepare requests."""
MOST_OF_ONE = WORKERS - 1
"""Threads that one client has at once."""
SLOW_S = 0.5
"""Mean time of a client's latest requests above which it has one thread at a time."""
LATEST = 0.3
"""Weight of the latest request in this mean."""
REMEMBERED = 1000
"""Clients whose mean is known."""


class Preparation:
    """A few threads that prepare requests. Everything but their work belongs to the event loop's thread."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="pi-prepare")
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those who wait, by client; the client whose turn is next comes first."""
        self._busy: Counter[str] = Counter()
        """Threads that work, by client."""
        self._mean_s: OrderedDict[str, float] = OrderedDict()
        """Mean time of their latest requests; the client that was served last comes last."""

    @property
    def waiting(self) -> int:
        """Requests that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def run(self, client: str, call: Callable[[], T]) -> T:
        """Let a thread do something that takes long. Raises ApiError for every error, and where it takes too long."""
        began = False
        try:
            async with asyncio.timeout(self._limit_s):
                await self._thread(client)
                began = True
                return await self._work(client, call)
        except TimeoutError:
            if not began:
                raise ApiError(
                    429, "the server is busy preparing requests", code="queue_full", headers={"Retry-After": "5"}
                ) from None
            said = f"the request could not be prepared within {self._limit_s:g} s"
            raise ApiError(400, said, code="too_complex") from None
        except Exception as error:
            raise refused(error) from error

    def close(self) -> None:
        """Begin no further work. Nobody waits for what goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _thread(self, client: str) -> None:
        """Wait until a thread is free for a client."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(client, turn)
            else:
                self._end(client)  # it had just been handed out
            raise

    async def _work(self, client: str, call: Callable[[], T]) -> T:
        loop, began = asyncio.get_running_loop(), time.monotonic()

        def end(_: object) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._end, client, time.monotonic() - began)

        done = self._pool.submit(call)
        # Whoever waits may leave before: the thread is busy all the same.
        done.add_done_callback(end)
        return await asyncio.wrap_future(done)

    def _hand_out(self) -> None:
        """Give free threads to those whose turn it is."""
        while self._busy.total() < WORKERS:
            client = next((client for client in self._waiting if self._busy[client] < self._most_of(client)), None)
            if client is None:
                return
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind the other clients
            if not turn.cancelled():  # else whoever waited has left, and has not noticed yet
                self._busy[client] += 1
                turn.set_result(None)

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(client, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[client]

    def _most_of(self, client: str) -> int:
        """Threads that a client may have at once."""
        return 1 if self._mean_s.get(client, 0.0) > SLOW_S else MOST_OF_ONE

    def _end(self, client: str, seconds: float | None = None) -> None:
        if seconds is not None:
            mean = self._mean_s.pop(client, 0.0)
            self._mean_s[client] = mean + LATEST * (seconds - mean)
            while len(self._mean_s) > REMEMBERED:
                self._mean_s.popitem(last=False)
        self._busy[client] -= 1
        if not self._busy[client]:
            del self._busy[client]
        self._hand_out()
