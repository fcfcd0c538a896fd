"""The engine's core: plan a step, execute it, and let every sequence in it advance.

It has no thread and no queue of messages: whoever has requests submits them, and calls `step` as long as any is left.
An engine does so in a thread of its own, for many; `Model.generate` in the caller's, for one.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from pi_runtime.engine.prompt_pace import PromptPace
from pi_runtime.engine.request import Output, ScheduledRequest, SessionState
from pi_runtime.engine.scheduler import ScheduledTokens, Scheduler
from pi_runtime.execution.executor import Executor, SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sequence.answer import AnswerSequence
from pi_runtime.sequence.drafts import NO_DRAFT, Draft
from pi_runtime.sequence.sequence import Status, StepLogits
from pi_runtime.sequence.speculation import Speculation


class Caches(Protocol):
    """What the core asks of whoever holds keys and values."""

    @property
    def may_open(self) -> bool:
        """Whether it is worth while to ask for a further cache."""

    def open(self, request: ScheduledRequest) -> KVCache | None:
        """A cache with room for a request's tokens, with what is stored of them; None where there is too little."""

    def grow(self, cache: KVCache, count: int) -> bool:
        """Make room for so many further tokens; False where there is too little."""

    def grow_freely(self, cache: KVCache, count: int) -> bool:
        """The same, with room that nobody uses."""

    def catch_up(self, cache: KVCache, request: ScheduledRequest) -> None:
        """Take what others have stored of a request's tokens meanwhile."""

    def share(self, cache: KVCache) -> None:
        """Let later requests begin with what a cache holds, which goes on."""

    def keep(self, cache: KVCache) -> None:
        """Close a cache, and let later requests begin with what it held."""

    def release(self, request: ScheduledRequest) -> ScheduledRequest | None:
        """Take back the cache of a request that ends; returns what is to be read ahead of its session, if anything."""

    def count_step(self, tokens: int, seconds: float, *, decoding: bool) -> None:
        """Count what tokens of one kind took: of answers, or of prompts."""


class _Planned(NamedTuple):
    """The part of one request in a step."""

    request: ScheduledRequest
    step: SequenceStep
    draft: Draft
    is_decoding: bool

    @property
    def num_tokens(self) -> int:
        """Its tokens, without those that are drafted."""
        return len(self.step.tokens) - self.draft.num_run


