"""Conversations as clients send them, each with the words that must reach the prompt."""

from typing import Any

Message = dict[str, Any]


def call(call_id: str | None, arguments: Any, name: str = "hours") -> dict[str, Any]:
    """A call as OpenAI's API has it."""
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if call_id is None else {"id": call_id, **found}


def result(call_id: str | None, content: Any, **more: Any) -> Message:
    """What a tool answered."""
    return {"role": "tool", **({} if call_id is None else {"tool_call_id": call_id}), "content": content, **more}


HOURS = {
    "type": "function",
    "function": {
        "name": "hours",
        "description": "Opening hours.",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "string", "description": "A day."}},
            "required": ["day"],
        },
    },
}
ASKED = {"role": "user", "content": "UUU"}
MORE = {"role": "user", "content": "VVV"}
SYSTEM = {"role": "system", "content": "SSS"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call("a1b2c3d4e", '{"day": "QQQ"}')]}
GIVEN = result("a1b2c3d4e", "RRR")
SAID = {"role": "assistant", "content": "AAA"}
TWO = [call("a1b2c3d4e", '{"day": "Q1Q"}'), call("b1b2c3d4e", '{"day": "Q2Q"}')]
TWO_GIVEN = [result("a1b2c3d4e", "R1R"), result("b1b2c3d4e", "R2R")]

CONVERSATIONS: dict[str, tuple[list[Message], str]] = {
    "a question": ([ASKED], "UUU"),
    "a system message": ([SYSTEM, ASKED], "SSS UUU"),
    "a system message alone": ([SYSTEM], "SSS"),
    "a developer's message": ([{"role": "developer", "content": "SSS"}, ASKED], "SSS UUU"),
    "system and developer": ([SYSTEM, {"role": "developer", "content": "DDD"}, ASKED], "SSS DDD UUU"),
    "a system message in the middle": ([ASKED, SAID, SYSTEM, MORE], "UUU AAA SSS VVV"),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "UUU"}, {"type": "text", "text": "PPP"}]}],
        "UUU PPP",
    ),
    "three turns": ([ASKED, SAID, MORE], "UUU AAA VVV"),
    "two questions": ([ASKED, MORE], "UUU VVV"),
    "two answers": ([ASKED, SAID, {"role": "assistant", "content": "BBB"}, MORE], "UUU AAA BBB VVV"),
    "the assistant first": ([SAID, ASKED], "AAA UUU"),
    "the assistant last": ([ASKED, SAID], "UUU AAA"),
    "a call": ([ASKED, CALLING, GIVEN], "UUU QQQ RRR"),
    "a call with empty content": ([ASKED, {**CALLING, "content": ""}, GIVEN], "UUU QQQ RRR"),
    "a call that was answered": ([ASKED, CALLING, GIVEN, SAID, MORE], "UUU QQQ RRR AAA VVV"),
    "a call, and a question at once": ([ASKED, CALLING, GIVEN, MORE], "UUU QQQ RRR VVV"),
    "a call without a result": ([ASKED, CALLING, MORE], "UUU QQQ VVV"),
    "two calls": ([ASKED, {**CALLING, "tool_calls": TWO}, *TWO_GIVEN], "UUU Q1Q Q2Q R1R R2R"),
    "two calls, answered": ([ASKED, {**CALLING, "tool_calls": TWO}, *TWO_GIVEN, SAID, MORE], "Q1Q Q2Q R1R R2R AAA VVV"),
    "results in another order": ([ASKED, {**CALLING, "tool_calls": TWO}, *TWO_GIVEN[::-1]], "Q1Q Q2Q R1R R2R"),
    "a call after another": (
        [ASKED, CALLING, GIVEN, {**CALLING, "tool_calls": [TWO[1]]}, TWO_GIVEN[1], SAID],
        "UUU QQQ RRR Q2Q R2R AAA",
    ),
    "text beside a call": ([ASKED, {**CALLING, "content": "TTT"}, GIVEN], "TTT QQQ RRR"),
    "text beside a call, answered": ([ASKED, {**CALLING, "content": "TTT"}, GIVEN, SAID, MORE], "TTT QQQ RRR AAA"),
    "text beside a call and thoughts": (
        [ASKED, {**CALLING, "content": "TTT", "reasoning_content": "HHH"}, GIVEN],
        "TTT QQQ RRR",
    ),
    "thoughts beside a call": ([ASKED, {**CALLING, "reasoning_content": "HHH"}, GIVEN], "UUU QQQ RRR"),
    "thoughts alone": ([ASKED, {"role": "assistant", "content": None, "reasoning": "HHH"}, MORE], "UUU VVV"),
    "nothing said": ([ASKED, {"role": "assistant", "content": None}, MORE], "UUU VVV"),
    "an id of another server": (
        [ASKED, {**CALLING, "tool_calls": [call("call_5Yt0aGz3", '{"day": "QQQ"}')]}, result("call_5Yt0aGz3", "RRR")],
        "UUU QQQ RRR",
    ),
    "no ids": ([ASKED, {**CALLING, "tool_calls": [call(None, {"day": "QQQ"})]}, result(None, "RRR")], "UUU QQQ RRR"),
    "arguments that were cut off": (
        [ASKED, {**CALLING, "tool_calls": [call("x", '{"day": "QQQ')]}, result("x", "R")],
        "QQQ",
    ),
    "arguments that are a list": ([ASKED, {**CALLING, "tool_calls": [call("x", '["QQQ"]')]}, result("x", "R")], "QQQ"),
    "arguments as an object": (
        [ASKED, {**CALLING, "tool_calls": [call("x", {"day": "QQQ"})]}, result("x", "R")],
        "QQQ",
    ),
    "arguments that are null": ([ASKED, {**CALLING, "tool_calls": [call("x", None)]}, result("x", "RRR")], "hours RRR"),
    "no arguments": ([ASKED, {**CALLING, "tool_calls": [call("x", "")]}, result("x", "RRR")], "hours RRR"),
    "a result without a call": ([ASKED, result("x", "RRR"), SAID, MORE], "UUU RRR AAA VVV"),
    "an empty result": ([ASKED, CALLING, result("a1b2c3d4e", ""), MORE], "UUU QQQ VVV"),
    "half an emoji": ([ASKED, CALLING, result("a1b2c3d4e", "RRR \ud83d")], "QQQ RRR \ufffd"),
    "system, a call and a question": ([SYSTEM, ASKED, CALLING, GIVEN, SAID, MORE], "SSS UUU QQQ RRR AAA VVV"),
}
"""What clients send: the name says what is special."""


def lost(text: str, words: str) -> list[str]:
    """The words that a prompt lacks."""
    return [word for word in words.split() if word not in text]
