"""Values that are kept: the latest ones, up to a number of bytes."""

from typing import Any

import pytest

from pi_runtime import Grammar
from pi_runtime.errors import UsageError
from pi_runtime.text import grammar_check
from pi_runtime.text.kept import Kept
from pi_runtime.text.sandbox import SandboxLimitError, SandboxLimits


def test_the_oldest_go_first_and_use_makes_young() -> None:
    kept, made = Kept[str, str](100), list[str]()

    def get(key: str, nbytes: int = 40) -> None:
        kept.get(key, nbytes, lambda: made.append(key) or key)  # type: ignore[func-returns-value]

    for key in "abacab":
        get(key)
    assert made == ["a", "b", "c", "b"]


def test_one_that_is_larger_than_all_may_be_is_kept_alone() -> None:
    kept = Kept[str, int](100)
    kept.get("a", 10, lambda: 1)
    kept.get("b", 1000, lambda: 2)
    assert kept.get("b", 1000, lambda: 3) == 2
    assert kept.get("a", 10, lambda: 4) == 4
    assert kept.get("b", 1000, lambda: 5) == 5


def test_a_value_that_cannot_be_made_is_not_kept() -> None:
    kept = Kept[str, float](100)
    with pytest.raises(ZeroDivisionError):
        kept.get("a", 1, lambda: 1 / 0)
    assert kept.get("a", 1, lambda: 2.0) == 2.0


def test_a_grammar_that_was_tried_is_known_by_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Grammar] = []
    monkeypatch.setattr(grammar_check, "_asked", lambda grammar, *_: tried.append(grammar) or {"text": "", "nbytes": 7})
    grammar = Grammar.regex("x" * 100_000)
    assert [grammar_check.check_grammar(grammar) for _ in range(2)] == [7, 7]
    assert tried == [grammar]
    assert all(len(key) == grammar_check.DIGEST_BYTES for key in grammar_check._known._values)


def test_a_refusal_is_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, now, tried = Grammar.json_schema({"const": "refused"}), [0.0], list[Grammar]()
    monkeypatch.setattr(grammar_check.time, "monotonic", lambda: now[0])
    replies = iter([SandboxLimitError("time"), {"text": "wrong"}, {"text": "", "nbytes": 7}])

    def asked(one: Grammar, _: SandboxLimits, _seconds: float) -> dict[str, Any]:
        tried.append(one)
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(grammar_check, "_asked", asked)
    for count, match in ((1, "too complex.*within 5 s"), (2, "cannot be used.*wrong")):
        for _ in range(3):
            with pytest.raises(UsageError, match=f"(?s){match}"):
                grammar_check.check_grammar(grammar)
            assert len(tried) == count
        now[0] += grammar_check.KNOWN_S + 1
    for _ in range(3):
        grammar_check.check_grammar(grammar)
    assert len(tried) == 3
