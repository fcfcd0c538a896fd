"""A sequence: its tokens, how many of them have been computed, what it is doing, and what has come of it.

There is a class for each goal: `AnswerSequence` is continued by new tokens, `ScoreSequence` gives the log-probabilities
of its own tokens, and `ReadSequence` is computed so that a later sequence can begin with it.

Shape letters: T tokens of a step, V vocabulary, L layers.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from queue import SimpleQueue
from threading import Event
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.errors import ContextError, UsageError
from pi_runtime.sequence.drafts import NO_DRAFT, Draft
from pi_runtime.sequence.sampling import TokenLogprobs, check_finite, check_logprobs, token_logprobs
from pi_runtime.sequence.stats import Stats

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


MESSAGES = 8
"""Messages of a prompt, the last ones, at whose ends states are kept."""


class Rank(IntEnum):
    """Which sequences come before which."""

    ASKED = 0
    """Somebody waits for what comes of it."""
    AHEAD = 1
    """A prompt that is read before anybody asks what follows it, such as one that is being typed."""
    AGAIN = 2
    """An answer that is read as the part of a prompt that it may become."""


class Status(Enum):
    """What a sequence is doing. Whoever runs it sets this."""

    WAITING = "waiting"
    """It has never had a slot."""
    RUNNING = "running"
    """It has a slot, and memory for its keys and values."""
    PREEMPTED = "preempted"
    """It had a slot, and waits for one again because others needed its memory."""
    FINISHED = "finished"
    """Nothing of it runs any more."""


@dataclass(eq=False)
class Origin:
    """The client that a sequence is run for, and the salt that says with whom it shares stored keys and values."""

    salt: str = ""
    """Only sequences with the same salt share stored keys and values."""
    client: str = ""
    """Whose it is: clients take turns where sequences wait."""


@dataclass(eq=False)
class Outcome:
    """What is known of how a sequence ended; its reader may know more later."""

    in_call: bool = False
    """Whether it ended in a call of a tool: its text goes on once the tool has worked."""


class Output(NamedTuple):
    """What has come of a sequence: some text, or its end."""

    text: str
    num_tokens: int
    """How many tokens the answer has with this text; at the end all of them."""
    ended: bool = False
    error: BaseException | None = None
    """What ended it, if it was an error."""


def snapshot_places(tokens: Sequence[int], ends: Collection[int], page: int) -> list[int]:
    """Where states of a prompt are kept for later prompts, which can be gone on from at no other positions, rising.

    At ends of pages: the last one that lies before what templates write at the end of a prompt, which is no part of
    later ones (less than a page), at distances from there that double, and where messages end: the last `MESSAGES`
    tokens of `ends` say where.
    """
    last = (len(tokens) // page - 1) * page
    found = {last - (page << n) for n in range(max(0, last // page).bit_length())} | {last}
    messages = [n + 1 for n, token in enumerate(tokens) if token in ends][-MESSAGES:]
    return sorted(place for place in found | {n // page * page for n in messages} if place > 0)


class TokenSequence(ABC):
    """Tokens that run through the model for a goal: an answer, log-probabilities, or keys and values for later.

    Whoever runs it brings the tokens of `next_block` to the executor, gives the result to `advance`, and its text to
    `put`, until it is `complete`. Whoever reads it takes `outputs`, in a thread of their own where they like.
    """

    needs_all_logits: ClassVar[bool] = False
    """Whether the logits of every token are wanted, and not only the last one's."""

    def __init__(self, tokens: Sequence[int], *, selected: bool = False) -> None:
        """`selected`: whether these tokens run with selection; else they run dense."""
        self.tokens = list(tokens)
        """All tokens up to now. The newest one of an answer has not run yet."""
        self.selected = [selected] * len(tokens)
        """For each token whether it runs with selection."""
        self.prompt_tokens = len(tokens)
        self.num_computed = 0
        """How many first tokens have their keys and values in its cache."""
        self.cached_tokens = 0
        """How many of these were there when it began."""
        self.status = Status.WAITING
        self.origin = Origin()
        self.samples: list[TokenSequence] = []
        """Further answers to its prompt (parallel samples): they begin once it, their leader, has read it."""
        self.ends_of_messages: Collection[int] = ()
        """Tokens that end a message of a prompt."""
        self.stops: Sequence[int] = ()
        """Positions, rising, at which a step of its prompt ends: states are kept there."""
        self.max_block = 1
        """Most of its tokens that one step runs. Whoever runs it sets this."""
        self.num_scheduled = 0
        """How many of its tokens run in the present step."""
        self.drafted = NO_DRAFT
        """What may come next: the first `num_run` tokens run in the present step, behind its own."""
        self.cancelled = False
        """Whether its reader has no use for it any more: who runs it looks before each step."""
        self.done = Event()
        """Set when nothing of it runs any more."""
        self.outputs: SimpleQueue[Output] = SimpleQueue()
        """What its reader has not read yet."""
        self.num_chars = 0
        """Characters of text up to now, read or not."""
        self.notify: Callable[[], object] = lambda: None
        """Called when an output has come, by the thread that runs it."""
        self._step_began = 0.0
        self.outcome = Outcome()
        self.finish_reason: str | None = None
        """Why its text ended; None while it goes on, and for a goal without a text unless it was cancelled."""

    @property
    def num_pending(self) -> int:
        """Tokens that are to run before the next one can be drawn, or before it is complete."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next token is drawn after one more token has run."""
        return False

    @property
    def num_reusable(self) -> int:
        """How many first tokens need not run if their keys and values are stored."""
        return len(self.tokens)

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """Most positions that its cache will hold."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether its goal is reached."""

    @property
    def client(self) -> str:
        """The client that asked for it."""
        return self.origin.client

    @property
    def rank(self) -> Rank:
        """Which sequences come before it."""
        return Rank.ASKED

    @property
    def is_running(self) -> bool:
        """Whether it has a slot, and neither waits for one nor has ended."""
        return self.status is Status.RUNNING

    @property
    def block(self) -> int:
        """How many of its tokens may run in one step: all of one kind, with selection or without."""
        end = next((stop for stop in self.stops if stop > self.num_computed), len(self.tokens))
        kinds = self.selected[self.num_computed : min(self.num_computed + self.max_block, end)]
        return next((n for n, select in enumerate(kinds) if select != kinds[0]), len(kinds))

    def next_block(self, max_tokens: int, draft: Draft = NO_DRAFT) -> tuple[Ints, bool]:
        """The tokens to run next, at most so many and a draft's; and whether they run with selection."""
        first, drafted = self.num_computed, draft.tokens[: draft.num_run]
        self.num_scheduled, self.drafted = min(self.block, max_tokens), draft
        tokens = self.tokens[first : first + self.num_scheduled]
        return np.array([*tokens, *drafted], np.int64), self.selected[first]

    def start_step(self) -> None:
        """Note that a step which it is part of begins."""
        self._step_began = time.perf_counter()

    @property
    def states(self) -> tuple[int, ...]:
        """The layers whose inputs `take_states` is to have, rising."""
        return ()

    def take_states(self, first: int, states_TC: Floats | None) -> None:  # noqa: B027  most have no use for them
        """Take what a step has computed of the tokens from position `first` on, before `advance`. They may be more than
        those that stay."""

    @abstractmethod
    def advance(self, logits_TV: Floats, rows_L2: Ints | None) -> Iterator[str]:
        """Go on with what a step has computed; yields new text. Raises PiError for logits without meaning.

        `logits_TV`: one row for each of its tokens that ran, or for the last one; and for each token of the draft that
        ran. `rows_L2`: rows of `first` read and neurons kept, if that was counted.
        """

    def put(self, output: Output) -> None:
        """Give an output to the reader. Where the reader's function fails, nobody reads: it is cancelled."""
        self.outputs.put(output)
        self.num_chars += len(output.text)
        try:
            self.notify()
        except Exception:  # it is the reader's, and the thread is everybody's
            self.cancelled = True

    def finish(self, error: BaseException | None) -> None:
        """Say that nothing of it runs any more, and why if that was an error."""
        self.status = Status.FINISHED
        self.done.set()
        self.put(Output("", len(self.tokens) - self.prompt_tokens, ended=True, error=error))

    def cancel(self) -> None:
        """Let whoever runs it drop it before the next step."""
        self.cancelled = True


