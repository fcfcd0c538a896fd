"""An engine: one model that serves many requests at once, each with the text that it would get alone.

One thread runs step after step. A step takes the next tokens of several sequences to the executor, which computes each
as if it were alone. Callers read their streams in threads of their own; a slow reader holds up nobody.
"""

import atexit
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, Unpack

from pi_runtime.engine.memory import EngineMemory
from pi_runtime.engine.scheduler import DECODE_SHARE, PIECE, DecodeShare, Scheduler, Work
from pi_runtime.engine.stream import Request, Scores, Stream
from pi_runtime.errors import UsageError
from pi_runtime.execution.executor import SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import pages_of
from pi_runtime.generation import Answer, AnswerSettings, Scoring
from pi_runtime.model import Model


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
    prompts first. No setting changes a text.

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
    ) -> None:
        if not 0 <= decode_share < 1:
            raise UsageError(f"decode_share {decode_share}", expected="0 or more, and less than 1")
        for flag, value in (("--slots", slots), ("--piece", piece)):
            if value < 1:
                raise UsageError(f"{flag} {value}", expected="1 or more")
        self._model, self._executor = model, model.executor
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
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="pi-engine", daemon=True)
        self._thread.start()
        # A thread that is killed amid a step when Python ends may take the process down.
        atexit.register(self.close)

    def generate(self, prompt: str | Sequence[int], **settings: Unpack[AnswerSettings]) -> Stream:
        """Continue a prompt as `Model.generate` does, beside all other requests. Any thread may call it.

        Raises PromptError or UsageError at once for what cannot be run, and UsageError for what does not fit
        `kv_budget` even alone.
        """
        return self.generate_many(prompt, 1, **settings)[0]

    def generate_many(
        self, prompt: str | Sequence[int], count: int, **settings: Unpack[AnswerSettings]
    ) -> list[Stream]:
        """Several answers to one prompt, which is read once. Each has draws of its own.

        Answer k is the one that `generate` gives with the same seed and `Sampling.number` k more.
        """
        if count < 1:
            raise UsageError(f"{count} answers", expected="1 or more")
        first = self._model.new_answer(prompt, **settings)
        self._memory.check(first.most_positions)
        answers = [first]
        for k in range(1, count):
            settings["sampling"] = replace(first.sampling, number=first.sampling.number + k)
            answers.append(self._model.new_answer(first.tokens, **settings))
        requests = [Request(answer, self._executor.block_tokens) for answer in answers]
        requests[0].siblings = requests[1:]
        self._submit(requests[0])
        neurons = self._executor.neurons
        return [Stream(request, answer, neurons) for request, answer in zip(requests, answers, strict=True)]

    def score(self, prompt: str | Sequence[int], *, first: int = 1, top: int = 0) -> Scores:
        """Log-probabilities of a prompt as `Model.score` gives them, computed beside all other requests.

        Pages that earlier scorings stored are used up to token `first`. Raises errors as `generate` does.
        """
        scoring = self._model.new_scoring(prompt, first=first, top=top)
        self._memory.check(scoring.most_positions)
        request = Request(scoring, self._executor.block_tokens)
        if scoring.complete:
            request.pieces.put(None)
        else:
            self._submit(request)
        return Scores(request, scoring)

    def _submit(self, request: Request) -> None:
        with self._changed:
            if self._ended is not None:
                raise self._ended
            self._arrived.append(request)
            self._changed.notify()

    @property
    def stats(self) -> EngineStats:
        """The figures up to now."""
        pool, live, waiting = self._memory.pool, self._scheduler.live, [*self._scheduler.waiting, *self._arrived]
        return EngineStats(
            running=len(live),
            waiting=len(waiting) + sum(len(request.siblings) for request in [*live, *waiting]),
            finished=self._finished,
            pages_used=pool.in_use,
            pages_free=pool.free,
            page_bytes=pool.page_nbytes,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
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
            unfinished += [sibling for request in unfinished for sibling in request.siblings]
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
        began = time.perf_counter()
        results = self._executor.step([self._sequence_step(w) for w in work])
        self._decode_share.count(time.perf_counter() - began, decoding, decoding < len(work))
        for w, result in zip(work, results, strict=True):
            if isinstance(w.sequence.answer, Scoring):
                self._score(w.sequence, w.sequence.answer, result)
            else:
                self._continue(w.sequence, w.sequence.answer, result, began)

    def _join(self) -> None:
        """Let those that wait join, in order, as slots and memory allow."""
        while not self._full and (request := self._scheduler.next_to_join()) is not None:
            live = [r.cache for r in self._scheduler.live if r.cache is not None]
            answer = request.answer
            request.cache = self._memory.open(answer.tokens, answer.selected, answer.reusable, live)
            if request.cache is None:
                assert live, "a request that fits alone finds no room though nothing runs"
                self._full = True
                return
            if not request.has_joined:
                request.has_joined = True
                answer.cached_tokens = request.cache.length
                self._prompt_tokens += answer.prompt_tokens
                self._cached_tokens += request.cache.length
            self._scheduler.join()

    def _catch_up(self) -> None:
        """Let a prompt go on where another has come to, if both are being read and begin alike."""
        reading = self._scheduler.reading
        self._shares_pieces = len(reading) > 1
        if self._shares_pieces:
            answer, cache = reading[0].answer, reading[0].cache
            assert cache is not None
            gained = self._memory.catch_up(cache, answer.tokens, answer.selected, answer.reusable)
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

    def _sequence_step(self, work: Work[Request]) -> SequenceStep:
        request = work.sequence
        assert request.cache is not None
        tokens, select = request.answer.next_block(request.held, work.tokens)
        logits: Literal["last", "all"] = "all" if isinstance(request.answer, Scoring) else "last"
        return SequenceStep(cache=request.cache, tokens=tokens, select=select, logits=logits)

    def _score(self, request: Request, scoring: Scoring, result: SequenceResult) -> None:
        """Take the logits of a step for a scoring."""
        try:
            scoring.take(result.logits_TV, request.held)
        except Exception as error:  # a fault of this request ends no other
            self._leave(request, error)
            return
        if scoring.complete:
            self._leave(request)

    def _continue(self, request: Request, answer: Answer, result: SequenceResult, began: float) -> None:
        """Count a step for an answer, and draw its next token if all before it have run."""
        if request.pending:
            answer.spend(began, time.perf_counter())
            if self._shares_pieces and request.cache is not None:
                self._memory.share(request.cache)
            return
        siblings, request.siblings = request.siblings, []
        if siblings:
            assert request.cache is not None
            self._memory.keep(request.cache.fork())
        self._advance(request, answer, result, began)
        # They wait with one token each, before all others, and go on from the prompt's stored pages.
        for sibling in reversed(siblings):
            self._scheduler.submit_first(sibling)
        for sibling in siblings:
            assert isinstance(sibling.answer, Answer)
            self._advance(sibling, sibling.answer, result, began)

    def _advance(self, request: Request, answer: Answer, result: SequenceResult, began: float) -> None:
        """Draw an answer's next token from the result of the newest one."""
        before = len(answer.tokens)
        try:
            token = answer.draw(result)
            answer.spend(began, time.perf_counter())
            piece = answer.take(token)
        except Exception as error:  # a fault of this request ends no other
            self._leave(request, error)
            return
        self._generated += len(answer.tokens) - before
        if before == answer.prompt_tokens and answer.finish_reason is None and request.cache is not None:
            self._memory.share(request.cache)
        if piece:
            request.pieces.put(piece)
        if answer.finish_reason is not None:
            self._leave(request)

    def _leave(self, request: Request, error: BaseException | None = None) -> None:
        """Take a request that has ended out of the schedule, keep its pages for later ones, and tell its reader."""
        self._scheduler.remove(request)
        if request.siblings:
            # It ended before its prompt was read: the next answer reads it.
            heir = request.siblings[0]
            heir.siblings, request.siblings = request.siblings[1:], []
            self._scheduler.submit_first(heir)
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