class Core:
    """Runs requests step by step, and counts what it does."""

    def __init__(
        self,
        executor: Executor,
        caches: Caches,
        scheduler: Scheduler[ScheduledRequest],
        pace: PromptPace,
        speculation: Speculation,
    ) -> None:
        self._executor, self._caches, self._pace, self._speculation = executor, caches, pace, speculation
        self.scheduler = scheduler
        self._shares_pieces = False
        """Whether several prompts are being read, or were beside the one that is left: they may begin alike."""
        self.finished = self.preemptions = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.guessed_tokens = self.accepted_tokens = 0

    def submit(self, request: ScheduledRequest) -> None:
        """Let a request wait for a slot; one of a session takes the place of what was being read ahead of it."""
        self.scheduler.submit(request)
        if request.session is not None:
            self.leave_session(request.session, besides=request)

    def step(self) -> None:
        """Run one step: requests leave and join, tokens run, new ones are drawn."""
        self._drop_cancelled()
        self._admit()
        self._catch_up()
        parts = self._plan()
        if not parts:
            return
        generated, began = self.generated_tokens, time.perf_counter()
        for part in parts:
            for request in (part.request, *part.request.samples):
                request.sequence.start_step()
        results = self._executor.step([part.step for part in parts])
        seconds = time.perf_counter() - began
        for part, result in zip(parts, results, strict=True):
            self._advance(part, result)
        self._count(parts, seconds, self.generated_tokens - generated)

    def leave(self, request: ScheduledRequest, error: BaseException | None = None) -> None:
        """Take a request that has ended out of the schedule, give its cache back, and tell its reader."""
        if request.samples:
            # It ended before its prompt was read: the next answer reads it.
            leader, *others = request.samples
            leader.samples, request.samples = others, []
            self.scheduler.submit_next(leader)
        ahead = self._caches.release(request)
        request.cache = None
        self.finished += not request.reads_ahead
        if ahead is not None:
            self.scheduler.submit(ahead)
        # Last: where anything before fails, the engine ends, and tells those who are in the schedule.
        self.scheduler.remove(request)
        request.finish(error)

    def leave_session(
        self, session: SessionState, *, besides: ScheduledRequest | None = None, reason: str | None = None
    ) -> None:
        """Let all requests of a session leave, besides one. `reason`: why those end that had not ended."""
        for request in self.scheduler.requests:
            if request.session is session and request is not besides:
                request.sequence.finish_reason = request.sequence.finish_reason or reason
                self.leave(request)

    # Plan.

    def _drop_cancelled(self) -> None:
        # An answer that leaves before its prompt was read puts the next one to it into the schedule.
        while cancelled := [request for request in self.scheduler.requests if request.cancelled]:
            for request in cancelled:
                request.sequence.finish_reason = "cancelled"
                self.leave(request)

    def _admit(self) -> None:
        """Let those that wait join, in order, as slots and memory allow."""
        while self._caches.may_open and (request := self.scheduler.next_to_join()) is not None:
            try:
                cache = self._caches.open(request)
            except Exception as error:  # a fault of this request ends no other
                self.leave(request, error)
                continue
            if cache is not None:
                self._join(request, cache)
            elif request.reads_ahead:
                self.leave(request)  # reading ahead waits for nothing
            else:
                return

    def _join(self, request: ScheduledRequest, cache: KVCache) -> None:
        sequence = request.sequence
        if sequence.status is Status.WAITING and not request.reads_ahead:
            sequence.cached_tokens = cache.length
            self.prompt_tokens += sequence.prompt_tokens
            self.cached_tokens += cache.length
        request.cache, sequence.num_computed, sequence.status = cache, cache.length, Status.RUNNING
        self.scheduler.join()
        if sequence.num_pending == 0:
            self.leave(request)

    def _catch_up(self) -> None:
        """Let a prompt go on where another has come to, if both are being read and begin alike."""
        reading = self.scheduler.reading
        self._shares_pieces = len(reading) > 1 or (self._shares_pieces and len(reading) == 1)
        if self._shares_pieces:
            request, sequence, cache = reading[0], reading[0].sequence, reading[0].cache
            assert cache is not None
            try:
                self._caches.catch_up(cache, request)
            except Exception as error:  # a fault of this request ends no other
                self.leave(request, error)
                return
            gained, sequence.num_computed = cache.length - sequence.num_computed, cache.length
            if len(sequence.tokens) == sequence.prompt_tokens:
                sequence.cached_tokens += gained
                self.cached_tokens += gained

    def _plan(self) -> list[_Planned]:
        """What runs in the next step: work for which there is memory, and what may come after it."""
        planned = self.scheduler.plan(self._pace.tokens(self.scheduler.decoding))
        for w in planned:
            try:
                self._make_room(w)
            except Exception as error:  # a fault of this request ends no other
                self.leave(w.request, error)
        work = [w for w in planned if w.request.is_running]
        return [self._planned(w, draft) for w, draft in zip(work, self._drafts(work), strict=True)]

    def _make_room(self, work: ScheduledTokens[ScheduledRequest]) -> None:
        """Give a request memory for its part of a step; where there is too little, those that joined last wait."""
        while (cache := work.request.cache) is not None and not self._caches.grow(cache, work.tokens):
            last = self.scheduler.preempt()
            assert last.cache is not None
            self._caches.keep(last.cache)
            last.cache, last.sequence.num_computed, last.sequence.status = None, 0, Status.PREEMPTED
            self.preemptions += 1

    def _drafts(self, work: Sequence[ScheduledTokens[ScheduledRequest]]) -> list[Draft]:
        """For each part of a step what may come next; none where any prompt is read.

        Drafts take only memory that nobody uses.
        """
        answers = [s for w in work if isinstance(s := w.request.sequence, AnswerSequence) and s.is_decoding]
        if not self._speculation.is_on or len(answers) < len(work):
            return [NO_DRAFT] * len(work)
        drafts = [answer.draft() for answer in answers]
        lengths = self._speculation.lengths([draft.expected for draft in drafts])
        found = []
        for w, draft, length in zip(work, drafts, lengths, strict=True):
            assert w.request.cache is not None
            fits = length and self._caches.grow_freely(w.request.cache, 1 + length)
            found.append(replace(draft, num_run=length if fits else 0))
        return found

    def _planned(self, work: ScheduledTokens[ScheduledRequest], draft: Draft) -> _Planned:
        request, sequence = work.request, work.request.sequence
        assert request.cache is not None
        tokens, select = sequence.next_block(work.tokens)
        tokens = np.append(tokens, np.array(draft.tokens[: draft.num_run], np.int64))
        every = draft.num_run > 0 or sequence.needs_all_logits
        step = SequenceStep(cache=request.cache, tokens=tokens, select=select, logits="all" if every else "last")
        return _Planned(request, step, draft, sequence.is_decoding)

    # Advance.

    def _advance(self, part: _Planned, result: SequenceResult) -> None:
        """Let a sequence go on with the result of a step; further answers to its prompt begin with it."""
        sequence, ran = part.request.sequence, part.request.sequence.num_computed + part.num_tokens
        samples = self._start_samples(part.request) if ran == len(sequence.tokens) else []
        computed = StepLogits(part.num_tokens, result.logits_TV, result.rows_L2, part.draft)
        self._take(part.request, sequence.advance(computed))
        self.guessed_tokens += part.draft.num_run
        self.accepted_tokens += sequence.num_computed - ran
        for sample in samples:
            assert isinstance(sample.sequence, AnswerSequence)
            self._take(sample, sample.sequence.draw(computed._replace(draft=NO_DRAFT)))

    def _start_samples(self, leader: ScheduledRequest) -> list[ScheduledRequest]:
        """Let further answers wait with one token each, ahead of their client's; they go on from stored pages."""
        samples, leader.samples = leader.samples, []
        for sample in reversed(samples):
            self.scheduler.submit_next(sample)
        if samples and leader.cache is not None:
            self._caches.keep(leader.cache.fork())
        return samples

    def _take(self, request: ScheduledRequest, texts: Iterator[str]) -> None:
        """Hand out what a sequence yields as it advances, and let it leave if it is complete."""
        sequence, cache, before = request.sequence, request.cache, len(request.sequence.tokens)
        error: Exception | None = None
        try:
            for text in texts:
                if text:
                    request.put(Output(text, len(sequence.tokens) - sequence.prompt_tokens))
        except Exception as fault:  # a fault of this request ends no other
            error = fault
        self.generated_tokens += len(sequence.tokens) - before
        if cache is not None and cache.length > sequence.num_computed:
            cache.truncate(sequence.num_computed)
        has_read = before == sequence.prompt_tokens < len(sequence.tokens)
        if error is not None or sequence.complete:
            self.leave(request, error)
        elif cache is not None and (has_read or (self._shares_pieces and not sequence.is_decoding)):
            self._caches.share(cache)

    def _count(self, parts: Sequence[_Planned], seconds: float, generated: int) -> None:
        """Count the time of a step, from which later ones are planned."""
        tokens, decoding = sum(len(part.step.tokens) for part in parts), sum(part.is_decoding for part in parts)
        selects = {part.step.select for part in parts}
        if decoding == len(parts) and selects == {True}:
            self._speculation.times.count(len(parts), tokens, seconds)
            self._caches.count_step(tokens, seconds, decoding=True)
        elif selects == {False}:
            self._caches.count_step(tokens, seconds, decoding=False)
        gained = max(1.0, generated / decoding) if decoding == len(parts) else 1.0
        self._pace.count(seconds, decoding, sum(p.num_tokens for p in parts if not p.is_decoding), gained)
