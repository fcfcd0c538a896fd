"""An engine: one model that serves many requests at once, each with the text that it would get alone.

One thread runs step after step. A step takes the next tokens of several sequences to the executor, which computes each
as if it were alone. Callers read their streams in threads of their own; a slow reader holds up nobody.
"""

import atexit
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack

import numpy as np

from pi_runtime.engine.inbox import Inbox
from pi_runtime.engine.memory import EngineMemory
from pi_runtime.engine.model import Model
from pi_runtime.engine.options import EngineOptions
from pi_runtime.engine.prompt_pace import PromptPace
from pi_runtime.engine.scheduler import PIECE, Scheduler, Work
from pi_runtime.engine.sessions import session_file
from pi_runtime.engine.sessions.session import Session
from pi_runtime.engine.sessions.suspended import PausedSessions
from pi_runtime.engine.stats import EngineStats
from pi_runtime.engine.step_watch import StepWatch
from pi_runtime.engine.stream import Piece, Request, Scores, Stream, Turns
from pi_runtime.errors import UsageError
from pi_runtime.execution.executor import SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import KVCache, pages_of
from pi_runtime.sequence.drafts import NO_GUESS, Guess
from pi_runtime.sequence.sequence import Answer, Scoring
from pi_runtime.sequence.settings import AnswerSettings
from pi_runtime.sequence.speculation import StepTimes

MEASURED_TOKENS = 8
"""Least tokens of a step that says what a token of a prompt takes."""
MOST_ANSWERS = 1024
"""To one prompt at once: each takes memory before it runs."""


