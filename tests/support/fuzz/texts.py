"""TOML, JSON and lines of JSON damaged by structure, and the rule for whoever reads them."""

import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from pi_runtime.errors import PiError
from support.fuzz import mutations
from support.fuzz.cases import Cases
from support.fuzz.watched import watched

LONGEST = 100_000
"""Characters of a message that anybody reads."""
SHORT = 40
"""Cases of each kind."""


def check(cases: Cases, short: int, share: float, damaged: Callable[[Random], str], read: Callable[[], object]) -> None:
    """Damage what is read, and read it, again and again."""
    for case, rng in cases(short, share):
        what = damaged(rng)
        try:
            with watched(case):
                assert_read_or_refused(read)
        except Exception as error:
            error.add_note(f"{case}: {what[:2000]}")
            raise


def assert_read_or_refused(read: Callable[[], object]) -> None:
    try:
        read()
    except PiError as error:
        if error.exit_code not in (2, 3, 4, 5) or len(str(error)) > LONGEST:
            raise AssertionError(f"no error that a user can use: {str(error)[:500]}") from None


def toml(value: Any) -> str:
    """A tree as TOML: tables of tables in one line, so that they may stand anywhere."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml(v) for v in value if v is not None) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value > 10**200:
        return hex(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def damaged_toml(rng: Random, path: Path, original: str) -> str:
    """Write a TOML file with some values changed, or some of its text."""
    if rng.random() < 0.25:
        text, what = mutations.text(rng, original), "text"
        if rng.random() < 0.2:
            text = f"{text}\n[x]\ny = {rng.choice(('[' * 5000, '0x' + 'f' * 20000, '9' * 5000, '{a = ' * 2000))}"
    else:
        data = tomllib.loads(original)
        what = ", ".join(mutations.tree(rng, data) for _ in range(rng.choice((1, 1, 2, 5))))
        with deep_recursion():
            text = "\n".join(f"{json.dumps(str(k))} = {toml(v)}" for k, v in data.items() if v is not None)
    path.write_bytes(text.encode("utf-8", "replace"))
    return what


def damaged_json(rng: Random, path: Path, original: dict[str, Any]) -> str:
    data = deepcopy(original)
    what = ", ".join(mutations.tree(rng, data) for _ in range(rng.choice((1, 1, 2, 5))))
    text = mutations.spelled(data)
    if rng.random() < 0.15:
        text = mutations.data(rng, text)
    path.write_bytes(text)
    return what


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Trees are written by recursion, and some are deep."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def damaged_lines(rng: Random, path: Path, rows: tuple[dict[str, Any], ...]) -> str:
    form, what, lines = rng.choice(rows), [], []
    for _ in range(rng.choice((1, 3))):
        row = deepcopy(form)
        if rng.random() < 0.7:
            what.append(mutations.tree(rng, row))
        lines.append(mutations.spelled(row))
    data = b"\n".join(lines)
    path.write_bytes(mutations.data(rng, data) if rng.random() < 0.2 else data)
    return ", ".join(what)
