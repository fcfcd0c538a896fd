"""An engine: one model that serves many requests at once, each with the text that it would get alone.

One thread runs step after step. A step takes the next tokens of several sequences to the executor, which computes each
as if it were alone. Callers read their streams in threads of their own; a slow reader holds up nobody.
"""

import atexit
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack

from pi_runtime.artifact.layer_classes import sequence_nbytes
from pi_runtime.engine.caches import EngineCaches
from pi_runtime.engine.core import Core
from pi_runtime.engine.loop import Loop
from pi_runtime.engine.memory import EngineMemory
from pi_runtime.engine.model import Model
from pi_runtime.engine.options import EngineOptions
from pi_runtime.engine.prompt_pace import PromptPace
from pi_runtime.engine.scheduler import PIECE, Scheduler
from pi_runtime.engine.session_state import SessionState
from pi_runtime.engine.sessions import session_file
from pi_runtime.engine.sessions.session import Session
from pi_runtime.engine.sessions.suspended import SuspendedSessions
from pi_runtime.engine.stats import EngineStats
from pi_runtime.engine.stream import Scores, Stream
from pi_runtime.errors import UsageError
from pi_runtime.sequence.sequence import Origin, TokenSequence
from pi_runtime.sequence.settings import AnswerSettings, names_settings
from pi_runtime.sequence.speculation import StepTimes

MAX_ANSWERS = 1024
"""To one prompt at once: each takes memory before it runs."""


