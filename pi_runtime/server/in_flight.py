"""A request while the engine works on it: what comes of its prompts is read in order, without waiting.

The engine's own thread only notifies that something has come.
"""

import asyncio
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pi_runtime.engine.engine import Engine
from pi_runtime.engine.events import CallBegan, Embedded, End, Event, PromptLogprobs, PromptProgress
from pi_runtime.engine.model import Model
from pi_runtime.engine.stream import Reading, Scores, Stream, Vector
from pi_runtime.server.admission import Client
from pi_runtime.server.api.answer import EventReader, GatheredAnswer
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.errors import ApiError, failed
from pi_runtime.server.metrics import Metrics
from pi_runtime.server.settings import ServerSettings

PROGRESS_S = 0.5
"""Seconds between looks at how much of a prompt has been read."""


@dataclass(eq=False, kw_only=True)
class _AnswerInFlight(GatheredAnswer):
    """One answer, where the rest of it comes from, and how much of it has been read."""

    reader: EventReader
    stream: Stream | None
    """None where nothing is generated."""
    awaited: Scores | Vector | Reading | None
    """What is computed of its prompt and comes first, or the prompt that is read ahead; None where there is nothing of
    the kind to wait for."""
    num_tokens: int = 0
    num_chars: int = 0
    told: int = -1
    """The tokens of its prompt that were read when that was said last."""
    latest: float = 0.0
    """When the latest text or token of it came."""
    has_ended: bool = False

    @property
    def sources(self) -> list[Stream | Scores | Vector | Reading]:
        """Where the rest of it comes from, as far as it is still to be read."""
        return [source for source in (self.awaited, self.stream) if source is not None]

    @property
    def pending(self) -> int:
        """Characters of its text that have not been read."""
        return 0 if self.stream is None else self.stream.chars - self.num_chars


