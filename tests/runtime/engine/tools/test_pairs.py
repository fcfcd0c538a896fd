"""Calls whose arguments are pairs of keys and values: Qwen3-Coder's form, and what values become by a tool's schema."""

import json
from typing import Any

import pytest
from support.tool_calls import cuts_of

from pi_runtime.engine.events import CallArguments, CallBegan, CallBroken, Delta, ReasoningDelta, TextDelta, joined
from pi_runtime.engine.tools.formats import GLM_4_5, GLM_4_7, HERMES, QWEN_3_CODER, ReasoningFormat, ToolFormat
from pi_runtime.engine.tools.output import OutputFormat
from pi_runtime.engine.tools.pairs import PairParser, text_schema, types

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "limit": {"type": ["integer", "null"]},
        "unit": {"enum": ["1", "2"]},
        "kind": {"$ref": "#/$defs/kind"},
        "any": {},
    },
    "$defs": {"kind": {"type": "string"}},
}
FUNCTIONS: dict[str, Any] = {"weather": WEATHER, "now": {}, "a.b-c_1": {}, "odd": {"properties": [], "type": None}}


def parse(pieces: list[str], tools: ToolFormat = QWEN_3_CODER) -> list[Delta]:
    parser = PairParser(tools, FUNCTIONS, lambda: "id")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined(deltas + parser.finish())


def called(deltas: list[Delta]) -> list[Any]:
    """Texts, and calls with their arguments read."""
    found: list[Any] = []
    for delta in deltas:
        if isinstance(delta, CallBegan):
            found.append([delta.name, ""])
        elif isinstance(delta, CallArguments):
            found[-1][1] += delta.text
        else:
            assert isinstance(delta, TextDelta)
            found.append(delta.text)
    return [(one[0], json.loads(one[1])) if isinstance(one, list) else one for one in found]


