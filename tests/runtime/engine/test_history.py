"""What clients show of the past, in one form."""

import json
from typing import Any

import pytest
from support.conversations import ASKED, CALLING, call, result

from pi_runtime.engine.history import arguments_of, one_form, unicode
from pi_runtime.errors import PromptError


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"a": "Mon', {"arguments": '{"a": "Mon'}),
        ("[1]", {"arguments": [1]}),
        ([1], {"arguments": [1]}),
        ('"a"', {"arguments": "a"}),
        ("5", {"arguments": 5}),
        (False, {"arguments": False}),
        ("{'a': 1}", {"arguments": "{'a': 1}"}),
        ("1" * 5000, {"arguments": "1" * 5000}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
        *((deep, {"arguments": deep}) for n in (100, 900, 3000) for deep in ('{"a":' * n + "[]" + "}" * n,)),
        *((f"[{deep}]", {"arguments": f"[{deep}]"}) for n in (200, 900) for deep in ("[" * n + "]" * n,)),
        ('{"a":' * 90 + "1" + "}" * 90, json.loads('{"a":' * 90 + "1" + "}" * 90)),
    ],
)
def test_arguments(given: Any, found: dict[str, Any]) -> None:
    assert arguments_of(given) == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("\ud83d", "\ufffd"),
        ("a\ude00b", "a\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),
        ("é", "é"),
        ({"\ud83d": ["\ud83d", 1, None]}, {"\ufffd": ["\ufffd", 1, None]}),
    ],
)
def test_half_a_pair_becomes_the_replacement_character(given: Any, found: Any) -> None:
    assert unicode(given) == found


def ids(messages: list[Any]) -> list[str]:
    """The ids of calls and results in the order of the messages."""
    found = []
    for message in one_form(messages):
        found += [c["id"] for c in message.get("tool_calls", ())]
        found += [message["tool_call_id"]] if "tool_call_id" in message else []
    return found


def called(*calls: Any) -> dict[str, Any]:
    return {**CALLING, "tool_calls": [*calls]}


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (
            [ASKED, called(call(None, {}), call(None, {})), result(None, "1"), result(None, "2")],
            "call_0 call_1 call_0 call_1",
        ),
        (
            [
                called(call(None, {}, "a"), call(None, {}, "b")),
                result(None, "1", name="b"),
                result(None, "2", name="a"),
            ],
            "call_0 call_1 call_0 call_1",
        ),
        ([called(call("x", {}), call("y", {})), result("y", "2"), result("x", "1")], "x y x y"),
        ([called(call("x", {})), result("z", "1")], "x z"),
        ([called(call(5, {})), result(5, "1")], "5 5"),
        (
            [called(call(None, {})), result(None, "1"), called(call(None, {})), result(None, "2")],
            "call_0 call_0 call_1 call_1",
        ),
    ],
)
def test_ids_and_the_order_of_results(messages: list[Any], found: str) -> None:
    assert ids(messages) == found.split()


def test_results_stand_with_their_calls() -> None:
    messages = [called(call("x", {}), call("y", {})), result("y", "2"), result("z", "3"), result("x", "1")]
    assert [m["content"] for m in one_form(messages)] == ["", "1", "2", "3"]


def test_keys_that_are_none_are_dropped() -> None:
    (found,) = one_form([{**CALLING, "name": None, "refusal": None, "reasoning": "hm", "thinking": None}])
    assert found.keys() == {"role", "content", "tool_calls", "reasoning_content"}
    assert one_form([{"role": "assistant", "tool_calls": []}]) == [{"role": "assistant", "content": ""}]


def test_a_call_may_stand_without_its_function() -> None:
    (found,) = one_form([called({"name": "f", "arguments": '{"a": 1}'})])
    assert found["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "call_0"}
    ]


@pytest.mark.parametrize(
    "messages",
    [
        ["hi"],
        [{"content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "tool_calls": [1]}],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}],
    ],
)
def test_what_are_no_messages(messages: Any) -> None:
    with pytest.raises(PromptError, match="message 0 of the chat"):
        one_form(messages)