class Engine:
    """Serves many requests with one model. A context manager; closing it ends what still runs with an error.

    `slots`: most requests that run at once; the others wait in order. `kv_budget`: bytes for keys and values, of the
    running requests and of what is kept because a later prompt may begin with it. None: as many as `slots` requests
    with a full context take, but no more than a quarter of the machine's memory, and no less than one such request
    takes; for a model within a budget of memory, what that leaves (see `load`). Memory is taken as it is needed.
    `piece`: most tokens of prompts in one step; fewer make shorter gaps between others' tokens. None goes by times.
    `decode_share`: share of their speed that answers keep while prompts are read; 0 reads prompts first. `speculate`:
    how many tokens are guessed at a time, as for `Model.generate`. No setting changes a text.

    A request begins with what is kept of earlier prompts that begin alike, and its figures and its speed tell so. Where
    callers do not trust each other give each a `cache_salt`: only requests with the same salt share what is kept.

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
        slots: int = EngineOptions.slots,
        kv_budget: int | None = None,
        piece: int | None = None,
        decode_share: float = EngineOptions.decode_share,
        speculate: str | int = "auto",
    ) -> None:
        EngineOptions(slots=slots, piece=piece, decode_share=decode_share, speculate=speculate)
        self.model, self._executor = model, model.executor
        self._speculation = model.speculation(speculate, StepTimes())
        self._scheduler: Scheduler[Request] = Scheduler(slots, piece or PIECE)
        self._pace = PromptPace(decode_share, piece, model.executor.block_tokens)
        self._memory = EngineMemory(
            model.executor,
            self._default_budget(slots) if kv_budget is None else kv_budget,
            # A plan divides the sum of a token with selection between two sides, even where nothing is skipped.
            selection_matters=model.mode != "dense" or model.plan is not None,
        )
        self._sessions = PausedSessions(self._memory)
        self._inbox = Inbox()
        self._full_until = -math.inf
        """The time of the sessions' clock until which the first of those that wait finds too few pages."""
        self._shares_pieces = False
        """Whether several prompts are being read, or were beside the one that is left: they may begin alike."""
        self._finished = self._prompt_tokens = self._cached_tokens = self._generated = self._preemptions = 0
        self._guessed = self._accepted = 0
        self._busy_s = 0.0
        self._watch = StepWatch()
        self._thread = threading.Thread(target=self._run, name="pi-engine", daemon=True)
        self._thread.start()
        # A thread that is killed amid a step when Python ends may take the process down.
        atexit.register(self.close)

    def generate(
        self, prompt: str | Sequence[int], *, cache_salt: str = "", **settings: Unpack[AnswerSettings]
    ) -> Stream:
        """Continue a prompt as `Model.generate` does, beside all other requests. Any thread may call it.

        Raises PromptError or UsageError at once for what cannot be run, and UsageError for what does not fit
        `kv_budget` even alone.
        """
        return self.generate_many(prompt, 1, cache_salt=cache_salt, **settings)[0]

    def generate_many(
        self, prompt: str | Sequence[int], count: int, *, cache_salt: str = "", **settings: Unpack[AnswerSettings]
    ) -> list[Stream]:
        """Up to `MOST_ANSWERS` answers to one prompt, which is read once. Each has draws of its own.

        Answer k is the one that `generate` gives with the same seed and `Sampling.number` k more.
        """
        if not 1 <= count <= MOST_ANSWERS:
            raise UsageError(f"{count} answers", expected=f"1 to {MOST_ANSWERS}")
        first = self.model.new_answer(prompt, **settings)
        self._memory.check(first.most_positions)
        answers = [first]
        settings.pop("expected", None)
        for k in range(1, count):
            settings["sampling"] = replace(first.sampling, number=first.sampling.number + k)
            answers.append(self.model.new_answer(first.tokens, **settings))
        if self.guesses:
            first.lookup.prepare()  # here rather than in the engine's thread
            for answer in answers[1:]:
                answer.lookup = first.lookup.beside(answer.tokens)
        requests = [Request(answer, self._executor.block_tokens, salt=cache_salt) for answer in answers]
        requests[0].siblings = requests[1:]
        self._inbox.submit(requests[0])
        neurons = self._executor.neurons
        return [Stream(request, answer, neurons) for request, answer in zip(requests, answers, strict=True)]

    def score(self, prompt: str | Sequence[int], *, first: int = 1, top: int = 0, cache_salt: str = "") -> Scores:
        """Log-probabilities of a prompt as `Model.score` gives them, computed beside all other requests.

        Pages that earlier scorings stored are used up to token `first`. Raises errors as `generate` does.
        """
        scoring = self.model.new_scoring(prompt, first=first, top=top)
        self._memory.check(scoring.most_positions)
        request = Request(scoring, self._executor.block_tokens, salt=cache_salt)
        if scoring.complete:
            request.put(None)
        else:
            self._inbox.submit(request)
        return Scores(request, scoring)

    def session(self, tokens: Sequence[int] = (), *, cache_salt: str = "") -> Session:
        """A text that is continued in turns, and what has been computed of it.

        It may begin with tokens, which are checked, and read, with the first turn.
        """
        return Session(self, Turns(list(tokens), [False] * len(tokens), cache_salt))

    def load_session(self, path: str | Path, *, cache_salt: str = "") -> Session:
        """A session that `Session.save` wrote, by the same artifact, mode and cache format, in any process.

        Its keys and values are taken on trust: give one that others may have written a `cache_salt` of its own. Raises
        InputError for a file that is damaged or no session, UsageError where it does not belong to this model.
        """
        stored = session_file.load(Path(path), self._run_settings(), self._memory.pool.page_nbytes)
        turns = Turns(stored.tokens, stored.selected, cache_salt)
        self._inbox.call(lambda: self._restore(turns, stored))
        return Session(self, turns)

    def begin(self, answer: Answer, turns: Turns | None = None) -> Stream:
        """Let an answer be written, of a session or for itself."""
        self._memory.check(answer.most_positions)
        request = Request(answer, self._executor.block_tokens, turns)
        self._inbox.submit(request)
        return Stream(request, answer, self._executor.neurons)

    def read_ahead(self, answer: Answer, turns: Turns) -> None:
        """Let the tokens of a session's next prompt be read, in place of what was being read of it."""
        self._memory.check(answer.prompt_tokens + 1)
        self._inbox.submit(Request(answer, self._executor.block_tokens, turns, reads_only=True))

    def save_session(self, turns: Turns, path: Path) -> None:
        """Write a session that is paused to a file."""
        self._inbox.call(lambda: self._save(turns, path))

    def forget(self, turns: Turns) -> None:
        """Drop what is kept of a session that nobody will continue."""
        turns.is_closed = True
        self._inbox.forget(turns)

    @property
    def guesses(self) -> bool:
        """Whether tokens may be guessed, so that what is expected is of use."""
        return self._speculation.is_on

    @property
    def stats(self) -> EngineStats:
        """The figures up to now."""
        pool, live, waiting = self._memory.pool, self._scheduler.live, [*self._scheduler.waiting, *self._inbox.requests]
        return EngineStats(
            running=len(live),
            waiting=len(waiting) + sum(len(request.siblings) for request in [*live, *waiting]),
            finished=self._finished,
            pages_used=pool.in_use,
            pages_kept=self._memory.kept,
            pages_free=pool.free,
            page_bytes=pool.page_nbytes,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            guessed_tokens=self._guessed,
            accepted_tokens=self._accepted,
            preemptions=self._preemptions,
            paused_sessions=self._sessions.count,
            written_sessions=self._sessions.written,
            dropped_sessions=self._sessions.dropped,
            busy_s=self._busy_s,
            disk=self._executor.disk,
        )

    @property
    def stalled_s(self) -> float:
        """Seconds for which the present step has made no progress, as far as was looked; 0 between steps."""
        return self._watch.stalled_s

    @property
    def ended(self) -> UsageError | None:
        """Why it answers nothing any more: it was closed, or has failed; None while it answers."""
        return self._inbox.ended

    def close(self) -> None:
        """End the engine after the present step. What still runs or waits ends with an error."""
        self._inbox.close()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _default_budget(self, slots: int) -> int:
        if self._executor.kv_room is not None:
            return self._executor.kv_room
        nbytes = self._executor.new_pool(None).page_nbytes * pages_of(self.model.context)
        return max(nbytes, min(slots * nbytes, _machine_memory() // 4))

    # From here on: the engine's thread.

    def _run(self) -> None:
        error: BaseException = UsageError("the engine was closed before this answer ended")
        reason = UsageError("the engine is closed", remedy="generate before closing it")
        try:
            while self._take():
                began = time.perf_counter()
                self._watch.begin()
                self._step()
                self._watch.end()
                self._busy_s += time.perf_counter() - began
        except BaseException as failure:  # whatever it is, those who read streams must hear of it
            error, reason = failure, UsageError("the engine has failed", found=f"{type(failure).__name__}: {failure}")
            reason.__cause__ = failure
        left = self._inbox.end(reason)
        unfinished = [*self._scheduler.clear(), *left.requests]
        unfinished += [sibling for request in unfinished for sibling in request.siblings]
        for request in unfinished:
            request.left.set()
            request.put(error)
        for _, done in left.calls:
            done.set_exception(reason)
        for request in unfinished:
            if request.cache is not None:
                request.cache.close()
        self._finished += len(unfinished)
        self._sessions.close()
        self._memory.close()

    def _take(self) -> bool:
        """Wait until there is something to do, and take what has arrived; False once the engine is to close."""
        arrived = self._inbox.take(wait=self._scheduler.idle)
        # First what cannot fail: whatever ends the engine from here on, those who wait hear of it.
        for request in arrived.requests:
            self._scheduler.submit(request)
        for call, done in arrived.calls:
            try:
                call()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        for request in arrived.requests:
            self._replace_reading(request)
        for turns in arrived.forgotten:
            self._close_session(turns)
        return not self._inbox.closing

    def _replace_reading(self, request: Request) -> None:
        """Let a request of a session take the place of what was being read ahead of it."""
        for other in self._scheduler.sequences:
            if other is request or request.turns is None:
                return
            if other.turns is request.turns:
                self._leave(other)

    def _step(self) -> None:
        """Run one step: requests leave and join, tokens run, new ones are drawn."""
        # An answer that leaves before its prompt was read puts the next one to it into the schedule.
        while cancelled := [request for request in self._scheduler.sequences if request.cancelled]:
            for request in cancelled:
                request.answer.finish_reason = "cancelled"
                self._leave(request)
        self._join()
        self._catch_up()
        work = self._with_memory(self._scheduler.plan(self._pace.tokens(self._scheduler.decoding)))
        if not work:
            return
        decoding = sum(w.sequence.pending == 1 for w in work)
        guesses, generated = self._guess(work, decoding), self._generated
        steps = [self._sequence_step(w, guess, ran) for w, (guess, ran) in zip(work, guesses, strict=True)]
        began = time.perf_counter()
        results = self._executor.step(steps)
        seconds = time.perf_counter() - began
        tokens = sum(len(s.tokens) for s in steps)
        if decoding == len(work) and all(s.select for s in steps):
            self._speculation.times.count(len(work), tokens, seconds)
            self._sessions.selected_s.count(seconds / tokens)
        elif tokens >= MEASURED_TOKENS and not any(s.select for s in steps):
            self._sessions.dense_s.count(seconds / tokens)
        for w, result, (guess, ran) in zip(work, results, guesses, strict=True):
            if isinstance(w.sequence.answer, Scoring):
                self._score(w.sequence, w.sequence.answer, result)
            else:
                self._continue(w.sequence, w.sequence.answer, result, guess, ran, began)
        gained = max(1.0, (self._generated - generated) / decoding) if decoding == len(work) else 1.0
        self._pace.count(seconds, decoding, sum(w.tokens for w in work) - decoding, gained)

    def _guess(self, work: list[Work[Request]], decoding: int) -> list[tuple[Guess, int]]:
        """For each part of a step what may come next, and how many tokens of it are to run.

        Guesses run in steps without prompts, and take only pages that are free.
        """
        answers = [w.sequence.answer for w in work if isinstance(w.sequence.answer, Answer)]
        if not self._speculation.is_on or decoding < len(work) or len(answers) < len(work):
            return [(NO_GUESS, 0)] * len(work)
        guesses = [answer.guess(w.sequence.held) for answer, w in zip(answers, work, strict=True)]
        expected = [answer.lookup.acceptance.expected(guess) for answer, guess in zip(answers, guesses, strict=True)]
        found = []
        for w, guess, length in zip(work, guesses, self._speculation.lengths(expected), strict=True):
            assert w.sequence.cache is not None
            found.append((guess, length if self._memory.grow_freely(w.sequence.cache, 1 + length) else 0))
        return found

    def _join(self) -> None:
        """Let those that wait join, in order, as slots and memory allow."""
        while self._sessions.clock() >= self._full_until and (request := self._scheduler.next_to_join()) is not None:
            answer = request.answer
            try:
                request.cache = self._open(request)
            except Exception as error:  # a fault of this request ends no other
                self._leave(request, error)
                continue
            if request.cache is None and request.reads_only:
                # Reading ahead waits for nothing.
                self._leave(request)
                continue
            if request.cache is None:
                assert self._scheduler.live, "a request that fits alone finds no room though nothing runs"
                self._full_until = self._sessions.turns_at(self._running, request.turns)
                return
            if not request.has_joined and not request.reads_only:
                request.has_joined = True
                answer.cached_tokens = request.cache.length
                self._prompt_tokens += answer.prompt_tokens
                self._cached_tokens += request.cache.length
            self._scheduler.join()
            if request.pending == request.reads_only:
                self._leave(request)

    def _open(self, request: Request) -> KVCache | None:
        """A cache for a request that may join; paused sessions give up pages for it where that wastes least."""
        answer, turns, ahead, running = request.answer, request.turns, request.reads_only, self._running
        tokens, selected = answer.tokens, answer.selected
        while True:
            if ahead and turns is not None and len(tokens) == len(turns.tokens):
                # The newest token of a paused session runs only if all before it are still there.
                pause = turns.pause
                if pause is None or pause.cache is None:
                    return None
            live = [*running, *self._sessions.caches]
            if turns is None:
                cache = self._memory.open(tokens, selected, answer.reusable, live, request.salt)
            else:
                cache = self._sessions.resume(turns, tokens, selected, live, whole=ahead)
            if cache is not None or not self._sessions.give_up(running, turns, must=not running and not ahead):
                return cache

    @property
    def _running(self) -> list[KVCache]:
        """The caches of the requests that have joined."""
        return [request.cache for request in self._scheduler.live if request.cache is not None]

    def _catch_up(self) -> None:
        """Let a prompt go on where another has come to, if both are being read and begin alike."""
        reading = self._scheduler.reading
        self._shares_pieces = len(reading) > 1 or (self._shares_pieces and len(reading) == 1)
        if self._shares_pieces:
            answer, cache = reading[0].answer, reading[0].cache
            assert cache is not None
            try:
                gained = self._memory.catch_up(cache, answer.tokens, answer.selected, answer.reusable)
            except Exception as error:  # a fault of this request ends no other
                self._leave(reading[0], error)
                return
            if not answer.token_ids:
                answer.cached_tokens += gained
                self._cached_tokens += gained

    def _with_memory(self, planned: list[Work[Request]]) -> list[Work[Request]]:
        """The part of a plan for which there are pages; where they run out, those that joined last wait again."""
        for w in planned:
            try:
                self._make_room(w)
            except Exception as error:  # a fault of this request ends no other
                self._leave(w.sequence, error)
        return [w for w in planned if w.sequence.cache is not None]

    def _make_room(self, work: Work[Request]) -> None:
        """Give a sequence pages for its part of a step, or let it wait again."""
        while work.sequence.cache is not None and not self._memory.grow(work.sequence.cache, work.tokens):
            if self._sessions.give_up(self._running, must=True):
                continue
            last = self._scheduler.preempt()
            assert last.cache is not None
            self._memory.keep(last.cache)
            last.cache = None
            self._preemptions += 1

    def _sequence_step(self, work: Work[Request], guess: Guess, ran: int) -> SequenceStep:
        request = work.sequence
        assert request.cache is not None
        tokens, select = request.answer.next_block(request.held, work.tokens)
        tokens = np.append(tokens, np.array(guess.tokens[:ran], np.int64))
        every = ran > 0 or isinstance(request.answer, Scoring)
        return SequenceStep(cache=request.cache, tokens=tokens, select=select, logits="all" if every else "last")

    def _score(self, request: Request, scoring: Scoring, result: SequenceResult) -> None:
        """Take the logits of a step for a scoring."""
        try:
            scoring.take(result.logits_TV, request.held)
        except Exception as error:  # a fault of this request ends no other
            self._leave(request, error)
            return
        if scoring.complete:
            self._leave(request)

    def _continue(
        self, request: Request, answer: Answer, result: SequenceResult, guess: Guess, ran: int, began: float
    ) -> None:
        """Count a step for an answer, and draw its next tokens if all before them have run."""
        assert request.cache is not None
        if request.held < len(answer.tokens) or request.reads_only:
            answer.spend(began, time.perf_counter())
            if self._shares_pieces:
                self._memory.share(request.cache)
            if request.held == len(answer.tokens):
                self._leave(request)
            return
        siblings, request.siblings = request.siblings, []
        # They wait with one token each, before all others, and go on from the prompt's stored pages.
        for sibling in reversed(siblings):
            self._scheduler.submit_first(sibling)
        if siblings:
            self._memory.keep(request.cache.fork())
        self._advance(request, answer, result, guess, ran, began)
        for sibling in siblings:
            assert isinstance(sibling.answer, Answer)
            self._advance(sibling, sibling.answer, result, NO_GUESS, 0, began)

    def _advance(
        self, request: Request, answer: Answer, result: SequenceResult, guess: Guess, ran: int, began: float
    ) -> None:
        """Draw an answer's next tokens: one, and one more for each guessed token that was right."""
        before, accepted = len(answer.tokens), answer.accepted_tokens
        error: Exception | None = None
        try:
            for piece in answer.follow(result.logits_TV, result.rows_L2, guess, ran, began):
                if piece:
                    request.put(Piece(piece, len(answer.tokens) - answer.prompt_tokens))
        except Exception as fault:  # a fault of this request ends no other
            error = fault
        accepted = answer.accepted_tokens - accepted
        if request.cache is not None:
            request.cache.truncate(before + accepted)
        self._generated += len(answer.tokens) - before
        self._guessed += ran
        self._accepted += accepted
        if error is not None or answer.finish_reason is not None:
            self._leave(request, error)
        elif before == answer.prompt_tokens and request.cache is not None:
            self._memory.share(request.cache)

    def _leave(self, request: Request, error: BaseException | None = None) -> None:
        """Take a request that has ended out of the schedule, keep its pages for later ones, and tell its reader."""
        if request.siblings:
            # It ended before its prompt was read: the next answer reads it.
            heir = request.siblings[0]
            heir.siblings, request.siblings = request.siblings[1:], []
            self._scheduler.submit_first(heir)
        turns, answer = request.turns, request.answer
        if turns is None:
            if request.cache is not None:
                self._memory.keep(request.cache)
        elif request.cache is not None or request.has_joined:
            self._sessions.pause(turns, request.cache)
        request.cache, self._full_until = None, -math.inf
        if not request.reads_only:
            self._finished += 1
            if turns is not None:
                turns.tokens, turns.selected = answer.tokens, answer.selected
        if turns is not None and turns.is_closed:
            self._sessions.forget(turns)
        elif turns is not None and not request.reads_only and answer.finish_reason is not None:
            self._run_newest(turns)
        # Last: where anything before fails, the engine ends, and tells those who are in the schedule.
        self._scheduler.remove(request)
        request.left.set()
        request.put(error)

    def _run_newest(self, turns: Turns) -> None:
        """Run a paused session's newest token, which no step has run yet, so that nothing but new tokens is left."""
        pause = turns.pause
        if pause is not None and len(pause.tokens) + 1 == len(turns.tokens) < self.model.context:
            answer = self.model.new_answer(turns.tokens, max_tokens=1, selected=turns.selected)
            self._scheduler.submit(Request(answer, self._executor.block_tokens, turns, reads_only=True))

    def _close_session(self, turns: Turns) -> None:
        for request in self._scheduler.sequences:
            if request.turns is turns:
                request.answer.finish_reason = request.answer.finish_reason or "cancelled"
                self._leave(request)
        self._sessions.forget(turns)
        self._full_until = -math.inf

    def _run_settings(self) -> dict[str, str]:
        """What the keys and values of a saved session depend on, beside its tokens."""
        plan = self.model.plan
        return {
            "artifact": self.model.digest,
            "mode": self.model.mode,
            "cache format": self._memory.pool.format,
            "placement": "none" if plan is None else f"{self.model.device}, {plan.vram_bytes} bytes",
        }

    def _save(self, turns: Turns, path: Path) -> None:
        """Write a session to a file."""
        for request in (r for r in self._scheduler.sequences if r.turns is turns):
            self._leave(request)
        self._sessions.save(turns, path, self._run_settings())

    def _restore(self, turns: Turns, stored: session_file.StoredSession) -> None:
        if held := stored.held:
            file = self._sessions.new_file()
            file.write_bytes(stored.pages.data)
            self._sessions.restore(turns, file, stored.tokens[:held], stored.selected[:held])


def _machine_memory() -> int:
    """Bytes of RAM of this machine; without limit where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