def call(body: str, name: str = "weather") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def one(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


VALUES = {
    "text": ("city", "Zürich", "Zürich"),
    "lines": ("city", "a\n\nb\n  c", "a\n\nb\n  c"),
    "only one line end at either side goes": ("city", "\n a \n", "\n a \n"),
    "an empty text": ("city", "", ""),
    "a line end": ("city", "\n", "\n"),
    "less than": ("city", "a < b </x> <y", "a < b </x> <y"),
    "quotation marks": ("city", '"a" \\ \t', '"a" \\ \t'),
    "a number as text": ("city", "12", "12"),
    "null as text": ("city", "null", "null"),
    "JSON as text": ("city", '{"a": 1}', '{"a": 1}'),
    "a tag of the form": ("city", "</parameter>", "</parameter>"),
    "tags of the form": (
        "city",
        "see </parameter> and\n</parameter>\n</para",
        "see </parameter> and\n</parameter>\n</para",
    ),
    "the beginning of a parameter": ("city", "<parameter=x>", "<parameter=x>"),
    "the end of a function": ("city", "</function> </tool_call>", "</function> </tool_call>"),
    "a number": ("days", "12", 12),
    "a negative number": ("days", " -3 ", -3),
    "no number": ("days", "many", "many"),
    "a fraction": ("share", "0.5", 0.5),
    "a whole number": ("share", "5", 5),
    "not a number": ("share", "NaN", "NaN"),
    "true": ("metric", "true", True),
    "true of Python": ("metric", "True", True),
    "false of Python": ("metric", "False", False),
    "a list": ("tags", '["a", "b\\n"]', ["a", "b\n"]),
    "a list on lines": ("tags", '[\n "a"\n]', ["a"]),
    "an object": ("more", '{"a": {"b": [null]}}', {"a": {"b": [None]}}),
    "no object": ("more", "{'a': 1}", "{'a': 1}"),
    "text or null": ("note", "12", "12"),
    "null": ("note", "null", None),
    "none of Python, where text may be": ("note", "None", "None"),
    "none of Python": ("limit", "None", None),
    "a choice of texts": ("unit", "1", "1"),
    "text behind a reference": ("kind", "1", "1"),
    "a value of any type": ("any", "12", 12),
    "a word of any type": ("any", "twelve", "twelve"),
    "an unknown key": ("other", "a b", "a b"),
    "an unknown key with a list": ("other", "[1]", [1]),
}
"""A key, its value as it is written, and what it means."""


@pytest.mark.parametrize("case", VALUES)
def test_values(case: str) -> None:
    key, written, meant = VALUES[case]
    on_lines, inline = call(one(key, written)), call(f"<parameter={key}>{written}</parameter>")
    for text in (on_lines, inline) if written.strip("\n") == written else (on_lines,):
        found = [parse(cut) for cut in cuts_of(text)]
        assert called(found[0]) == [("weather", {key: meant})]
        assert found == found[:1] * 3


NOW, ZUG = ("now", {}), ("weather", {"city": "Zug"})
FORMS = {
    "no parameters": (call("", "now"), [NOW]),
    "another name": (call("", "a.b-c_1"), [("a.b-c_1", {})]),
    "a schema that is none": (call(one("x", "1"), "odd"), [("odd", {"x": 1})]),
    "text before": (f"I look.\n\n{call(one('city', 'Zug'))}", ["I look.", ZUG]),
    "text after": (f"{call('', 'now')}\nThere.", [NOW, "There."]),
    "two parameters": (call(one("city", "Zug") + one("days", "2")), [("weather", {"city": "Zug", "days": 2})]),
    "the last of two with a key": (call(one("city", "a") + one("city", "Zug")), [ZUG]),
    "two calls": (f"{call('', 'now')}\n{call(one('city', 'Zug'))}", [NOW, ZUG]),
    "two functions in a call": (
        "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
        [NOW, NOW],
    ),
    "on one line": ("<tool_call><function=weather><parameter=city>Zug</parameter></function></tool_call>", [ZUG]),
    "white space": ("<tool_call> \n\t<function=now> \n </function>\n\n</tool_call>", [NOW]),
    "no end of the function": (f"<tool_call>\n<function=weather>\n{one('city', 'Zug')}</tool_call>", [ZUG]),
    "no end of the call": (f"<tool_call>\n<function=weather>\n{one('city', 'Zug')}</function>", [ZUG]),
    "no beginning of the call": (
        f"Yes: <function=weather>\n{one('city', 'Zug')}</function>\n</tool_call>",
        ["Yes:", ZUG],
    ),
    "another function": (call("", "hack"), [call("", "hack")]),
    "another function alone": ("<function=hack>", ["<function=hack>"]),
    "JSON": ('<tool_call>{"name": "now"}</tool_call>', ['<tool_call>{"name": "now"}</tool_call>']),
    "words": ("#include <functional>, <function=", ["#include <functional>, <function="]),
    "a name without an end": ("<tool_call>\n<function=now", ["<tool_call>\n<function=now"]),
    "a broken call, then one": (f"<tool_call>\n<function=ha{call('', 'now')}", ["<tool_call>\n<function=ha", NOW]),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms(case: str) -> None:
    text, expected = FORMS[case]
    found = [parse(cut) for cut in cuts_of(text)]
    assert called(found[0]) == expected
    assert found == found[:1] * 3


@pytest.mark.parametrize(
    ("rest", "shown"),
    [
        ("<parameter=city>\nZug", '{"city": "Zug'),
        ("<parameter=city>\nZug\n", '{"city": "Zug'),
        ("<parameter=city>\nZug\n</param", '{"city": "Zug'),
        ("<parameter=city>\nZug\n</parameter>\n", '{"city": "Zug'),
        ("<parameter=days>\n12", '{"days": '),
        ("<parameter=ci", "{"),
        (f"{one('days', '1')}<parameter=city>\n", '{"days": 1, "city": "'),
    ],
)
def test_what_breaks_off_is_left_as_it_is(rest: str, shown: str) -> None:
    text = f"<tool_call>\n<function=weather>\n{rest}"
    for cut in cuts_of(text):
        assert parse(cut) == [CallBegan(0, "id", "weather"), CallArguments(0, shown), CallBroken(0, text)]


def test_text_comes_as_it_is_written() -> None:
    parser = PairParser(QWEN_3_CODER, FUNCTIONS, lambda: "id")
    deltas = [delta for char in call(one("city", "x\n<y")) for delta in parser.push(char)]
    seen = [delta.text for delta in deltas if isinstance(delta, CallArguments)]
    assert seen == ["{", '"city": ', '"', "x", "\\n<y", '"', "}"]


@pytest.mark.parametrize("tools", [GLM_4_5, GLM_4_7], ids=lambda tools: tools.name)
def test_a_value_may_speak_of_tags_in_other_forms_too(tools: ToolFormat) -> None:
    text = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a </arg_value> b</arg_value>\n</tool_call>"
    for cut in cuts_of(text):
        assert called(parse(cut, tools)) == [("weather", {"city": "a </arg_value> b"})]


THINK = ReasoningFormat("<think>", "</think>")
TOOLS = [{"type": "function", "function": {"name": "now"}}]
HERMES_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("tools", "prompt", "text", "thoughts", "rest", "calls"),
    [
        (QWEN_3_CODER, "<think>\n", f"hm\n{call('', 'now')}", "hm", "", 1),
        (QWEN_3_CODER, "", f"<think>\nhm\n{call('', 'now')}", "hm", "", 1),
        (QWEN_3_CODER, "<think>\n", f"hm\n</think>\n\n{call('', 'now')}", "hm", "", 1),
        (QWEN_3_CODER, "<think>\n", call("", "now"), "", "", 1),
        (QWEN_3_CODER, "<think>\n", "hm <tool", "hm <tool", "", 0),
        (HERMES, "<think>\n", f"hm\n{HERMES_CALL}", f"hm\n{HERMES_CALL}", "", 0),
        (HERMES, "<think>\n", f"hm\n</think>{HERMES_CALL}", "hm", "", 1),
        (GLM_4_5, "<think>\n", "hm<tool_call>now\n</tool_call>", "hm<tool_call>now\n</tool_call>", "", 0),
    ],
)
def test_a_call_within_thoughts_is_one_where_the_form_has_it_so(
    tools: ToolFormat, prompt: str, text: str, thoughts: str, rest: str, calls: int
) -> None:
    for cut in cuts_of(text):
        parser = OutputFormat(tools, THINK, {}).parser(prompt, TOOLS)
        deltas = [delta for piece in cut for delta in parser.push(piece)] + parser.finish()
        assert "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)) == thoughts
        assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == rest
        assert sum(isinstance(delta, CallBegan) for delta in deltas) == calls
    parser = OutputFormat(tools, THINK, {}).parser(prompt, [])  # without tools there are no calls
    if prompt and "</think>" not in text:
        assert all(isinstance(delta, ReasoningDelta) for delta in parser.push(text) + parser.finish())


def test_types_of_schemas_that_go_round() -> None:
    whole = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, "b": {"$ref": "#/$defs/b"}}}
    assert types({"$ref": "#/$defs/a"}, whole) == {"null"}
    assert text_schema({"$ref": "#/$defs/b"}, whole) is None
    assert types({"$ref": "#/nowhere"}, whole) == types({"type": 3}) == types({"type": [None]}) == types([]) == set()
