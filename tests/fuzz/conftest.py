"""Each fuzzer has a short form, the same every time, and goes on for `--minutes` with a seed that it prints."""

import pytest
from support.fuzz.cases import Cases


@pytest.fixture
def cases(minutes: float | None, pytestconfig: pytest.Config) -> Cases:
    """The cases of a fuzzer."""
    return Cases(pytestconfig.getoption("--seed"), minutes)


@pytest.fixture
def long_form(long: bool, minutes: float | None) -> None:
    """For tests that have no short form yet: skipped without `--long` or `--minutes`."""
    if not (long or minutes):
        pytest.skip("nox -s fuzz")