class Engine:
    """Serves many requests with one model. A context manager; closing it ends what still runs with an error.

    `slots`: most requests that run at once; the others wait. `kv_budget`: bytes for keys and values, of the
    running requests and of what is kept because a later prompt may begin with it. None: as many as `slots` requests
    with a full context take, but no more than a quarter of the machine's memory, and no less than one such request
    takes; for a model within a budget of memory, what that leaves (see `load`). Memory is taken as it is needed.
    `piece`: most tokens of prompts in one step; fewer make shorter gaps between others' tokens. None goes by times.
    `decode_share`: share of their speed that answers keep while prompts are read; 0 reads prompts first. `speculate`:
    how many tokens are drafted at a time, as for `Model.generate`. No setting changes a text.

    A request begins with what is kept of earlier prompts that begin alike, and its figures and its speed tell so. Where
    callers do not trust each other give each a `cache_salt`: only requests with the same salt share what is kept.
    `client` says whose a request is: clients take turns for free slots, and each one's requests go in order.

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
        self._memory = EngineMemory(
            model.executor,
            self._default_budget(slots) if kv_budget is None else kv_budget,
            # A plan divides the sum of a token with selection between two sides, even where nothing is skipped.
            selection_matters=model.mode != "dense" or model.plan is not None,
        )
        self._sessions = SuspendedSessions(self._memory)
        scheduler: Scheduler[TokenSequence] = Scheduler(slots, piece or PIECE)
        caches = EngineCaches(self._memory, self._sessions, model.context)
        self._core = Core(
            model.executor,
            caches,
            scheduler,
            PromptPace(decode_share, piece, model.executor.block_tokens),
            self._speculation,
        )
        self._loop = Loop(self._core, caches)
        self._inbox = self._loop.inbox
        # A thread that is killed amid a step when Python ends may take the process down.
        atexit.register(self.close)

    @names_settings
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        cache_salt: str = "",
        client: str = "",
        **settings: Unpack[AnswerSettings],
    ) -> Stream:
        """Continue a prompt as `Model.generate` does, beside all other requests. Any thread may call it.

        Raises PromptError or UsageError at once for what cannot be run, and UsageError for what does not fit
        `kv_budget` even alone.
        """
        return self.generate_many(prompt, 1, cache_salt=cache_salt, client=client, **settings)[0]

    @names_settings
    def generate_many(
        self,
        prompt: str | Sequence[int],
        count: int,
        *,
        cache_salt: str = "",
        client: str = "",
        **settings: Unpack[AnswerSettings],
    ) -> list[Stream]:
        """Up to `MAX_ANSWERS` answers to one prompt, which is read once. Each has draws of its own.

        Answer k is the one that `generate` gives with the same seed and `Sampling.number` k more.
        """
        if not 1 <= count <= MAX_ANSWERS:
            raise UsageError(f"{count} answers", expected=f"1 to {MAX_ANSWERS}")
        first, origin = self.model.new_answer(prompt, **settings), Origin(cache_salt, client)
        self._memory.check(first.max_positions)
        answers = [first]
        settings.pop("expected", None)
        for k in range(1, count):
            settings["sampling"] = replace(first.sampling, number=first.sampling.number + k)
            answers.append(self.model.new_answer(first.tokens, **settings))
        if self.drafts:
            first.lookup.prepare()  # here rather than in the engine's thread
            for answer in answers[1:]:
                answer.lookup = first.lookup.beside(answer.tokens)
        for answer in answers[1:]:
            answer.origin = origin
        first.samples = [*answers[1:]]
        self.submit(first, origin)
        return [Stream(answer, self._executor.neurons) for answer in answers]

    def score(
        self,
        prompt: str | Sequence[int],
        *,
        first: int = 1,
        top: int = 0,
        cache_salt: str = "",
        client: str = "",
    ) -> Scores:
        """Log-probabilities of a prompt as `Model.score` gives them, computed beside all other requests.

        Pages that earlier scorings stored are used up to token `first`. Raises errors as `generate` does.
        """
        sequence = self.model.new_scoring(prompt, first=first, top=top)
        if sequence.complete:
            sequence.finish(None)
        else:
            self.submit(sequence, Origin(cache_salt, client))
        return Scores(sequence)

    def session(self, tokens: Sequence[int] = (), *, cache_salt: str = "", client: str = "") -> Session:
        """A text that is continued in turns, and what has been computed of it.

        It may begin with tokens, which are checked, and read, with the first turn.
        """
        return Session(self, SessionState(cache_salt, client, list(tokens), [False] * len(tokens)))

    def load_session(self, path: str | Path, *, cache_salt: str = "", client: str = "") -> Session:
        """A session that `Session.save` wrote, by the same artifact, mode and cache format, in any process.

        Its keys and values are taken on trust: give one that others may have written a `cache_salt` of its own. Raises
        InputError for a file that is damaged or no session, UsageError where it does not belong to this model.
        """
        stored = session_file.load(Path(path), self._run_settings(), self._memory.pool.classes)
        state = SessionState(cache_salt, client, stored.tokens, stored.selected)
        self._inbox.call(lambda: self._sessions.restore(state, stored))
        return Session(self, state)

    def submit(self, sequence: TokenSequence, origin: Origin) -> None:
        """Let a sequence run. One of a session takes the place of what was being read ahead of it.

        Raises UsageError for one that does not fit `kv_budget` even alone.
        """
        self._memory.check(sequence.max_positions)
        sequence.origin = origin
        self._inbox.submit(sequence)

    def save_session(self, session: SessionState, path: Path) -> None:
        """Write a session that is paused to a file."""

        def save() -> None:
            self._core.leave_session(session)
            self._sessions.save(session, path, self._run_settings())

        self._inbox.call(save)

    def forget(self, session: SessionState) -> None:
        """Drop what is kept of a session that nobody will continue."""
        session.is_closed = True
        self._inbox.forget(session)

    @property
    def drafts(self) -> bool:
        """Whether tokens may be drafted, so that what is expected is of use."""
        return self._speculation.is_on

    @property
    def stats(self) -> EngineStats:
        """The figures up to now."""
        core, pool, scheduler = self._core, self._memory.pool, self._core.scheduler
        live, waiting = scheduler.live, list(scheduler.waiting)
        samples = sum(len(sequence.samples) for sequence in [*live, *waiting])
        return EngineStats(
            running=len(live),
            waiting=len(waiting) + samples + self._inbox.num_sequences,
            finished=core.finished,
            pages_used=pool.in_use,
            pages_kept=self._memory.kept,
            pages_free=pool.free,
            page_bytes=pool.page_nbytes,
            bytes_used=pool.in_use_nbytes,
            prompt_tokens=core.prompt_tokens,
            cached_tokens=core.cached_tokens,
            generated_tokens=core.generated_tokens,
            **vars(core.drafts),
            preemptions=core.preemptions,
            paused_sessions=self._sessions.count,
            written_sessions=self._sessions.written,
            dropped_sessions=self._sessions.dropped,
            busy_s=self._loop.busy_s,
            disk=self._executor.disk,
        )

    @property
    def stalled_s(self) -> float:
        """Seconds for which the present step has made no progress, as far as was looked; 0 between steps."""
        return self._loop.watch.stalled_s

    @property
    def ended(self) -> UsageError | None:
        """Why it answers nothing any more: it was closed, or has failed; None while it answers."""
        return self._inbox.ended

    def close(self) -> None:
        """End the engine after the present step. What still runs or waits ends with an error."""
        self._loop.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _default_budget(self, slots: int) -> int:
        if self._executor.kv_room is not None:
            return self._executor.kv_room
        pool = self._executor.new_pool()
        nbytes = pool.budget_for(sequence_nbytes(pool.classes, self.model.context, self._executor.block_tokens))
        return max(nbytes, min(slots * nbytes, _machine_memory() // 4))

    def _run_settings(self) -> dict[str, str]:
        """What the keys and values of a saved session depend on, beside its tokens."""
        plan, classes = self.model.plan, self._memory.pool.classes
        windows = [f"{one.window} in {len(one.layers)} layers" for one in classes if one.window]
        return {
            "artifact": self.model.digest,
            "mode": self.model.mode,
            "cache format": self._memory.pool.format,
            "placement": "none" if plan is None else f"{self.model.device}, {plan.vram_bytes} bytes",
            **({"windows": ", ".join(windows)} if windows else {}),
        }


def _machine_memory() -> int:
    """Bytes of RAM of this machine; without limit where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
