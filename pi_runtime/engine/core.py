"""The engine's core: plan a step, execute it, and let every sequence in it advance.

It has no thread and no queue of messages: whoever has requests submits them, and calls `step` as long as any is left.
An engine does so in a thread of its own, for many; `Model.generate` in the caller's, for one.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.engine.scheduler import PromptPace, Scheduler
from pi_runtime.execution.executor import Executor, SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PAGE_POSITIONS
from pi_runtime.sequence.answer import AnswerSequence
from pi_runtime.sequence.drafts import NO_DRAFT, Draft, Speculation
from pi_runtime.sequence.sequence import Output, Rank, Status, TokenSequence, snapshot_places
from pi_runtime.sequence.stats import DraftFigures


class Caches(Protocol):
    """What the core asks of whoever holds keys and values."""

    @property
    def may_open(self) -> bool:
        """Whether it is worth while to ask for a further cache."""

    def open(self, sequence: TokenSequence, live: Iterable[KVCache]) -> KVCache | None:
        """A cache with room for a sequence's tokens, with what is stored of them; None where there is too little.

        `live`: the caches of the sequences that have joined.
        """

    def grow(self, cache: KVCache, count: int) -> bool:
        """Make room for so many further tokens; False where there is too little."""

    def grow_freely(self, cache: KVCache, count: int) -> bool:
        """Make room for so many further tokens where nobody uses it; False where none is free."""

    def catch_up(self, cache: KVCache, sequence: TokenSequence) -> None:
        """Take what others have stored of a sequence's tokens meanwhile."""

    def share(self, cache: KVCache) -> None:
        """Let later sequences begin with what a cache holds, which goes on."""

    def keep(self, cache: KVCache) -> None:
        """Close a cache, and let later sequences begin with what it held."""

    def release(self, sequence: TokenSequence, cache: KVCache | None) -> TokenSequence | None:
        """Take back the cache of a sequence that ends, if it had one; returns what is worth reading now."""

    def count_step(self, tokens: int, seconds: float) -> None:
        """Count what tokens of prompts took."""


