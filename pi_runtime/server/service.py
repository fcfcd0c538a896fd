"""The engine as an event loop sees it: jobs are prepared beside the loop, run by the engine, and read without waiting.

Nothing that takes long runs on the loop. Requests are read, checked and tokenised by a few threads; the engine's own
thread only tells that something has come.
"""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from typing import Literal, TypeVar

from pi_runtime.engine.engine import Engine
from pi_runtime.engine.stream import Scores, Stream
from pi_runtime.errors import PiError
from pi_runtime.server.admission import Admission, Ticket
from pi_runtime.server.errors import ApiError, failed, refused
from pi_runtime.server.jobs import Ask, End, Event, Job, Part
from pi_runtime.server.metrics import Metrics
from pi_runtime.server.settings import ServerSettings

T = TypeVar("T")
Phase = Literal["loading", "ready", "draining", "failed"]

WORKERS = 4
"""Threads that prepare requests."""
WATCH_S = 0.2
"""Time between two looks at the engine."""
LAST_WORDS_S = 5.0
"""Time in which streams must have told of their end once they were ended."""


def unavailable(said: str, code: str) -> ApiError:
    """The error of a server that takes no requests now."""
    return ApiError(503, said, type="unavailable_error", code=code, headers={"Retry-After": "5"})


class _Asked:
    """One prompt that the engine works on."""

    def __init__(self, engine: Engine, ask: Ask, first: int, salt: str) -> None:
        self.first = first
        """The number of its first answer."""
        self.scores: Scores | None = None
        self.streams: list[Stream] = []
        settings = ask.settings.copy()
        if ask.guess:
            settings["expected"] = ask.guess
        if ask.score is not None:
            self.scores = engine.score(ask.prompt, first=ask.score[0], top=ask.score[1], cache_salt=salt)
        if ask.session is not None:
            self.streams = [ask.session.generate(ask.prompt, stop_tokens=ask.stop_tokens, **settings)]
        elif ask.count:
            self.streams = engine.generate_many(ask.prompt, ask.count, cache_salt=salt, **settings)
        self.has_scored = self.scores is None
        self.taken = [0] * ask.count
        """Tokens of each answer that the job has."""
        self.chars = [0] * ask.count
        """Characters of each answer that the job has."""
        self.open = set(range(ask.count))

    @property
    def sources(self) -> list[Stream | Scores]:
        """All that comes of it."""
        return [*self.streams] if self.scores is None else [self.scores, *self.streams]

    @property
    def ended(self) -> bool:
        """Whether everything has been read."""
        return self.has_scored and not self.open

    @property
    def pending(self) -> int:
        """Characters that wait to be read."""
        return sum(stream.chars - read for stream, read in zip(self.streams, self.chars, strict=True))


