"""An engine: one model that serves many requests at once, each with the text that it would get alone.

One thread runs step after step. A step takes the next tokens of several sequences to the executor, which computes each
as if it were alone. Callers read their streams in threads of their own; a slow reader holds up nobody.
"""

import atexit
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack

from llvmlite.binding import get_host_cpu_name

from pi_runtime.artifact.layer_classes import sequence_nbytes
from pi_runtime.engine.core import Core
from pi_runtime.engine.loop import Loop
from pi_runtime.engine.model import Model
from pi_runtime.engine.options import EngineOptions
from pi_runtime.engine.page_files import PageFiles
from pi_runtime.engine.scheduler import PIECE, PromptPace, Scheduler
from pi_runtime.engine.stats import EngineStats
from pi_runtime.engine.store import PrefixStore
from pi_runtime.engine.stream import Reading, Scores, Stream, Vector
from pi_runtime.errors import ClosedError, UsageError
from pi_runtime.execution.pages import PagePool
from pi_runtime.kernels import SUMS
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.sequence.drafts import StepTimes
from pi_runtime.sequence.embedding import Pooling
from pi_runtime.sequence.sequence import Origin, Rank, TokenSequence
from pi_runtime.sequence.settings import AnswerSettings, names_settings

SNAPSHOTS = 16
"""Snapshots of states, for each slot, that a budget has room for unless asked otherwise: one a turn of a talk."""
DISK_BUDGET = 8 << 30
"""Bytes of keys and values in `kv_disk` unless asked otherwise."""
CLOSE_S = 5.0
"""Time in which an engine that is closed writes what it keeps to disk, unless asked otherwise."""
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

    `kv_disk`: a folder for keys and values that memory has no room for, at most `kv_disk_budget` bytes (8 GiB): also
    after a restart a prompt begins with what is found there. Engines may share it. `say` is told, once, what fails;
    without it that is a warning.

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
        kv_disk: str | Path | None = None,
        kv_disk_budget: int | None = None,
        say: Callable[[str], object] = warnings.warn,
    ) -> None:
        folder = None if kv_disk is None else Path(kv_disk)
        EngineOptions(
            slots=slots,
            piece=piece,
            decode_share=decode_share,
            speculate=speculate,
            kv_disk=folder,
            kv_disk_budget=kv_disk_budget,
        )
        self.model, self._executor = model, model.executor
        self._speculation = model.speculation(speculate, StepTimes())
        self._store = self._opened_store(
            self._default_budget(slots) if kv_budget is None else kv_budget, folder, kv_disk_budget, say
        )
        scheduler: Scheduler[TokenSequence] = Scheduler(slots, piece or PIECE)
        pace = PromptPace(decode_share, piece, model.executor.block_tokens)
        self._core = Core(model.executor, self._store, scheduler, pace, self._speculation)
        self._loop = Loop(self._core, self._store)
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
        self._store.check(first.max_positions)
        answers = [first]
        settings.pop("expected", None)
        for k in range(1, count):
            settings["sampling"] = replace(first.sampling, number=first.sampling.number + k)
            answers.append(self.model.new_answer(first.tokens, **settings))
        if self.drafts:
            first.lookup.prepare()  # here rather than in the engine's thread
            for answer in answers[1:]:
                answer.lookup = first.lookup.beside(answer.tokens)
        for answer in answers:
            answer.origin, answer.may_go_on = origin, count == 1
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

    def read(self, prompt: str | Sequence[int], *, cache_salt: str = "", client: str = "") -> Reading:
        """Read a prompt ahead: it is computed, and nothing is drawn. A later prompt begins with what it has in common.

        It runs only while no answer and no prompt of others does. A client has one at a time: a newer one takes the
        place of the one before, of which stays what has been read. Raises errors as `generate` does.
        """
        sequence = self.model.new_reading(prompt)
        self.submit(sequence, Origin(cache_salt, client))
        return Reading(sequence)

    def embed(
        self, prompt: str | Sequence[int], pooling: Pooling = "mean", *, cache_salt: str = "", client: str = ""
    ) -> Vector:
        """The vector of a text as `Model.embed` gives it, computed beside all other requests."""
        sequence = self.model.new_embedding(prompt, pooling)
        self.submit(sequence, Origin(cache_salt, client))
        return Vector(sequence)

    def submit(self, sequence: TokenSequence, origin: Origin) -> None:
        """Let a sequence run. Raises UsageError for one that does not fit `kv_budget` even alone."""
        self._store.check(sequence.max_positions)
        sequence.origin = origin
        self._inbox.submit(sequence)

    @property
    def drafts(self) -> bool:
        """Whether tokens may be drafted, so that what is expected is of use."""
        return self._speculation.is_on

    @property
    def stats(self) -> EngineStats:
        """The figures up to now."""
        core, pool, scheduler = self._core, self._store.pool, self._core.scheduler
        live, waiting = [*scheduler.live], scheduler.waiting
        running = sum(sequence.rank is Rank.ASKED for sequence in live)
        asked = running + sum(sequence.rank is Rank.ASKED for sequence in waiting)
        samples = sum(len(sequence.samples) for sequence in [*live, *waiting])
        return EngineStats(
            running=running,
            waiting=asked - running + samples + self._inbox.num_sequences,
            reading_ahead=len(live) + len(waiting) - asked,
            finished=core.finished,
            pages_used=pool.in_use,
            pages_kept=self._store.tree.size,
            pages_free=pool.free,
            page_bytes=pool.page_nbytes,
            bytes_used=pool.in_use_nbytes,
            prompt_tokens=core.prompt_tokens,
            cached_tokens=core.cached_tokens,
            generated_tokens=core.generated_tokens,
            ahead_tokens=core.ahead_tokens,
            **vars(core.drafts),
            preemptions=core.preemptions,
            **self._store.disk_figures(),
            steps=self._loop.steps,
            busy_s=self._loop.busy_s,
            disk=self._executor.disk,
        )

    @property
    def stalled_s(self) -> float:
        """Seconds for which the present step has made no progress, as far as was looked; 0 between steps."""
        return self._loop.watch.stalled_s

    @property
    def ended(self) -> ClosedError | None:
        """Why it answers nothing any more: it was closed, or has failed; None while it answers."""
        return self._inbox.ended

    def close(self, seconds: float = CLOSE_S) -> None:
        """End the engine after the present step. What still runs or waits ends with an error.

        `seconds`: time in which what it keeps is written to `kv_disk`.
        """
        self._loop.close(seconds)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _default_budget(self, slots: int) -> int:
        if self._executor.kv_room is not None:
            return self._executor.kv_room
        pool = self._executor.new_pool()
        states = SNAPSHOTS * sum(one.page.nbytes for one in pool.classes if one.is_state)
        nbytes = sequence_nbytes(pool.classes, self.model.context, self._executor.block_tokens)
        nbytes = pool.budget_for(nbytes + states)
        return max(nbytes, min(slots * nbytes, _machine_memory() // 4))

    def _opened_store(
        self, budget: int, folder: Path | None, disk_budget: int | None, say: Callable[[str], object]
    ) -> PrefixStore:
        """The store of prefixes, with its files where there is a folder for them."""
        model, pool = self.model, self._executor.new_pool(budget)
        files = None
        if folder is not None:
            disk_budget = DISK_BUDGET if disk_budget is None else disk_budget
            files = PageFiles(folder, disk_budget, _run(model, pool), pool.classes, say)
        # A plan divides the sum of a token with selection between two sides, even where nothing is skipped.
        selection_matters = model.mode != "dense" or model.plan is not None
        return PrefixStore(model.executor, pool, selection_matters=selection_matters, files=files)


def _run(model: Model, pool: PagePool) -> dict[str, str]:
    """What the bits of keys and values depend on, beside the tokens and how these run."""
    plan = model.plan
    classes = (f"{len(one.layers)} layers, window {one.window}, {one.page.nbytes} bytes" for one in pool.classes)
    return {
        "artifact": model.digest,
        "name": model.name,
        "mode": model.mode,
        "placement": "none" if plan is None else f"{model.device}, {plan.vram_bytes} bytes",
        "cache": pool.format,
        "pages": "; ".join(classes),
        # Exponentials are the C library's, which chooses by processor.
        "sums": f"{SUMS}, {ISA.name}, {get_host_cpu_name()}, {' '.join(platform.libc_ver())}",
    }


def _machine_memory() -> int:
    """Bytes of RAM of this machine; without limit where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
