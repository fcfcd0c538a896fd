"""How many answers are taken on: those in the engine's slots and those that may wait; more are refused at once.

Where there are several keys, one of them may have so many of these that others still come in.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pi_runtime.server.errors import ApiError

LONGEST_RETRY_S = 60
LATEST = 0.1
"""Weight of the latest answer in the mean time of one."""


class Ticket:
    """Counts the answers that one request takes of the server's slots and queue."""

    def __init__(self, admission: "Admission", owner: str) -> None:
        self._admission, self._owner, self._answers = admission, owner, 0
        self.take(1)

    def take(self, answers: int) -> None:
        """Let a request have so many answers in all. Raises ApiError (429) where they do not fit beside others."""
        admission, more = self._admission, max(answers, 1) - self._answers
        if answers > admission.most_each:
            raise ApiError(400, f"{answers} answers", param="n", code="too_many_answers")
        admission.check(self._owner, more)
        admission.of[self._owner] += more
        self._answers += more

    def release(self) -> None:
        """Let others have what this request took, once it has ended."""
        self._admission.of[self._owner] -= self._answers
        self._answers = 0


class Admission:
    """Counts the answers of all requests. Belongs to the event loop's thread, so nothing it does waits."""

    def __init__(self, slots: int, queue: int, most_each: int | None = None) -> None:
        self.slots, self.queue, self.most = slots, queue, slots + queue
        self.most_each = self.most if most_each is None else most_each
        """Most answers that run or wait of one owner."""
        self.of: Counter[str] = Counter()
        """Answers that run or wait, by owner."""
        self._answer_s = 1.0

    @property
    def taken(self) -> int:
        """Answers that run or wait."""
        return self.of.total()

    def check(self, owner: str, more: int = 1) -> None:
        """Raise ApiError (429) where so many answers more of an owner do not fit beside those that run or wait."""
        if self.taken + more > self.most:
            raise self.full(f"the server is busy: {self.slots} answers run and {self.queue} may wait")
        if self.of[owner] + more > self.most_each:
            raise self.full(f"you have as many answers as one key may: {self.most_each} that run or wait")

    @contextmanager
    def ticket(self, owner: str) -> Iterator[Ticket]:
        """Count one answer of an owner for as long as the block runs. Raises ApiError (429) where none is left."""
        ticket = Ticket(self, owner)
        try:
            yield ticket
        finally:
            ticket.release()

    def full(self, said: str) -> ApiError:
        """The error (429) that refuses an answer for which slots and queue have no room."""
        return ApiError(429, said, code="queue_full", headers={"Retry-After": str(self.retry_s)})

    def count(self, seconds: float) -> None:
        """Count an answer that took so long in a slot."""
        self._answer_s += LATEST * (seconds - self._answer_s)

    @property
    def retry_s(self) -> int:
        """Whole seconds after which a place in the queue is likely to be free: one answer ends every so often."""
        return min(max(1, math.ceil(self._answer_s / self.slots)), LONGEST_RETRY_S)


class Arriving:
    """Bytes of bodies that have not come whole, of all clients and of each. Who sends nothing takes nothing of them.

    A client has three quarters at most, so that who sends many large bodies slowly leaves room for others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.bodies = 0
        """Bodies that are coming."""
        self._of: Counter[str] = Counter()

    @contextmanager
    def body(self, client: str) -> Iterator[Callable[[int], None]]:
        """Counts the bytes of one body until the block ends: the function takes how many have come now. It raises
        ApiError (429) where there is no room for them."""
        taken = 0

        def take(nbytes: int) -> None:
            nonlocal taken
            if self._of.total() + nbytes > self._most or self._of[client] + nbytes > 3 * self._most // 4:
                said = "the server is busy receiving requests"
                raise ApiError(429, said, code="queue_full", headers={"Retry-After": "5"})
            self._of[client] += nbytes
            taken += nbytes

        self.bodies += 1
        try:
            yield take
        finally:
            self.bodies -= 1
            self._of[client] -= taken
            self._of += Counter()  # without clients that have none
