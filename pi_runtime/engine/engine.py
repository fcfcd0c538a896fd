"""An engine: one model that serves many requests at once, each with the text that it would get alone.

One thread runs step after step. A step takes the next tokens of several sequences to the executor, which computes each
as if it were alone. Callers read their streams in threads of their own; a slow reader holds up nobody.
"""

import atexit
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pi_runtime.engine.memory import EngineMemory
from pi_runtime.engine.scheduler import DECODE_SHARE, PIECE, DecodeShare, Scheduler, Work
from pi_runtime.engine.stream import Request, Stream
from pi_runtime.errors import UsageError
from pi_runtime.execution.executor import SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import pages_of
from pi_runtime.generation import NO_GUESS
from pi_runtime.guesses import Guess, StepTimes
from pi_runtime.model import Model
from pi_runtime.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine does at present, and what it has done."""

    running: int
    waiting: int
    finished: int
    """Requests that have ended, in whatever way."""
    pages_used: int
    """Pages of running requests, and pages kept for later ones."""
    pages_free: int
    page_bytes: int
    prompt_tokens: int
    """Tokens of prompts of the requests that have begun."""
    cached_tokens: int
    """Those of them that were stored already and did not run."""
    generated_tokens: int
    guessed_tokens: int
    """Guessed tokens that ran."""
    accepted_tokens: int
    """Those of them that were right."""
    preemptions: int
    """How often a request had to wait again because others needed its pages."""
    busy_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second of work, of all requests together."""
        return self.generated_tokens / self.busy_s if self.busy_s else None


