"""Which sequences run which tokens in the next step: knows no model and no memory, only numbers of tokens.

A step holds one token of every sequence that is decoding, and at most `piece` tokens of prompts, which take turns.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

PIECE = 64
"""Tokens of prompts in a step, unless asked otherwise."""


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

    def submit(self, sequence: S) -> None:
        """Let a sequence wait behind all others."""
        self.waiting.append(sequence)

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
        self.waiting.appendleft(sequence)
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
        found = [*self.live, *self.waiting]
        for held in (self.live, self.waiting, self._turns):
            held.clear()
        return found

    def plan(self) -> list[Work[S]]:
        """The work of the next step. Prompts that ran go behind the others."""
        work = [Work(s, 1) for s in self.live if s.pending == 1]
        left, ran = self.piece, []
        for s in self._turns:
            if left and s.pending > 1:
                work.append(Work(s, min(s.block, left)))
                left -= work[-1].tokens
                ran.append(s)
        for s in ran:
            self._turns.remove(s)
            self._turns.append(s)
        return work
