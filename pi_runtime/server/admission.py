"""How many answers are taken on: those in the engine's slots and those that may wait; more are refused at once."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from pi_runtime.server.errors import ApiError

LONGEST_RETRY_S = 60
LATEST = 0.1
"""Weight of the latest answer in the mean time of one."""


class Ticket:
    """The right of one request to so many answers."""

    def __init__(self, admission: "Admission") -> None:
        self._admission, self._answers = admission, 0
        self.take(1)

    def take(self, answers: int) -> None:
        """Take on so many answers in all. Raises ApiError (429) where they do not fit beside the others."""
        admission, more = self._admission, max(answers, 1) - self._answers
        if answers > admission.most:
            raise ApiError(400, f"{answers} answers", param="n", code="too_many_answers")
        if admission.taken + more > admission.most:
            raise ApiError(
                429,
                f"the server is busy: {admission.slots} answers run and {admission.queue} may wait",
                code="queue_full",
                headers={"Retry-After": str(admission.retry_s)},
            )
        admission.taken += more
        self._answers += more

    def release(self) -> None:
        """Give the right back."""
        self._admission.taken -= self._answers
        self._answers = 0


class Admission:
    """Counts the answers of all requests. Belongs to the event loop's thread, so nothing it does waits."""

    def __init__(self, slots: int, queue: int) -> None:
        self.slots, self.queue, self.most = slots, queue, slots + queue
        self.taken = 0
        self._answer_s = 1.0

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """A right to one answer for as long as the block runs. Raises ApiError (429) where there is none left."""
        ticket = Ticket(self)
        try:
            yield ticket
        finally:
            ticket.release()

    def count(self, seconds: float) -> None:
        """Count an answer that took so long in a slot."""
        self._answer_s += LATEST * (seconds - self._answer_s)

    @property
    def retry_s(self) -> int:
        """Whole seconds after which a place in the queue is likely to be free: one answer ends every so often."""
        return min(max(1, math.ceil(self._answer_s / self.slots)), LONGEST_RETRY_S)