class Run:
    """A job while the engine works on it. Made in any thread, read in the event loop's."""

    def __init__(
        self, job: Job, engine: Engine, metrics: Metrics, settings: ServerSettings, arrived: float, owner: str
    ) -> None:
        """Hand the job's prompts to the engine. Raises what the engine says of those that cannot be run."""
        self.job, self._metrics, self._limits, self._arrived = job, metrics, settings.limits, arrived
        self._asked: list[_Asked] = []
        for ask in job.asks:
            # What was begun before one of them is refused has no reference left, so it ends.
            first, salt = sum(len(asked.streams) for asked in self._asked), settings.cache_salt(owner, ask.cache_salt)
            self._asked.append(_Asked(engine, ask, first, salt))
        self._latest = [0.0] * sum(len(asked.streams) for asked in self._asked)
        """When each answer's latest part came."""
        self._error: ApiError | None = None
        self._news = asyncio.Event()
        self._is_told = False

    @property
    def streams(self) -> list[Stream]:
        """All answers, in order."""
        return [stream for asked in self._asked for stream in asked.streams]

    @property
    def ended(self) -> bool:
        """Whether everything has been read, and nothing went wrong."""
        return self._error is None and all(asked.ended for asked in self._asked)

    def listen(self) -> None:
        """Begin to be told of news, on the running loop."""
        loop, run = asyncio.get_running_loop(), weakref.ref(self)

        def tell() -> None:
            # A strong reference would keep the streams, which are cancelled when nobody refers to them.
            if (alive := run()) is not None and not alive._is_told:
                alive._is_told = True
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(alive._notice)

        for asked in self._asked:
            for source in asked.sources:
                source.listen(tell)

    def _notice(self) -> None:
        self._is_told = False
        if sum(asked.pending for asked in self._asked) > self._limits.pending_bytes:
            self.fail(ApiError(408, "the client reads too slowly", code="reader_too_slow"))
        self._news.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for news at most so long; returns whether there are some."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def read(self) -> list[Event]:
        """The events of all that has come. Raises ApiError for what ended the job, when all before it has been read."""
        if self._error is not None:
            raise self._error
        found: list[Event] = []
        for number, asked in enumerate(self._asked):
            found += self._read_scores(asked, number)
            for k in sorted(asked.open) if asked.has_scored else ():
                found += self._read_answer(asked, k)
        return found

    def _read_scores(self, asked: _Asked, number: int) -> Sequence[Event]:
        if self._error is not None or asked.has_scored or asked.scores is None or not asked.scores.done:
            return ()
        try:
            scores = asked.scores.result()
        except BaseException as error:
            self.fail(failed(error))
            return ()
        asked.has_scored = True
        return self.job.scores(number, scores)

    def _read_answer(self, asked: _Asked, k: int) -> Iterator[Event]:
        if self._error is not None:
            return
        stream, index = asked.streams[k], asked.first + k
        news = stream.news()
        first, asked.taken[k] = asked.taken[k], max(news.tokens, asked.taken[k])
        asked.chars[k] += len(news.text)
        if news.text or asked.taken[k] > first:
            self._time(index, asked.taken[k] - first)
            tokens, logprobs = stream.token_ids[first : asked.taken[k]], stream.logprobs[first : asked.taken[k]]
            yield from self.job.part(index, Part(news.text, tokens, logprobs, stream.stats))
        if news.error is not None:
            self.fail(failed(news.error))
        elif news.ended:
            asked.open.discard(k)
            assert stream.finish_reason is not None
            self._metrics.count(stream.stats)
            yield from self.job.end(index, End(stream.finish_reason, stream.stats, stream.seed, stream.ending))

    def _time(self, index: int, tokens: int) -> None:
        """Count how long a part of so many tokens took to come."""
        now, before = time.monotonic(), self._latest[index]
        self._latest[index] = now
        if before == 0.0:
            self._metrics.first_token_s.count(now - self._arrived)
        elif tokens:
            self._metrics.between_tokens_s.count((now - before) / tokens, tokens)

    def fail(self, error: ApiError) -> None:
        """End it with an error, which `read` raises."""
        self._error = self._error or error
        self.cancel()
        self._news.set()

    def cancel(self) -> None:
        """Let the engine drop all that has not ended."""
        for asked in self._asked:
            for source in asked.sources:
                source.cancel()


