"""A job while the engine works on it: what comes of its prompts is read in order, without waiting.

The engine's own thread only tells that something has come.
"""

import asyncio
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress

from pi_runtime.engine.engine import Engine
from pi_runtime.engine.stream import Scores, Stream
from pi_runtime.model import Model
from pi_runtime.server.errors import ApiError, failed
from pi_runtime.server.jobs import Ask, End, Event, Job, Part
from pi_runtime.server.metrics import Metrics
from pi_runtime.server.settings import ServerSettings


class _Asked:
    """One prompt that the engine works on."""

    def __init__(self, engine: Engine, ask: Ask, first: int, salt: str) -> None:
        self.first = first
        """The number of its first answer."""
        self.scores: Scores | None = None
        self.streams: list[Stream] = []
        settings = ask.settings.copy()
        if ask.guess and engine.guesses:
            settings["expected"] = _expected(engine.model, ask)
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


def _expected(model: Model, ask: Ask) -> Sequence[int]:
    """The tokens of what is likely to come, without what is beyond the longest answer."""
    room = model.context - len(ask.prompt)
    most = min(room, ask.settings.get("max_tokens") or room)
    text = ask.guess[: most * model.tokenizer.least_tokens.longest]
    return model.tokenizer.encode(text, prefix=False)


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

    async def read(self) -> list[Event]:
        """The events of all that has come. Raises ApiError for what ended the job, when all before it has been read."""
        if self._error is not None:
            raise self._error
        found: list[Event] = []
        for number, asked in enumerate(self._asked):
            found += await self._read_scores(asked, number)
            for k in sorted(asked.open) if asked.has_scored else ():
                found += self._read_answer(asked, k)
        return found

    async def _read_scores(self, asked: _Asked, number: int) -> Sequence[Event]:
        if self._error is not None or asked.has_scored or asked.scores is None or not asked.scores.done:
            return ()
        try:
            scores = asked.scores.result()
        except BaseException as error:
            self.fail(failed(error))
            return ()
        asked.has_scored = True
        return await asyncio.to_thread(self.job.scores, number, scores)  # a prompt may be long

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
