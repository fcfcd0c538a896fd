"""Progress of something that takes minutes: a bar on a terminal; elsewhere its time, and then a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pi_runtime import console

EVERY = 10.0
"""Seconds between two lines."""


@contextmanager
def progress_lines(title: str, unit: str) -> Iterator[console.Progress]:
    """Show a bar on a terminal; elsewhere lines on stderr."""
    if sys.stderr.isatty():
        with console.progress(title, unit) as bar:
            yield bar
    else:
        console.say(f"{title}: opening")
        yield ProgressLines(title, unit, console.say)


class ProgressLines:
    """Tells how long it will take as soon as a piece has been measured, and every `EVERY` seconds what is done."""

    def __init__(
        self, title: str, unit: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._unit, self._say, self._clock = title, unit, say, clock
        self._began = self._told = clock()
        self._announced = False

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done == 0:  # what is measured begins here: files are open, kernels compiled
            self._began = self._told = now
            return
        left = (now - self._began) / done * (total - done)
        if not self._announced:
            self._say(f"{self._title}: {total:,} {self._unit}, about {now - self._began + left:,.0f} s")
        elif now - self._told >= EVERY and done < total:
            self._say(f"{self._title}: {done:,} of {total:,} {self._unit}, about {left:,.0f} s left")
        else:
            return
        self._announced, self._told = True, now
