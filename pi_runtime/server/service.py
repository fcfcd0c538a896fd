"""The engine as an event loop sees it: requests are prepared beside the loop, and answers read without waiting.

Nothing that takes long runs on the loop.
"""

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import count
from typing import Literal, TypeVar

from pi_runtime.engine.engine import Engine
from pi_runtime.errors import PiError
from pi_runtime.server.admission import Admission, IncomingBodies, Ticket
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError, refused, told, unavailable
from pi_runtime.server.in_flight import InFlight
from pi_runtime.server.metrics import Metrics
from pi_runtime.server.settings import ServerSettings

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
    """A few threads on which clients take turns: requests are read, checked and tokenized there.

    What waits for a thread waits on the event loop, so a request whose client leaves is dropped at once, with its body.
    One client has all threads but one at most, however much it sends: the last one is for somebody else. One whose
    requests take long has a single one: much of their work is done by one process for all, the template's, where others
    wait for it. Everything but the threads' work belongs to the event loop's thread.
    """

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


Phase = Literal["loading", "ready", "draining", "failed"]

WATCH_S = 0.2
"""Time between two looks at the engine."""
LAST_WORDS_S = 5.0
"""Time in which streams must have sent their end once they were ended."""


class Service:
    """One engine, which is opened beside the loop, and everything that runs on it."""

    def __init__(self, open_engine: Callable[[], Engine], settings: ServerSettings) -> None:
        self._open, self.settings = open_engine, settings
        self.phase: Phase = "loading"
        self.metrics = Metrics()
        self.admission = Admission(settings.slots, settings.queue, settings.answers_each)
        self.incoming = IncomingBodies(settings.limits.incoming_bytes)
        self.failure: BaseException | None = None
        """The fault for which the server takes no more requests."""
        self.on_failure: Callable[[], object] = lambda: None
        self.on_event: Callable[[str], object] = lambda _: None
        """Called with what an operator should know."""
        self._engine: Engine | None = None
        self._in_flight: dict[int, InFlight] = {}
        self._numbers = count()
        self.open_requests = 0
        """Requests that are being prepared or answered."""
        self.preparation = Preparation(settings.limits.prepare_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._ends = 0.0
        """When the time to drain is over."""
        self._threads: set[threading.Thread] = set()

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError (503) while there is none that answers."""
        if self.phase in ("loading", "failed") or self._engine is None:
            raise self._unavailable()
        return self._engine

    def _unavailable(self) -> ApiError:
        """Why no answer comes (503)."""
        said = {"loading": "the model is being loaded", "draining": "the server is stopping"}.get(self.phase)
        if said is None and self._engine is not None and self._engine.ended is not None:
            return refused(self._engine.ended)
        why = "" if self.failure is None else f": {told(self.failure)}"
        return unavailable(said or f"the engine has failed{why}", self.phase)

    @cached_property
    def served(self) -> Served:
        """The model as answers speak of it. Raises ApiError (503) before it is there."""
        return Served(self.engine.model, self.settings)

    @property
    def opened(self) -> Engine | None:
        """The engine, whatever its state; None until it has been opened."""
        return self._engine

    @property
    def health(self) -> tuple[bool, str]:
        """Whether it takes requests and the engine makes progress, and a word for its state."""
        if self.phase == "ready" and self._engine is not None and self._engine.stalled_s > self.settings.stale_s:
            return False, "stuck"
        return self.phase == "ready", self.phase

    @property
    def in_flight(self) -> list[InFlight]:
        """What the engine works on, the oldest first."""
        return list(self._in_flight.values())

    def start(self) -> None:
        """Begin to open the engine, on the running loop."""
        self._tasks = [asyncio.create_task(self._load(), name="load")]

    async def _load(self) -> None:
        try:
            self._engine = await self._in_thread(self._open)
        except Exception as error:
            self.fail(error)
            return
        if self.phase == "loading":
            self.phase = "ready"
        self._tasks.append(asyncio.create_task(self._watch(), name="watch"))

    async def _watch(self) -> None:
        """Look at the engine until it ends; then its error is what the server has failed with."""
        assert self._engine is not None
        while self._engine.ended is None:
            _ = self._engine.stalled_s  # it compares with what there was when it was last looked at
            await asyncio.sleep(WATCH_S)
        ended, cause = self._engine.ended, self._engine.ended.__cause__
        # The message is for who runs the server, on stderr.
        found = ended.found if cause is None else f"{type(cause).__name__}: {cause}"
        self.fail(cause if isinstance(cause, PiError) else PiError(ended.what, found=found))

    def fail(self, error: BaseException) -> None:
        """End the server for this error; any thread may say so."""
        self.phase, self.failure = "failed", error
        self.on_failure()

    def check_room(self, owner: str) -> None:
        """Raise the ApiError for which a further request of an owner would not be admitted."""
        _ = self.engine
        if self.phase == "draining":
            raise self._unavailable()
        self.admission.check(owner)

    @contextmanager
    def admitted(self, owner: str) -> Iterator[Ticket]:
        """Admit one request of an owner for as long as the block runs. Raises ApiError 429 where there is none
        for it, and 503 while loading, draining, or after a fault."""
        self.check_room(owner)
        with self.admission.ticket(owner) as ticket:
            self.open_requests += 1
            try:
                yield ticket
            finally:
                self.open_requests -= 1

    @contextmanager
    def running(self, request: InFlight) -> Iterator[None]:
        """List a request as in flight while the block runs, and cancel what is left of it afterwards."""
        number, began = next(self._numbers), time.monotonic()
        self._in_flight[number] = request
        request.listen()
        try:
            yield
        finally:
            request.cancel()
            del self._in_flight[number]
            if request.streams:
                self.admission.count(time.monotonic() - began)

    async def drain(self) -> None:
        """Take on nothing more; let what runs go on for a while, then end it with an error."""
        if self.phase != "failed":
            self.phase = "draining"
            self.on_event(f"stopping within {self.settings.drain_s:g} s; open requests: {self.open_requests}")
        seconds = self.settings.drain_s if self.phase == "draining" else 0.0
        self._ends = time.monotonic() + seconds
        await self._until_idle(seconds)
        for request in self.in_flight:
            request.fail(self._unavailable())
        await self._until_idle(LAST_WORDS_S)

    async def _until_idle(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while self.open_requests and time.monotonic() < ends:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Close the engine, and its model. Nobody waits long for an engine that does not end its step.

        In what is left of the time to drain, the engine writes what it keeps to disk.
        """
        for task in self._tasks:
            task.cancel()
        self.preparation.close()
        if (engine := self._engine) is not None:
            left_s = max(0.0, self._ends - time.monotonic())
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s + LAST_WORDS_S):
                    await self._in_thread(lambda: engine.close(left_s))
                    engine.model.close()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Let a thread of its own do something that may take very long; a process that ends does not wait for it."""
        loop = asyncio.get_running_loop()
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)
            self._threads.discard(thread)

        thread = threading.Thread(target=run, name="pi-serve", daemon=True)
        self._threads.add(thread)
        thread.start()
        return await asyncio.wrap_future(done, loop=loop)

    @property
    def is_held_up(self) -> bool:
        """Whether a thread still loads or closes the engine: Python's own end would wait for it, or cut it short."""
        return bool(self._threads)