class ReadSequence(TokenSequence):
    """A sequence whose tokens only run: its keys and values are stored, with which a later prompt begins."""

    def __init__(self, tokens: Sequence[int], rank: Rank = Rank.AHEAD) -> None:
        super().__init__(tokens)
        self._rank, self._seconds = rank, 0.0

    @property
    def rank(self) -> Rank:
        """Which sequences come before it: all for which somebody waits."""
        return self._rank

    @property
    def max_positions(self) -> int:
        """Most positions that its cache will hold."""
        return len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether all its tokens have run."""
        return self.num_pending == 0

    def advance(self, logits_TV: Floats, rows_L2: Ints | None) -> Iterator[str]:  # noqa: ARG002  nobody wants them
        """Count the tokens that have run."""
        self.num_computed += self.num_scheduled
        self._seconds += time.perf_counter() - self._step_began
        return iter(())

    @property
    def stats(self) -> Stats:
        """The figures up to now: how many of its tokens were stored before, and what reading the others took."""
        return Stats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=0,
            prefill_s=self._seconds,
            decode_s=0.0,
            first_token_s=0.0,
            rows_read_share=None,
            active_share=None,
        )


class ScoreSequence(TokenSequence):
    """A sequence whose own tokens' log-probabilities are wanted from `first` on, with selection at every position.

    The last token never runs.
    """

    needs_all_logits = True

    def __init__(self, ids: Sequence[int], *, context: int, first: int, top: int) -> None:
        check_logprobs("prompt_logprobs", top)
        if len(ids) > context:
            raise ContextError(f"{len(ids)} tokens", expected=f"at most the context of {context}")
        if first < 1:
            raise UsageError(f"log-probabilities from token {first} on", expected="1 or more: nothing precedes token 0")
        super().__init__(ids[:-1], selected=True)
        self._ids, self._first, self._top = list(ids), first, top
        self.logprobs: list[TokenLogprobs] = []

    @property
    def max_positions(self) -> int:
        """Most positions that its cache will hold."""
        return len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether all log-probabilities are there."""
        return self._first + len(self.logprobs) >= len(self._ids)

    @property
    def num_reusable(self) -> int:
        """How many first tokens need not run if their keys and values are stored: the next one's logits are wanted."""
        return self._first + len(self.logprobs) - 1

    def advance(self, logits_TV: Floats, rows_L2: Ints | None) -> Iterator[str]:  # noqa: ARG002  of no use here
        """Take the log-probabilities of the tokens that follow those that have run."""
        self.num_computed += self.num_scheduled
        for n, logits_V in enumerate(logits_TV, self.num_computed - len(logits_TV) + 1):
            if n == self._first + len(self.logprobs):
                check_finite(logits_V)
                self.logprobs.append(token_logprobs(logits_V, self._ids[n], self._top))
        return iter(())