class Service:
    """One engine, which is opened beside the loop, and everything that runs on it."""

    def __init__(self, open_engine: Callable[[], Engine], settings: ServerSettings) -> None:
        self._open, self.settings = open_engine, settings
        self.phase: Phase = "loading"
        self.metrics = Metrics()
        self.admission = Admission(settings.slots, settings.queue)
        self.failure: BaseException | None = None
        """Why it serves no more, where that is a fault."""
        self.on_failure: Callable[[], object] = lambda: None
        self.on_event: Callable[[str], object] = lambda _: None
        """Called with what an operator should know."""
        self._engine: Engine | None = None
        self._runs: dict[int, Run] = {}
        self._numbers = count()
        self._open_requests = 0
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="pi-prepare")
        self._tasks: list[asyncio.Task[None]] = []
        self._threads: set[threading.Thread] = set()

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError (503) while there is none that answers."""
        if self.phase in ("loading", "failed") or self._engine is None:
            said = "the model is being loaded" if self.phase == "loading" else "the engine has failed"
            raise unavailable(said, self.phase)
        return self._engine

    @property
    def opened(self) -> Engine | None:
        """The engine in whatever state, once there is one."""
        return self._engine

    @property
    def health(self) -> tuple[bool, str]:
        """Whether it takes requests and the engine makes progress, and a word for its state."""
        if self.phase == "ready" and self._engine is not None and self._engine.step_s > self.settings.stale_s:
            return False, "stuck"
        return self.phase == "ready", self.phase

    @property
    def runs(self) -> list[Run]:
        """What the engine works on, the oldest first."""
        return list(self._runs.values())

    @property
    def open_requests(self) -> int:
        """Requests that are being prepared or answered."""
        return self._open_requests

    def start(self) -> None:
        """Begin to open the engine, on the running loop."""
        self._tasks = [asyncio.create_task(self._load(), name="load")]

    async def _load(self) -> None:
        try:
            self._engine = await self._in_thread(self._open)
        except Exception as error:
            self._fail(error)
            return
        if self.phase == "loading":
            self.phase = "ready"
        self._tasks.append(asyncio.create_task(self._watch(), name="watch"))

    async def _watch(self) -> None:
        """See whether the engine is there; its fault is the server's."""
        assert self._engine is not None
        while self._engine.ended is None:
            await asyncio.sleep(WATCH_S)
        self._fail(PiError(self._engine.ended.what, found=self._engine.ended.found))

    def _fail(self, error: BaseException) -> None:
        self.phase, self.failure = "failed", error
        self.on_failure()

    @contextmanager
    def admitted(self) -> Iterator[Ticket]:
        """A place for one request for as long as the block runs. Raises ApiError 429 where all are taken, and 503
        while loading, draining, or after a fault."""
        _ = self.engine
        if self.phase == "draining":
            raise unavailable("the server is stopping", "draining")
        with self.admission.ticket() as ticket:
            self._open_requests += 1
            try:
                yield ticket
            finally:
                self._open_requests -= 1

    async def prepare(self, call: Callable[[], T]) -> T:
        """Let a thread do something that takes long. Raises ApiError for every error, and where it takes too long."""
        limit = self.settings.limits.prepare_s
        try:
            async with asyncio.timeout(limit):
                return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except TimeoutError:
            raise ApiError(400, f"the request could not be prepared within {limit:g} s", code="too_complex") from None
        except Exception as error:
            raise refused(error) from error

    @contextmanager
    def running(self, run: Run) -> Iterator[Run]:
        """Let a run be seen while the block runs, and end it afterwards."""
        number, began = next(self._numbers), time.monotonic()
        self._runs[number] = run
        run.listen()
        try:
            yield run
        finally:
            run.cancel()
            del self._runs[number]
            self.admission.count(time.monotonic() - began)

    async def begin(self, job: Job, ticket: Ticket, arrived: float, owner: str) -> Run:
        """Hand an owner's job to the engine. Raises ApiError for what cannot be run."""
        answers = sum(ask.count for ask in job.asks)
        most = self.settings.limits.answers
        if answers > most:
            raise ApiError(400, f"{answers} answers; at most {most} in a request", param="n")
        ticket.take(answers)
        engine = self.engine
        return await self.prepare(lambda: Run(job, engine, self.metrics, self.settings, arrived, owner))

    async def drain(self) -> None:
        """Take on nothing more; let what runs go on for a while, then end it with an error."""
        if self.phase != "failed":
            self.phase = "draining"
            self.on_event(f"stopping within {self.settings.drain_s:g} s; open requests: {self._open_requests}")
        await self._until_idle(self.settings.drain_s if self.phase == "draining" else 0.0)
        said = "the server is stopping" if self.phase == "draining" else "the engine has failed"
        for run in self.runs:
            run.fail(unavailable(said, self.phase))
        await self._until_idle(LAST_WORDS_S)

    async def _until_idle(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while self._open_requests and time.monotonic() < ends:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Close the engine, and its model. Nobody waits long for an engine that does not end its step."""
        for task in self._tasks:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if (engine := self._engine) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._in_thread(engine.close)
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
        """Whether loading or closing still goes on: then Python's own end would wait for it, or break it amid."""
        return bool(self._threads)
