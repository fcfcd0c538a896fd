"""Which sequences run which tokens in the next step: knows no model and no memory, only numbers of tokens.

A step holds one token of every sequence that is decoding, and some tokens of prompts, which take turns. Several prompts
share at most `piece` of them.
While prompts are read, steps without prompts come between, so that those who are decoding keep a share of their speed.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

PIECE = 32
"""Tokens that several prompts share in a step, and the fewest that one gets, unless asked otherwise."""
MOST_WITH_PROMPTS = 8
"""Steps with prompts in a row, so that the time of one without is measured now and then."""


class Sequence(Protocol):
    """What the scheduler asks of a sequence."""

    @property
    def pending(self) -> int:
        """Tokens that must run before its next one can be drawn: 1 while it is decoding."""

    @property
    def block(self) -> int:
        """How many of these may run in one step."""


S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True)
class Work(Generic[S]):
    """The part of one sequence in a step."""

    sequence: S
    tokens: int


class Scheduler(Generic[S]):
    """Holds the live sequences, at most `slots`, and those that wait, in order."""

    def __init__(self, slots: int, piece: int) -> None:
        self.slots, self.piece = slots, piece
        self.live: list[S] = []
        """In the order in which they joined."""
        self.waiting: deque[S] = deque()
        self._turns: deque[S] = deque()
        """The live sequences in the order in which their prompts run."""

    @property
    def idle(self) -> bool:
        """Whether nothing is live and nothing waits."""
        return not self.live and not self.waiting

    @property
    def sequences(self) -> list[S]:
        """Those that are live, then those that wait."""
        return [*self.live, *self.waiting]

    def submit(self, sequence: S) -> None:
        """Let a sequence wait behind all others."""
        self.waiting.append(sequence)

    def submit_first(self, sequence: S) -> None:
        """Let a sequence wait before all others."""
        self.waiting.appendleft(sequence)

    def next_to_join(self) -> S | None:
        """The sequence that waits longest, if there is one and a slot is free."""
        return self.waiting[0] if self.waiting and len(self.live) < self.slots else None

    def join(self) -> None:
        """Make the sequence that waits longest a live one."""
        sequence = self.waiting.popleft()
        self.live.append(sequence)
        self._turns.append(sequence)

    def preempt(self) -> S:
        """Let the sequence that joined last wait again, before all others."""
        sequence = self.live.pop()
        self._turns.remove(sequence)
        self.submit_first(sequence)
        return sequence

    def remove(self, sequence: S) -> None:
        """Forget a sequence, live or waiting."""
        if sequence in self.live:
            self.live.remove(sequence)
            self._turns.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def clear(self) -> list[S]:
        """Forget all sequences; returns them."""
        found = self.sequences
        for held in (self.live, self.waiting, self._turns):
            held.clear()
        return found

    @property
    def decoding(self) -> int:
        """How many sequences are decoding."""
        return sum(s.pending == 1 for s in self.live)

    @property
    def reading(self) -> list[S]:
        """The sequences whose prompts are being read, in the order of their turns."""
        return [s for s in self._turns if s.pending > 1]

    def plan(self, prompt_tokens: int | None = None) -> list[Work[S]]:
        """The work of the next step. Prompts that ran go behind the others.

        `prompt_tokens`: most tokens of prompts, None for a piece. More than a piece goes to one prompt alone: those
        that are read in one step share no work.
        """
        work = [Work(s, 1) for s in self.live if s.pending == 1]
        left, ran = self.piece if prompt_tokens is None else prompt_tokens, []
        for s in self.reading:
            if left > 0:
                work.append(Work(s, min(s.block, left)))
                left = min(left, self.piece) - work[-1].tokens
                ran.append(s)
        for s in ran:
            self._turns.remove(s)
            self._turns.append(s)
        return work


class DecodeShare:
    """Says when prompts may run, so that those who are decoding keep a share s of their speed.

    A step with prompts takes T, one without t for each token of an answer: after it answers are owed s T − t of time.
    A step without prompts pays 1 − s of its time back. Prompts run while nothing is owed. No more than one step is paid
    in advance.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._plain_s: dict[int, float] = {}
        """Seconds of the latest step without prompts, by the number of sequences in it."""
        self._owed_s = 0.0
        self._with_prompts = 0
        """Steps with prompts since the last one without."""

    def allows_prompts(self, decoding: int) -> bool:
        """Whether prompts may run beside so many answers."""
        if decoding == 0 or self._share == 0:
            return True
        return self._owed_s <= 0 and self._with_prompts < MOST_WITH_PROMPTS

    def count(self, seconds: float, decoding: int, prompts: bool, gained: float = 1.0) -> None:
        """Count a step: its time, the answers in it, whether it held prompts too, and the tokens that each gained."""
        self._with_prompts = self._with_prompts + 1 if prompts else 0
        if decoding == 0:
            self._owed_s = 0.0
            self._with_prompts = 0
        elif prompts:
            # Of fewer answers where that is all that is known: the shorter time is on the safe side.
            known = max((n for n in self._plain_s if n <= decoding), default=0)
            plain_s = self._plain_s.get(known, 0.0)
            self._owed_s = max(self._owed_s + self._share * seconds - plain_s, -plain_s)
        else:
            self._plain_s[decoding] = seconds / gained
            self._owed_s = max(self._owed_s - (1 - self._share) * seconds, -seconds)
