"""Schemas of tools that nobody can follow: advice is left out, and what must be followed names the tool."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from support import asking
from support.asking import CHAT, OLLAMA_CHAT, RESPONSES
from support.grammars import takes

from pi_runtime import Engine
from pi_runtime.errors import UsageError
from pi_runtime.server.api import prompt as prompts
from pi_runtime.server.api.served import Served
from pi_runtime.text.grammar import Grammar
from pi_runtime.text.grammar_check import LIMITS, check_grammar

pytest.importorskip("llguidance")
Chat = tuple[Served, Engine]
DAY = {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]}
ODD: dict[str, tuple[Any, str]] = {
    "lookahead": (
        {"properties": {"to": {"type": "string", "pattern": "^(?!x).+@.+$"}}},
        "properties.to.pattern: look-around",
    ),
    "uniqueItems": ({"properties": {"to": {"type": "array", "uniqueItems": True}}}, "properties.to.uniqueItems"),
    "not": ({"not": {"required": ["to"]}}, "not: cannot be followed"),
    "if": ({"if": DAY, "then": {"required": ["to"]}}, "if: cannot be followed"),
    "format": ({"properties": {"to": {"type": "string", "format": "phone"}}}, "'phone' is no format"),
    "reference": ({"properties": {"to": {"$ref": "#/nowhere"}}}, "refers to nothing"),
    "large": ({"properties": {"to": {"type": "integer", "maximum": 10**30}}}, "too large a number"),
    "type": ({"properties": {"to": {"type": "str"}}}, "no type of JSON"),
    "a list": ({"type": "array"}, "an object's schema"),
    "regex": ({"properties": {"to": {"type": "string", "pattern": "["}}}, "too complex"),
    "patterns": ({"patternProperties": {"^a": {"type": "string"}, "b$": {"type": "null"}}}, "too complex"),
    "contradiction": ({"properties": {"to": {"enum": []}}, "allOf": [False]}, "to"),
}
"""Parameters, and what is said of them where they must be followed."""
PATHS = {CHAT: "messages", RESPONSES: "input", OLLAMA_CHAT: "messages"}


def body(path: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    found = [{"name": "hours", "description": "x", "parameters": DAY}, {"name": "mail", "parameters": parameters}]
    strict = fields.pop("strict", None)
    if strict is not None:
        found[1]["strict"] = strict
    tools = [
        {"type": "function", **one} if path == RESPONSES else {"type": "function", "function": one} for one in found
    ]
    messages = {PATHS[path]: "x" if path == RESPONSES else [{"role": "user", "content": "x"}]}
    return {"model": "m", **messages, "tools": tools, **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", ODD)
def test_one_odd_schema_does_not_shut_out_the_rest(case: str, path: str, toolless: Chat) -> None:
    """It is advice: the other tool's schema is followed, and the odd one is told as it was given."""
    parameters, _ = ODD[case]
    prompt, _ = asking.read(path, body(path, parameters), toolless[0])
    grammar, tokenizer = prompt.settings["grammar"], toolless[0].model.tokenizer
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert takes(tokenizer, grammar, call % ("hours", '{"day": "x"}'))
    assert not takes(tokenizer, grammar, call % ("hours", '{"day": 1}'))
    assert prompt.rendered is not None
    assert json.dumps(parameters)[1:-1] in prompt.rendered


@pytest.mark.parametrize("case", ODD)
def test_what_must_be_followed_names_the_tool(case: str, toolless: Chat, hermes: Chat) -> None:
    parameters, says = ODD[case]
    place = {CHAT: "tools[1].function.parameters", RESPONSES: "tools[1].function.parameters"}
    for served, fields in ((toolless[0], {}), (hermes[0], {})):
        for path, param in place.items():
            for more in ({"tool_choice": "required"}, {"strict": True}):
                said = asking.refused(path, body(path, parameters, **fields, **more), served, param, says)
                assert "tool 'mail'" in said
                assert not any(word in said for word in ("%json", "start:", "llguidance", "Unimplemented", "\n"))
    named = {"type": "function", "function": {"name": "mail"}}
    asking.refused(CHAT, body(CHAT, parameters, tool_choice=named), toolless[0], place[CHAT], says)
    named["function"]["name"] = "hours"  # type: ignore[index]
    asking.read(CHAT, body(CHAT, parameters, tool_choice=named), toolless[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("parameters", [[], {"type": "object", "properties": []}, None, {}])
def test_an_empty_list_of_php_is_an_empty_object(path: str, parameters: Any, toolless: Chat) -> None:
    more: list[dict[str, Any]] = [{}, *([{"tool_choice": "required"}, {"strict": True}] if path != OLLAMA_CHAT else [])]
    for fields in more:
        asking.read(path, body(path, parameters, **fields), toolless[0])


def test_a_schema_of_the_answer_is_refused_in_our_words(toolless: Chat) -> None:
    """It is no advice, whatever `strict` says: every answer follows its schema."""
    messages = [{"role": "user", "content": "x"}]
    for case in ("lookahead", "uniqueItems", "format", "regex"):
        schema, says = ODD[case]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
        said = asking.refused(
            CHAT, {"model": "m", "messages": messages, "response_format": form}, toolless[0], "response_format", says
        )
        assert not any(word in said for word in ("%json", "start:", "Unimplemented"))


def test_hard_schemas_of_a_request_have_little_time_together(toolless: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too hard is advice: it is left out, and is remembered for the next time."""
    now, known = [0.0], set[Grammar]()

    def check(grammar: Grammar, seconds: float) -> int:
        if "hard" not in grammar.source:
            return 0
        if grammar not in known:
            now[0] += max(0.0, min(seconds, LIMITS.seconds))
            if seconds >= LIMITS.seconds:
                known.add(grammar)
        raise UsageError("too complex")

    monkeypatch.setattr(prompts, "check_grammar", check)
    monkeypatch.setattr(prompts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tools = [{"name": f"f{n}", "parameters": {"properties": {f"hard{n}": {"type": "string"}}}} for n in range(3)]
    wanted = body(CHAT, DAY)
    wanted["tools"] += [{"type": "function", "function": tool} for tool in tools]
    took: list[float] = []
    for _ in range(4):
        began = now[0]
        found, _ = asking.read(CHAT, wanted, toolless[0])
        assert "day" in found.settings["grammar"].source
        took.append(now[0] - began)
    assert took == [11.0, 6.0, 5.0, 0.0]


def test_a_refusal_after_less_time_is_not_remembered() -> None:
    grammar = Grammar.json_schema({"properties": {"m": {"type": "integer", "multipleOf": 9_973}}})
    for seconds in (0.0, 0.001):
        with pytest.raises(UsageError, match="too complex"):
            check_grammar(grammar, seconds=seconds)
    assert check_grammar(grammar) > 0
