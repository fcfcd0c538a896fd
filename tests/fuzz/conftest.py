"""Each fuzzer has a short form, the same every time, and goes on for `--minutes` with a seed that it prints."""

import time
from collections.abc import Callable, Iterator
from random import Random, SystemRandom

import pytest

Cases = Callable[[int, float], Iterator[tuple[str, Random]]]
SHARES = 8
"""Parts into which the fuzzers divide the minutes."""


@pytest.fixture
def cases(minutes: float | None, request: pytest.FixtureRequest) -> Cases:
    """Yields the names of cases with their sources of randomness.

    In the short form so many; in the long form ten thousand at most, or until a share of the minutes is used up.
    """

    def cases(short: int, share: float = 1) -> Iterator[tuple[str, Random]]:
        seed = request.config.getoption("--seed")
        if seed is None:
            seed = 1 if minutes is None else SystemRandom().randrange(1 << 32)
        print(f"--seed {seed}")
        until, n = time.monotonic() + 60 * share * (minutes or 0) / SHARES, 0
        while n < short if minutes is None else time.monotonic() < until:
            yield f"case {n} of --seed {seed}", Random(f"{seed} {n}")
            n += 1
        print(f"{n:,} cases")

    return cases


@pytest.fixture
def long_form(long: bool, minutes: float | None) -> None:
    """For tests that have no short form yet: skipped without `--long` or `--minutes`."""
    if not (long or minutes):
        pytest.skip("nox -s fuzz")