class Engine:
    """Serves many requests with one model. A context manager; closing it ends what still runs with an error.

    `slots`: most requests that run at once; the others wait in order. `kv_budget`: bytes for keys and values, of the
    running requests and of what is kept because a later prompt may begin with it. None: as many as `slots` requests
    with a full context take, but no more than a quarter of the machine's memory, and no less than one such request
    takes. Memory is taken as it is needed. `piece`: most tokens of prompts in one step; fewer make shorter gaps between
    the tokens of the others. `decode_share`: share of their speed that answers keep while prompts are read; 0 reads
    prompts first. `speculate`: how many tokens are guessed at a time, as for `Model.generate`. No setting changes a
    text.

    >>> with load("artifact.pi", device="cpu") as model, Engine(model, slots=2) as engine:
    ...     streams = [engine.generate(prompt, max_tokens=4) for prompt in ("Once", "Twice", "Never")]
    ...     texts = ["".join(stream) for stream in streams]
    ...     texts == ["".join(model.generate(prompt, max_tokens=4)) for prompt in ("Once", "Twice", "Never")]
    True
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 8,
        kv_budget: int | None = None,
        piece: int = PIECE,
        decode_share: float = DECODE_SHARE,
        speculate: str | int = "auto",
    ) -> None:
        if not 0 <= decode_share < 1:
            raise UsageError(f"decode_share {decode_share}", expected="0 or more, and less than 1")
        for flag, value in (("--slots", slots), ("--piece", piece)):
            if value < 1:
                raise UsageError(f"{flag} {value}", expected="1 or more")
        self._model, self._executor = model, model.executor
        self._speculation = model.speculation(speculate, StepTimes())
        self._scheduler: Scheduler[Request] = Scheduler(slots, piece)
        self._decode_share = DecodeShare(decode_share)
        self._memory = EngineMemory(
            model.executor,
            self._default_budget(slots) if kv_budget is None else kv_budget,
            # A plan divides the sum of a token with selection between two sides, even where nothing is skipped.
            selection_matters=model.mode != "dense" or model.plan is not None,
        )
        self._arrived: list[Request] = []
        self._ended: UsageError | None = None
        """Set once it is closed, or has failed: what `generate` then says."""
        self._closing = False
        self._full = False
        """Whether the first of those that wait found too few pages, and none has left since."""
        self._shares_pieces = False
        """Whether several prompts are being read, which may begin alike."""
        # Guards what arrives and whether it is open; everything else belongs to the engine's thread.
        self._changed = threading.Condition()
        self._finished = self._prompt_tokens = self._cached_tokens = self._generated = self._preemptions = 0
        self._guessed = self._accepted = 0
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="pi-engine", daemon=True)
        self._thread.start()
        # A thread that is killed amid a step when Python ends may take the process down.
        atexit.register(self.close)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Stream:
        """Continue a prompt as `Model.generate` does, beside all other requests. Any thread may call it.

        Raises PromptError or UsageError at once for what cannot be run, and UsageError for what does not fit
        `kv_budget` even alone.
        """
        answer = self._model.new_answer(prompt, max_tokens=max_tokens, sampling=sampling, stop=stop)
        self._memory.check(answer.most_positions)
        request = Request(answer, self._executor.block_tokens)
        with self._changed:
            if self._ended is not None:
                raise self._ended
            self._arrived.append(request)
            self._changed.notify()
        return Stream(request, self._executor.neurons)

    @property
    def stats(self) -> EngineStats:
        """The figures up to now."""
        pool = self._memory.pool
        return EngineStats(
            running=len(self._scheduler.live),
            waiting=len(self._scheduler.waiting) + len(self._arrived),
            finished=self._finished,
            pages_used=pool.in_use,
            pages_free=pool.free,
            page_bytes=pool.page_nbytes,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            guessed_tokens=self._guessed,
            accepted_tokens=self._accepted,
            preemptions=self._preemptions,
            busy_s=self._busy_s,
        )

    def close(self) -> None:
        """End the engine after the present step. What still runs or waits ends with an error."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _default_budget(self, slots: int) -> int:
        nbytes = self._executor.new_pool(None).page_nbytes * pages_of(self._model.context)
        return max(nbytes, min(slots * nbytes, _machine_memory() // 4))

    # From here on: the engine's thread.

    def _run(self) -> None:
        error: BaseException = UsageError("the engine was closed before this answer ended")
        reason = UsageError("the engine is closed", remedy="generate before closing it")
        try:
            while self._wait():
                began = time.perf_counter()
                self._step()
                self._busy_s += time.perf_counter() - began
        except BaseException as failure:  # whatever it is, those who read streams must hear of it
            error, reason = failure, UsageError("the engine has failed", found=f"{type(failure).__name__}: {failure}")
        with self._changed:
            self._ended = reason
            unfinished = [*self._scheduler.clear(), *self._arrived]
            self._arrived.clear()
        for request in unfinished:
            request.pieces.put(error)
        for request in unfinished:
            if request.cache is not None:
                request.cache.close()
        self._finished += len(unfinished)
        self._memory.close()

    def _wait(self) -> bool:
        """Wait until there is something to do; False once the engine is to close."""
        with self._changed:
            while not self._closing and not self._arrived and self._scheduler.idle:
                self._changed.wait()
            for request in self._arrived:
                self._scheduler.submit(request)
            self._arrived.clear()
            return not self._closing

    def _step(self) -> None:
        """Run one step: requests leave and join, tokens run, new ones are drawn."""
        for request in [*self._scheduler.live, *self._scheduler.waiting]:
            if request.cancelled:
                request.answer.finish_reason = "cancelled"
                self._leave(request)
        self._join()
        self._catch_up()
        prompts = self._decode_share.allows_prompts(self._scheduler.decoding)
        work = self._with_memory(self._scheduler.plan(prompts=prompts))
        if not work:
            return
        decoding = sum(w.sequence.pending == 1 for w in work)
        guesses, generated = self._guess(work, decoding), self._generated
        steps = [self._sequence_step(w, guess, ran) for w, (guess, ran) in zip(work, guesses, strict=True)]
        began = time.perf_counter()
        results = self._executor.step(steps)
        seconds = time.perf_counter() - began
        if decoding == len(work) and all(s.select for s in steps):
            self._speculation.times.count(len(work), sum(len(s.tokens) for s in steps), seconds)
        for w, result, (guess, ran) in zip(work, results, guesses, strict=True):
            self._continue(w.sequence, result, guess, ran, began)
        gained = max(1.0, (self._generated - generated) / decoding) if decoding == len(work) else 1.0
        self._decode_share.count(seconds, decoding, decoding < len(work), gained)

    def _guess(self, work: list[Work[Request]], decoding: int) -> list[tuple[Guess, int]]:
        """For each part of a step what may come next, and how many tokens of it are to run.

        Guesses run in steps without prompts, and take only pages that are free.
        """
        if not self._speculation.is_on or decoding < len(work):
            return [(NO_GUESS, 0)] * len(work)
        requests = [w.sequence for w in work]
        guesses = [r.answer.guess(r.held) for r in requests]
        expected = [r.answer.lookup.acceptance.expected(g) for r, g in zip(requests, guesses, strict=True)]
        found = []
        for request, guess, length in zip(requests, guesses, self._speculation.lengths(expected), strict=True):
            assert request.cache is not None
            found.append((guess, length if self._memory.grow_freely(request.cache, 1 + length) else 0))
        return found

    def _join(self) -> None:
        """Let those that wait join, in order, as slots and memory allow."""
        while not self._full and (request := self._scheduler.next_to_join()) is not None:
            live = [r.cache for r in self._scheduler.live if r.cache is not None]
            request.cache = self._memory.open(request.answer.tokens, request.selected, live)
            if request.cache is None:
                assert live, "a request that fits alone finds no room though nothing runs"
                self._full = True
                return
            if not request.has_joined:
                request.has_joined = True
                request.answer.cached_tokens = request.cache.length
                self._prompt_tokens += request.answer.prompt_tokens
                self._cached_tokens += request.cache.length
            self._scheduler.join()

    def _catch_up(self) -> None:
        """Of prompts that are read in turns and begin alike, each goes on where another has come to."""
        reading = self._scheduler.reading
        self._shares_pieces = len(reading) > 1
        if self._shares_pieces:
            answer, cache = reading[0].answer, reading[0].cache
            assert cache is not None
            gained = self._memory.catch_up(cache, answer.tokens, reading[0].selected)
            if not answer.token_ids:
                answer.cached_tokens += gained
                self._cached_tokens += gained

    def _with_memory(self, planned: list[Work[Request]]) -> list[Work[Request]]:
        """The part of a plan for which there are pages; where they run out, those that joined last wait again."""
        work: list[Work[Request]] = []
        for w in planned:
            while w.sequence.cache is not None and not self._memory.grow(w.sequence.cache, w.tokens):
                last = self._scheduler.preempt()
                assert last.cache is not None
                self._memory.keep(last.cache)
                last.cache = None
                self._preemptions += 1
            work.append(w)
        return [w for w in work if w.sequence.cache is not None]

    def _sequence_step(self, work: Work[Request], guess: Guess, ran: int) -> SequenceStep:
        request = work.sequence
        assert request.cache is not None
        tokens, select = request.answer.next_block(request.held, work.tokens)
        tokens = np.append(tokens, np.array(guess.tokens[:ran], np.int64))
        return SequenceStep(cache=request.cache, tokens=tokens, select=select, logits="all" if ran else "last")

    def _continue(self, request: Request, result: SequenceResult, guess: Guess, ran: int, began: float) -> None:
        """Count a step for a request, and draw its next tokens if all before them have run."""
        assert request.cache is not None
        answer, before = request.answer, len(request.answer.tokens)
        if request.held < before:
            answer.spend(began, time.perf_counter())
            if self._shares_pieces:
                self._memory.share(request.cache)
            return
        accepted = answer.accepted_tokens
        error: Exception | None = None
        try:
            for piece in answer.follow(result, guess, ran, began):
                if piece:
                    request.pieces.put(piece)
        except Exception as fault:  # a fault of this request ends no other
            error = fault
        accepted = answer.accepted_tokens - accepted
        request.cache.truncate(before + accepted)
        self._generated += len(answer.tokens) - before
        self._guessed += ran
        self._accepted += accepted
        if error is not None or answer.finish_reason is not None:
            self._leave(request, error)
        elif before == answer.prompt_tokens:
            self._memory.share(request.cache)

    def _leave(self, request: Request, error: BaseException | None = None) -> None:
        """Take a request that has ended out of the schedule, keep its pages for later ones, and tell its reader."""
        self._scheduler.remove(request)
        if request.cache is not None:
            self._memory.keep(request.cache)
            request.cache = None
        self._full = False
        self._finished += 1
        request.pieces.put(error)


def _machine_memory() -> int:
    """Bytes of RAM of this machine; without limit where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
