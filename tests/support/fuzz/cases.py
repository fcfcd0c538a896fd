"""The cases of a fuzzer: a short form, the same every time, and a long one with a seed that it prints."""

import time
from collections.abc import Iterator
from random import Random, SystemRandom

SHARES = 16
"""The shares of all fuzzers: what they divide the minutes by."""


class Cases:
    """Names of cases with their sources of randomness, which the name alone decides."""

    def __init__(self, seed: int | None, minutes: float | None) -> None:
        self._minutes = minutes
        self._seed = seed if seed is not None else 1 if minutes is None else SystemRandom().randrange(1 << 32)

    def __call__(self, short: int, share: float = 1) -> Iterator[tuple[str, Random]]:
        """So many in the short form; else until a share of the minutes is used up."""
        print(f"--seed {self._seed}")
        until, n = time.monotonic() + 60 * share * (self._minutes or 0) / SHARES, 0
        while n < short if self._minutes is None else time.monotonic() < until:
            yield f"case {n} of --seed {self._seed}", Random(f"{self._seed} {n}")
            n += 1
        print(f"{n:,} cases")
