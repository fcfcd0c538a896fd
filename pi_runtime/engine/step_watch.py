"""How long the present step has made no progress, as those who look at it see."""

import time
from collections.abc import Callable

from pi_runtime.kernels.codegen import progress


class StepWatch:
    """Says for how long the present step has made no progress.

    The thread that runs steps begins and ends it. One other looks, more often than `stalled_s` is to tell.
    """

    def __init__(self, count: Callable[[], int] = progress.count, clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._clock = count, clock
        self._began: float | None = None
        self._seen, self._moved = count(), clock()
        """The count that was seen last, and when it was first seen."""

    def begin(self) -> None:
        """Say that a step begins."""
        self._began = self._clock()

    def end(self) -> None:
        """Say that it has ended."""
        self._began = None

    @property
    def stalled_s(self) -> float:
        """Seconds since the present step began or was first seen where it is now; 0 between steps."""
        began, found, now = self._began, self._count(), self._clock()
        if found != self._seen:
            self._seen, self._moved = found, now
        return 0.0 if began is None else now - max(began, self._moved)