class Core:
    """Runs sequences step by step, and counts what it does."""

    def __init__(
        self,
        executor: Executor,
        caches: Caches,
        scheduler: Scheduler[TokenSequence],
        pace: PromptPace,
        speculation: Speculation,
    ) -> None:
        self._executor, self._caches, self._pace, self._speculation = executor, caches, pace, speculation
        self.scheduler = scheduler
        self.held: dict[TokenSequence, KVCache] = {}
        """The caches of the sequences that have joined."""
        self._shares_pieces = False
        """Whether several prompts are being read, or were beside the one that is left: they may begin alike."""
        self.finished = self.preemptions = self.ahead_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.drafts = DraftFigures()
        self._keeps_states = any(one.is_state for one in executor.new_pool().classes)

    def submit(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for a slot, in place of those that it makes useless."""
        for older in self.scheduler.replaced_by(sequence):
            self.leave(older)
        self.scheduler.submit(sequence)

    def step(self) -> None:
        """Run one step: sequences leave and join, tokens run, new ones are drawn."""
        self._drop_cancelled()
        self._admit()
        self._catch_up()
        parts = self._plan()
        if not parts:
            return
        decoding = [sequence.is_decoding for sequence, _ in parts]
        generated, began = self.generated_tokens, time.perf_counter()
        results = self._executor.step([step for _, step in parts])
        seconds = time.perf_counter() - began
        for (sequence, _), result in zip(parts, results, strict=True):
            with self._fault_of(sequence):
                self._advance(sequence, result)
        self._count(parts, decoding, seconds, self.generated_tokens - generated)

    def leave(self, sequence: TokenSequence, error: BaseException | None = None) -> None:
        """Take a sequence that has ended out of the schedule, give its cache back, and tell its reader."""
        if sequence.samples:
            # It ended before its prompt was read: the next answer reads it.
            leader, *others = sequence.samples
            leader.samples, sequence.samples = others, []
            self.scheduler.submit_next(leader)
        again = self._caches.release(sequence, self.held.pop(sequence, None))
        self.finished += sequence.rank is Rank.ASKED
        # Last: where anything before fails, the engine ends, and tells those who are in the schedule.
        self.scheduler.remove(sequence)
        sequence.finish(error)
        if again is not None and error is None:
            self.submit(again)

    @contextmanager
    def _fault_of(self, sequence: TokenSequence) -> Iterator[None]:
        """Let what fails in the block end the sequence that it is done for, and no other."""
        try:
            yield
        except Exception as error:
            self.leave(sequence, error)

    # Plan.

    def _drop_cancelled(self) -> None:
        # An answer that leaves before its prompt was read puts the next one to it into the schedule.
        while cancelled := [sequence for sequence in self.scheduler.requests if sequence.cancelled]:
            for sequence in cancelled:
                sequence.finish_reason = "cancelled"
                self.leave(sequence)

    def _admit(self) -> None:
        """Let those that wait join, in order, as slots and memory allow, in place of any that has to wait for them."""
        while self.scheduler.has_to_yield:
            self._put_off()
        while self._caches.may_open and (sequence := self.scheduler.next_to_join()) is not None:
            with self._fault_of(sequence):
                cache = self._caches.open(sequence, self.held.values())
                if cache is not None:
                    self._join(sequence, cache)
                elif sequence.rank is not Rank.ASKED:
                    self.leave(sequence)  # it is no use to wait for the memory of others of its rank
                else:
                    return

    def _join(self, sequence: TokenSequence, cache: KVCache) -> None:
        if sequence.status is Status.WAITING:
            sequence.cached_tokens = cache.length
            if sequence.rank is Rank.ASKED:
                self.prompt_tokens += sequence.prompt_tokens
                self.cached_tokens += cache.length
        self.held[sequence], sequence.num_computed, sequence.status = cache, cache.length, Status.RUNNING
        block = self._executor.block_tokens
        sequence.max_block = min(block, BLOCK_TOKENS) if sequence.needs_all_logits else block
        if self._keeps_states:
            tokens = sequence.tokens[: sequence.prompt_tokens]
            sequence.stops = snapshot_places(tokens, sequence.ends_of_messages, PAGE_POSITIONS)
        self.scheduler.join()
        if sequence.num_pending == 0:
            self.leave(sequence)

    def _catch_up(self) -> None:
        """Let a prompt go on where another has come to, if both are being read and begin alike."""
        reading = self.scheduler.reading
        self._shares_pieces = len(reading) > 1 or (self._shares_pieces and len(reading) == 1)
        if self._shares_pieces:
            sequence, cache = reading[0], self.held[reading[0]]
            with self._fault_of(sequence):
                self._caches.catch_up(cache, sequence)
                gained, sequence.num_computed = cache.length - sequence.num_computed, cache.length
                if len(sequence.tokens) == sequence.prompt_tokens:
                    sequence.cached_tokens += gained
                    self.cached_tokens += gained * (sequence.rank is Rank.ASKED)
                if sequence.num_pending == 0:  # it was only to be read, and another has read it all
                    self.leave(sequence)

    def _plan(self) -> list[tuple[TokenSequence, SequenceStep]]:
        """What runs in the next step: tokens for which there is memory, and what may come after them."""
        is_ahead = any(sequence.rank is not Rank.ASKED for sequence in self.scheduler.live)
        planned = self.scheduler.plan(self._pace.tokens(self.scheduler.decoding, ahead=is_ahead))
        for sequence, tokens in planned:
            with self._fault_of(sequence):
                self._make_room(sequence, tokens)
        work = [(sequence, tokens) for sequence, tokens in planned if sequence.is_running]
        for leader, _ in work:
            for sequence in (leader, *leader.samples):
                sequence.start_step()
        drafts = self._drafts([sequence for sequence, _ in work])
        return [(s, self._step_of(s, tokens, drafts[s])) for s, tokens in work if s.is_running]

    def _make_room(self, sequence: TokenSequence, tokens: int) -> None:
        """Give a sequence memory for its part of a step; where there is too little, those that joined last wait."""
        while (cache := self.held.get(sequence)) is not None and not self._caches.grow(cache, tokens):
            self._put_off()
            self.preemptions += 1

    def _put_off(self) -> None:
        """Let the sequence that joined last wait again; what was computed of it stays until its memory is needed."""
        last = self.scheduler.preempt()
        self._caches.keep(self.held.pop(last))
        last.num_computed, last.status = 0, Status.PREEMPTED

    def _drafts(self, sequences: Sequence[TokenSequence]) -> dict[TokenSequence, Draft]:
        """For each sequence of a step what may come next; none where any prompt is read.

        Drafts take only memory that nobody uses. A sequence for which it fails leaves.
        """
        found, possible = dict.fromkeys(sequences, NO_DRAFT), dict[TokenSequence, Sequence[Draft]]()
        answers = [s for s in sequences if isinstance(s, AnswerSequence) and s.is_decoding]
        if not self._speculation.is_on or len(answers) < len(sequences):
            return found
        for answer in answers:
            with self._fault_of(answer):
                possible[answer] = answer.drafts()
        planned = self._speculation.planned([*possible.values()])
        plain_s = self._speculation.times.plain(len(possible))
        for sequence, (draft, length) in zip(possible, planned, strict=True):
            with self._fault_of(sequence):
                fits = length and self._caches.grow_freely(self.held[sequence], 1 + length)
                found[sequence] = self._speculation.run(draft, length if fits else 0, plain_s)
        return found

    def _step_of(self, sequence: TokenSequence, max_tokens: int, draft: Draft) -> SequenceStep:
        """The work of one sequence in the next step."""
        tokens, select = sequence.next_block(max_tokens, draft)
        every = draft.num_run > 0 or sequence.needs_all_logits
        is_head = isinstance(sequence, AnswerSequence)
        cache, states = self.held[sequence], () if is_head and not self._speculation.is_on else sequence.states
        logits: Literal["last", "all"] = "all" if every else "last"
        tried = draft.num_run > 0
        return SequenceStep(cache=cache, tokens=tokens, select=select, logits=logits, is_tried=tried, states=states)

    # Advance.

    def _advance(self, sequence: TokenSequence, result: SequenceResult) -> None:
        """Let a sequence take a step's result; where its prompt is read now, further answers draw a token too."""
        first, draft = sequence.num_computed, sequence.drafted
        ran = first + sequence.num_scheduled
        self.ahead_tokens += sequence.num_scheduled * (sequence.rank is not Rank.ASKED)
        samples = self._start_samples(sequence) if ran == len(sequence.tokens) else []
        sequence.take_states(first, result.states_TC)
        self._take(sequence, sequence.advance(result.logits_TV, result.rows_L2))
        self.drafts += draft.figures(sequence.num_computed - ran)
        for sample in samples:
            assert isinstance(sample, AnswerSequence)
            self._take(sample, sample.draw(result.logits_TV, result.rows_L2))

    def _start_samples(self, leader: TokenSequence) -> list[TokenSequence]:
        """Queue the further answers to a prompt that has just been read, ahead of their client's other requests."""
        samples, leader.samples = leader.samples, []
        for sample in reversed(samples):
            self.scheduler.submit_next(sample)
        if samples:
            self._caches.keep(self.held[leader].fork())
        return samples

    def _take(self, sequence: TokenSequence, texts: Iterator[str]) -> None:
        """Hand out what a sequence yields as it advances, and let it leave if it is complete."""
        cache, before = self.held.get(sequence), len(sequence.tokens)
        error: Exception | None = None
        try:
            for text in texts:
                if text:
                    sequence.put(Output(text, len(sequence.tokens) - sequence.prompt_tokens))
        except Exception as fault:  # a fault of this sequence ends no other
            error = fault
        self.generated_tokens += len(sequence.tokens) - before
        if cache is not None and cache.length > sequence.num_computed:
            cache.truncate(sequence.num_computed)
        has_read = before == sequence.prompt_tokens < len(sequence.tokens)
        if error is not None or sequence.complete:
            self.leave(sequence, error)
        elif cache is not None:
            may_begin_alike = self._shares_pieces and not sequence.is_decoding
            if has_read or may_begin_alike or cache.length in sequence.stops:
                self._caches.share(cache)

    def _count(
        self,
        parts: Sequence[tuple[TokenSequence, SequenceStep]],
        decoding: Sequence[bool],
        seconds: float,
        generated: int,
    ) -> None:
        """Tell those who plan later steps how long this one took. `decoding`: which parts were decoding before it."""
        tokens, selects = sum(len(step.tokens) for _, step in parts), {step.select for _, step in parts}
        if all(decoding) and selects == {True}:
            if tokens > len(parts) and (plain_s := self._speculation.times.plain(len(parts))) is not None:
                made_s = sum(sequence.drafted.made_s for sequence, _ in parts)
                self.drafts += DraftFigures(drafts_won_s=generated / len(parts) * plain_s - seconds - made_s)
            self._speculation.times.count(len(parts), tokens, seconds)
        elif selects == {False}:
            self._caches.count_step(tokens, seconds)
        gained = max(1.0, generated / len(parts)) if all(decoding) else 1.0
        reading = sum(s.num_scheduled for (s, _), is_decoding in zip(parts, decoding, strict=True) if not is_decoding)
        self._pace.count(seconds, sum(decoding), reading, gained)
