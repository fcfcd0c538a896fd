"""Cases that the short form of a test leaves to `--long`."""

from collections.abc import Container, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def marked_long(cases: Iterable[T], further: Container[T]) -> list[Any]:
    """The cases as parameters of a test, those of `further` marked as for the long form alone."""
    return [pytest.param(case, marks=[pytest.mark.long] * (case in further)) for case in cases]
