"""A sequence: its tokens, how many of them have been computed, what it is doing, and what it is run for.

There is a class for each goal: `AnswerSequence` is continued by new tokens, `ScoreSequence` gives the log-probabilities
of its own tokens, and `ReadSequence` is computed so that a later sequence can begin with it.

Shape letters: T tokens of a step, V vocabulary, L layers.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.errors import ContextError, UsageError
from pi_runtime.sequence.drafts import Draft
from pi_runtime.sequence.logprobs import TokenLogprobs, check_finite, check_logprobs, token_logprobs

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


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


class StepLogits(NamedTuple):
    """What a step gives a sequence."""

    num_tokens: int
    """How many of its tokens have run."""
    logits_TV: Floats
    """One row for each token, or for the last one; and for each token of the draft that ran."""
    rows_L2: Ints | None
    """Rows of `first` read and neurons kept, if that was counted."""
    draft: Draft
    """What may come next: its first `num_run` tokens have run behind these."""


class TokenSequence(ABC):
    """Tokens that run through the model until a goal is reached.

    Whoever runs it brings the tokens of `next_block` to the executor, and gives the result to `advance`, until it is
    `complete`.
    """

    needs_all_logits: ClassVar[bool] = False
    """Whether the logits of every token are wanted, and not only the last one's."""

    def __init__(self, tokens: Sequence[int], selected: Sequence[bool]) -> None:
        """`selected`: for the first tokens whether they run with selection; the others run dense."""
        self.tokens = list(tokens)
        """All tokens up to now. The newest one of an answer has not run yet."""
        self.selected = [*selected, *[False] * (len(tokens) - len(selected))]
        """For each token whether it runs with selection."""
        self.prompt_tokens = len(tokens)
        self.num_computed = 0
        """How many first tokens have their keys and values in its cache."""
        self.cached_tokens = 0
        """How many of these were there when it began."""
        self.status = Status.WAITING
        self._step_began = 0.0
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

    def block_length(self, max_tokens: int) -> int:
        """How many tokens of one kind, with selection or without, come next: at most so many."""
        kinds = self.selected[self.num_computed : self.num_computed + max_tokens]
        return next((n for n, select in enumerate(kinds) if select != kinds[0]), len(kinds))

    def next_block(self, max_tokens: int) -> tuple[Ints, bool]:
        """The tokens to run next, at most so many and all of one kind; and whether they run with selection."""
        first = self.num_computed
        count = self.block_length(max_tokens)
        return np.array(self.tokens[first : first + count], np.int64), self.selected[first]

    def start_step(self) -> None:
        """Note that a step which it is part of begins."""
        self._step_began = time.perf_counter()

    @abstractmethod
    def advance(self, computed: StepLogits) -> Iterator[str]:
        """Go on with what a step has computed; yields new text. Raises PiError for logits without meaning."""


class ReadSequence(TokenSequence):
    """A sequence that is only computed: what a session's next prompt begins with, or its newest token."""

    @property
    def max_positions(self) -> int:
        """Most positions that its cache will hold; one is left for the first token of an answer."""
        return len(self.tokens) + 1

    @property
    def complete(self) -> bool:
        """Whether all its tokens have run."""
        return self.num_pending == 0

    def advance(self, computed: StepLogits) -> Iterator[str]:
        """Count the tokens that have run."""
        self.num_computed += computed.num_tokens
        return iter(())


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
        super().__init__(ids[:-1], [True] * (len(ids) - 1))
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

    def advance(self, computed: StepLogits) -> Iterator[str]:
        """Take the log-probabilities of the tokens that follow those that have run."""
        self.num_computed += computed.num_tokens
        for n, logits_V in enumerate(computed.logits_TV, self.num_computed - len(computed.logits_TV) + 1):
            if n == self._first + len(self.logprobs):
                check_finite(logits_V)
                self.logprobs.append(token_logprobs(logits_V, self._ids[n], self._top))
        return iter(())