class InFlight:
    """A request while the engine works on it. Made in any thread, read in the event loop's."""

    def __init__(
        self,
        prompt: Prompt,
        engine: Engine,
        metrics: Metrics,
        settings: ServerSettings,
        arrived: float,
        client: Client,
    ) -> None:
        """Hand the texts to the engine. Raises what the engine says of those that cannot be run."""
        self._metrics, self._limits, self._arrived = metrics, settings.limits, arrived
        self._shows_progress = prompt.shows_progress
        # Only requests of one key, and with the same `cache_salt`, share what is stored of prompts.
        salt = f"{'' if settings.share_prefixes else client.owner}:{prompt.cache_salt or ''}"
        self._answers: list[_AnswerInFlight] = []
        for n, text in enumerate(prompt.texts):
            # What was begun before one of them is refused has no reference left, so it ends.
            awaited = _awaited(engine, prompt, text, salt, client.name)
            for stream in _streams(engine, prompt, text, salt, client.name):
                after, index = [] if stream is None else stream.prompt, len(self._answers)
                reader = EventReader(prompt, engine.model.tokenizer, after=after)
                answer = _AnswerInFlight(index=index, prompt=n, reader=reader, stream=stream, awaited=awaited)
                self._answers.append(answer)
        self._error: ApiError | None = None
        self._news = asyncio.Event()
        self._is_notified = False

    @property
    def answers(self) -> Sequence[GatheredAnswer]:
        """All answers, in order; whoever takes an event adds it to its answer."""
        return self._answers

    @property
    def streams(self) -> list[Stream]:
        """The engine's streams of all answers, in order."""
        return [answer.stream for answer in self._answers if answer.stream is not None]

    @property
    def ended(self) -> bool:
        """Whether everything has been read, and nothing went wrong."""
        return self._error is None and all(answer.has_ended for answer in self._answers)

    def listen(self) -> None:
        """Have the running loop notified from now on when something has come."""
        loop, this = asyncio.get_running_loop(), weakref.ref(self)

        def notify() -> None:
            # A strong reference would keep the streams, which are cancelled when nobody refers to them.
            if (alive := this()) is not None and not alive._is_notified:
                alive._is_notified = True
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(alive._look)

        for answer in self._answers:
            for source in answer.sources:
                source.listen(notify)
        self._news.set()  # where nothing is generated, all has come

    def _look(self) -> None:
        self._is_notified = False
        if sum(answer.pending for answer in self._answers) > self._limits.pending_bytes:
            self.fail(ApiError(408, "the client reads too slowly", code="reader_too_slow"))
        self._news.set()

    async def wait(self, seconds: float) -> bool:
        """Wait at most so long for something to come; returns whether something has.

        While it is to be said how much of a prompt has been read, that is looked at in shorter times."""
        is_read = not self._shows_progress or self._answers[0].num_tokens
        try:
            async with asyncio.timeout(seconds if is_read else min(seconds, PROGRESS_S)):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def read(self) -> list[tuple[GatheredAnswer, Event]]:
        """The events of all that has come. Raises ApiError for what ended it, when all before that has been read."""
        if self._error is not None:
            raise self._error
        found: list[tuple[GatheredAnswer, Event]] = []
        for answer in self._answers:
            for event in self._read(answer):
                if isinstance(event, CallBegan) and answer.stream is not None:
                    answer.stream.expect_back()
                found.append((answer, event))
        return found

    def _read(self, answer: _AnswerInFlight) -> Iterator[Event]:
        if self._error is not None or answer.has_ended:
            return
        stats = None
        if answer.awaited is not None:
            if not answer.awaited.done:
                return
            try:
                if isinstance(answer.awaited, Scores):
                    yield PromptLogprobs(answer.awaited.result())
                elif isinstance(answer.awaited, Vector):
                    yield Embedded(answer.awaited.result())
                else:
                    stats = answer.awaited.result()
            except BaseException as error:
                self.fail(failed(error))
                return
            answer.awaited = None
        if answer.stream is None:
            answer.has_ended = True
            yield End("length", stats=stats)
        else:
            yield from self._read_stream(answer, answer.stream)

    def _read_stream(self, answer: _AnswerInFlight, stream: Stream) -> Iterator[Event]:
        output = stream.read()
        if self._shows_progress and answer.index == 0 and (read := stream.read_tokens) is not None:
            stats = stream.stats
            for known in (stats.cached_tokens, read):
                if known > answer.told:
                    answer.told = known
                    yield PromptProgress(known, stats=stats)
        first, answer.num_tokens = answer.num_tokens, max(output.num_tokens, answer.num_tokens)
        answer.num_chars += len(output.text)
        if output.text or answer.num_tokens > first:
            self._time(answer, answer.num_tokens - first)
            tokens, logprobs = stream.token_ids[first : answer.num_tokens], stream.logprobs[first : answer.num_tokens]
            yield from answer.reader.read(output.text, tokens, logprobs, stream.stats)
        if output.error is not None:
            self.fail(failed(output.error))
        elif output.ended:
            answer.has_ended = True
            assert stream.finish_reason is not None
            self._metrics.count(stream.stats)
            yield from answer.reader.end(stream.finish_reason, stream.stats, stream.ending, stream.stop_string)

    def _time(self, answer: _AnswerInFlight, tokens: int) -> None:
        """Count how long a part of so many tokens took to come."""
        now, before = time.monotonic(), answer.latest
        answer.latest = now
        if before == 0.0:
            self._metrics.first_token_s.count(now - self._arrived)
        elif tokens:
            self._metrics.between_tokens_s.count((now - before) / tokens, tokens)

    def fail(self, error: ApiError) -> None:
        """End the request with an error, which `read` raises."""
        self._error = self._error or error
        self.cancel()
        self._news.set()

    def cancel(self) -> None:
        """Let the engine drop all answers that have not ended."""
        for answer in self._answers:
            for source in answer.sources:
                source.cancel()


def _awaited(
    engine: Engine, prompt: Prompt, text: Sequence[int], salt: str, client: str
) -> Scores | Vector | Reading | None:
    """What computes a text itself, where that is wanted: its log-probabilities, its vector, or what is kept of it."""
    if prompt.pooling is not None:
        return engine.embed(text, prompt.pooling, cache_salt=salt, client=client)
    if prompt.goal == "reading":
        return engine.read(text, cache_salt=salt, client=client)
    if prompt.logprobs is None:
        return None
    return engine.score(text, top=prompt.logprobs, cache_salt=salt, client=client)


def _streams(engine: Engine, prompt: Prompt, text: Sequence[int], salt: str, client: str) -> Sequence[Stream | None]:
    """The engine's streams of the answers to a text."""
    if prompt.goal != "answers":
        return [None] * prompt.count
    settings = prompt.settings.copy()
    if prompt.prediction and engine.drafts:
        settings["expected"] = _expected(engine.model, prompt, len(text))
    return engine.generate_many(text, prompt.count, cache_salt=salt, client=client, **settings)


def _expected(model: Model, prompt: Prompt, tokens: int) -> Sequence[int]:
    """The tokens of the request's predicted text, less what no answer to a prompt of so many tokens can reach."""
    room = model.context - tokens
    most = min(room, prompt.settings.get("max_tokens") or room)
    text = prompt.prediction[: most * model.tokenizer.longest]
    return model.tokenizer.encode(text, prefix=False)
