"""Calls of tools in an answer: found in each format, whatever way the answer is cut into pieces, and never lost."""

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tool_calls import FORMATS, cuts_of, written

from pi_runtime.engine.events import CallArguments, CallBegan, CallBroken, Delta, TextDelta, joined
from pi_runtime.engine.tools.calls import CallParser, new_id
from pi_runtime.engine.tools.formats import (
    GENERIC,
    GLM_4_5,
    GLM_4_7,
    HERMES,
    LLAMA_3,
    MISTRAL,
    MISTRAL_CALL_ID,
    MISTRAL_LIST,
    NEMOTRON_V2,
    ToolFormat,
)
from pi_runtime.engine.tools.marked_calls import MarkedParser
from pi_runtime.engine.tools.pairs import PairParser
from pi_runtime.engine.tools.scanners import JsonScanner

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("look", {"city": "Zürich", "deep": {"a": [1, -2.5e3, True, None, 'x"y\\\n</tool_call>']}}),
    ("add", {}),
]
NAMES = ["a.b", "a:b", "server/tool", "a-b_1", "x" * 128]
FUNCTIONS: dict[str, Any] = {"look": {"properties": {"city": {"type": "string"}}}, "add": {}}


def parse(tools: ToolFormat, pieces: list[str], functions: dict[str, Any] = FUNCTIONS) -> list[Delta]:
    count = itertools.count()
    make_id = lambda: f"id{next(count)}"  # noqa: E731
    kind: Any = PairParser if tools.pairs else MarkedParser if tools.quote else CallParser
    parser: CallParser = kind(tools, functions, make_id)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined(deltas + parser.finish())


def gathered(deltas: list[Delta]) -> tuple[str, list[tuple[str, Any]]]:
    """All text, and the calls with their arguments read, but for those that broke off."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    broken = {delta.index for delta in deltas if isinstance(delta, CallBroken)}
    arguments: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta, CallArguments):
            arguments[delta.index] = arguments.get(delta.index, "") + delta.text
    whole = [delta for delta in deltas if isinstance(delta, CallBegan) and delta.index not in broken]
    return text, [(call.name, json.loads(arguments[call.index])) for call in whole]


@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_calls_of_each_format(tools: ToolFormat) -> None:
    deltas = parse(tools, list(written(tools, *CALLS)))
    assert deltas == parse(tools, [written(tools, *CALLS)])
    assert gathered(deltas) == ("", CALLS)
    assert [d for d in deltas if isinstance(d, CallBegan)] == [CallBegan(0, "id0", "look"), CallBegan(1, "id1", "add")]
    assert not any(isinstance(delta, CallBroken) for delta in deltas)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_names_that_a_request_may_have(tools: ToolFormat, name: str) -> None:
    assert gathered(parse(tools, [written(tools, (name, {}))], {name: {}})) == ("", [(name, {})])


@pytest.mark.parametrize("place", ["before a call", "behind a call", "behind its arguments", "within text"])
@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_white_space_costs_the_same_however_much_there_is(tools: ToolFormat, place: str) -> None:
    blanks, call = " " * 200_000, written(tools, *CALLS[1:])
    text = {
        "before a call": blanks + call,
        "behind a call": call + blanks,
        "behind its arguments": call.rstrip().removesuffix(tools.end) + blanks,
        "within text": f"a{blanks}b",
    }[place]
    began = time.thread_time()
    parse(tools, [text[at : at + 8] for at in range(0, len(text), 8)])
    assert time.thread_time() - began < 8


@pytest.mark.parametrize(
    "tools", [HERMES, MISTRAL_LIST, NEMOTRON_V2, MISTRAL, MISTRAL_CALL_ID, GLM_4_5], ids=lambda tools: tools.name
)
def test_text_stands_before_calls(tools: ToolFormat) -> None:
    """White space between text and call belongs to the call."""
    assert gathered(parse(tools, ["I look.  \n" + written(tools, *CALLS)])) == ("I look.", CALLS)


@pytest.mark.parametrize("tools", [HERMES, MISTRAL_LIST, NEMOTRON_V2, MISTRAL, GLM_4_7], ids=lambda tools: tools.name)
def test_text_after_a_call_is_text(tools: ToolFormat) -> None:
    assert gathered(parse(tools, [written(tools, *CALLS[:1]) + "\n\nThere."])) == ("There.", CALLS[:1])


ADD, ADD_1, ADD_X = ("add", {}), ("add", {"a": 1}), ("add", {"a": "x"})
HERMES_WAYS: dict[str, tuple[str, list[Any]]] = {
    "arguments first": ('{"arguments": {"a": 1}, "name": "add"}', [ADD_1]),
    "no white space": ('{"name":"add","arguments":{"a":"x"}}', [ADD_X]),
    "more members": ('{"id": [{}], "name": "add", "arguments": {"a": 1}, "x": {"name": "y"}}', [ADD_1]),
    "parameters": ('{"name": "add", "parameters": {"a": 1}}', [ADD_1]),
    "arguments, then parameters": ('{"name": "add", "arguments": {"a": 1}, "parameters": {"a": 2}}', [ADD_1]),
    "null, then parameters": ('{"name": "add", "arguments": null, "parameters": {"a": 1}}', [ADD_1]),
    "as text": (r'{"name": "add", "arguments": "{\"a\": \"x\"}"}', [ADD_X]),
    "as text, first": (r'{"arguments": "{\"a\": \"x\"}", "name": "add"}', [ADD_X]),
    "parameters as text": (r'{"name": "add", "parameters": "{\"a\": 1}"}', [ADD_1]),
    "as text, with white space": (r'{"name": "add", "arguments": " \n{ \"a\" : 1 }\t"}', [ADD_1]),
    "as text, with escapes": (
        r'{"name": "add", "arguments": "{\"a\": \"\u00e9\ud83d\ude00\\n\\\"\\u0041\"}"}',
        [("add", {"a": 'é😀\n"A'})],
    ),
    "as text, escaped wholly": (r'{"name": "add", "arguments": "\u007b\u0022a\u0022:1\u007d"}', [ADD_1]),
    "no object as text": (r'{"name": "add", "arguments": "{}"}', [ADD]),
    "no key": ('{"name": "add"}', [ADD]),
    "null": ('{"name": "add", "arguments": null}', [ADD]),
    "null, first": ('{"arguments": null, "name": "add"}', [ADD]),
    "an empty text": ('{"name": "add", "arguments": ""}', [ADD]),
    "blanks": (r'{"name": "add", "arguments": " \n"}', [ADD]),
    "null as text": ('{"name": "add", "arguments": "null"}', [ADD]),
    "nothing": ('{"name": "add", "arguments": {}}', [ADD]),
    "as the API has it": ('{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}', [ADD_1]),
    "as the API sends it": (
        r'{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}',
        [ADD_1],
    ),
    "as the API has it, without arguments": ('{"function": {"name": "add"}, "type": "function"}', [ADD]),
    "a function": ('{"type": "function", "function": "add", "parameters": {"a": 1}}', [ADD_1]),
    "a list": ('[{"name": "add"}]', [ADD]),
    "a list of two": ('[{"name": "add", "arguments": {"a": 1}} , {"name": "add"}]', [ADD_1, ADD]),
    "two": ('{"name": "add", "arguments": {"a": 1}}\n{"name": "add"}', [ADD_1, ADD]),
    "two with a comma": ('{"name": "add"}, {"name": "add", "arguments": {"a": 1}}', [ADD, ADD_1]),
}
"""What may stand between the tags of Hermes, and what is called."""
OTHER_WAYS: dict[str, tuple[ToolFormat, str, list[Any]]] = {
    **{
        f"{tools.name}: {way}": (tools, f"<tool_call>{gap}{text}{gap}</tool_call>", calls)
        for tools, gap in ((HERMES, ""), (GENERIC, "\n"))
        for way, (text, calls) in HERMES_WAYS.items()
    },
    **{
        f"llama: {way}": (LLAMA_3, f"{before}{text}", calls)
        for before in ("", "<|python_tag|>")
        for way, (text, calls) in HERMES_WAYS.items()
        if len(calls) == 1 and text[0] == "{"
    },
    **{
        f"mistral: {way}": (MISTRAL_LIST, f"[TOOL_CALLS][{text}]", calls)
        for way, (text, calls) in HERMES_WAYS.items()
        if text[0] == "{" and way != "two"
    },
    "an id": (MISTRAL_LIST, '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "a1b2c3d4e"}]', [ADD]),
    "no end": (HERMES, '<tool_call>{"name": "add", "arguments": {}}', [ADD]),
    "no end of a list": (HERMES, '<tool_call>[{"name": "add", "arguments": {}}', [ADD]),
    "half an end": (HERMES, '<tool_call>{"name": "add"}\n</tool', [ADD]),
    "spaces": (LLAMA_3, '\n { "name" : "add" , "parameters" : { "a" : [ ] } } \n', [("add", {"a": []})]),
    "two of Llama": (LLAMA_3, '{"name": "add"}; {"name": "add", "arguments": "{}"}', [ADD, ADD]),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_ways_to_write_a_call(way: str) -> None:
    tools, text, calls = OTHER_WAYS[way]
    found = [parse(tools, cut) for cut in cuts_of(text)]
    assert gathered(found[0]) == ("", calls)
    assert found == found[:1] * 3
    assert not any(isinstance(delta, CallBroken) for delta in found[0])


def test_arguments_that_are_text_come_as_they_are_read() -> None:
    parser = CallParser(HERMES, ["add"], lambda: "id")
    text = r'<tool_call>{"name": "add", "arguments": "{\"a\": \"xy\"}'
    deltas = [delta for char in text for delta in parser.push(char)]
    assert [delta.text for delta in deltas if isinstance(delta, CallArguments)] == list('{"a": "xy"}')


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (r'"{\"a\": 1', '{"a": 1'),
        (r'"{\"a\": \"x\\', '{"a": "x\\'),
        (r'"{\"a\" 1}"', '{"a" '),
        (r'"{\"a\": 1"', '{"a": 1'),
    ],
)
def test_arguments_as_text_that_break_off(written: str, shown: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {written}'
    for cut in cuts_of(text):
        began, arguments, broken, *rest = parse(HERMES, cut)
        assert (began, arguments) == (CallBegan(0, "id0", "add"), CallArguments(0, shown))
        assert isinstance(broken, CallBroken)
        assert broken.text + "".join(delta.text for delta in rest if isinstance(delta, TextDelta)) == text


NO_CALLS = {
    "plain": (HERMES, "a < b, <tool> and </tool_call>\n "),
    "another name": (HERMES, 'x <tool_call>\n{"name": "hack", "arguments": {}}\n</tool_call>\n'),
    "a list": (HERMES, '<tool_call>["name", {"name": "add"}]</tool_call>'),
    "a list of an unknown name": (HERMES, '<tool_call>[{"name": "hack"}]</tool_call>'),
    "arguments that are a word": (HERMES, '<tool_call>{"name": "add", "arguments": "x"}</tool_call>'),
    "arguments that are a list as text": (HERMES, '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>'),
    "arguments that are a list": (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    "arguments that are a number": (HERMES, '<tool_call>{"name": "add", "arguments": 1}</tool_call>'),
    "arguments that are true": (HERMES, '<tool_call>{"name": "add", "parameters": true}</tool_call>'),
    "arguments in the wrong place": (HERMES, '<tool_call>{"x": {"name": "add", "arguments": {}}}</tool_call>'),
    "an unknown name without arguments": (HERMES, '<tool_call>{"name": "hack"}</tool_call>'),
    "an unknown function": (HERMES, '<tool_call>{"function": {"name": "hack", "arguments": {}}}</tool_call>'),
    "a name that is no text": (HERMES, '<tool_call>{"name": {"name": "add"}}</tool_call>'),
    "cut before its end": (HERMES, '<tool_call>{"name": "add"'),
    "JSON with a name": (LLAMA_3, '{"name": "Ada", "age": 3}'),
    "words": (HERMES, "<tool_call>add(1)</tool_call>"),
    "broken before": (HERMES, '<tool_call>{"name": "add", "arguments" {}}</tool_call>'),
    "end of text": (HERMES, 'x <tool_call>{"name": "add", "argu'),
    "end in a marker": (HERMES, "x <tool_c"),
    "JSON": (LLAMA_3, '{"answer": [1, 2]}'),
    "later": (LLAMA_3, 'Well: {"name": "add", "parameters": {}}'),
    "code": (LLAMA_3, '<|python_tag|>brave_search.call(query="x")'),
    "no list": (MISTRAL_LIST, '[TOOL_CALLS]{"name": "add", "arguments": {}}'),
    "a bracket": (MISTRAL, "[TOOL_CALLS]x[0] = 1"),
    "a long head": (MISTRAL, "[TOOL_CALLS]" + "a" * 300 + "[ARGS]{}"),
    "no object": (MISTRAL, "[TOOL_CALLS]add[ARGS][1]"),
    "an unknown name": (GLM_4_5, "<tool_call>hack\n<arg_key>a</arg_key>\n</tool_call>"),
    "no tag": (GLM_4_7, "<tool_call>add a</tool_call>"),
    "an end in a name": (GLM_4_7, "x <tool_call>ad"),
}


@pytest.mark.parametrize("case", NO_CALLS)
def test_what_is_no_call_is_text(case: str) -> None:
    tools, text = NO_CALLS[case]
    assert [parse(tools, cut) for cut in cuts_of(text)] == [[TextDelta(text)]] * 3


def test_a_call_within_what_is_none() -> None:
    """The character that breaks a call off may begin the next one."""
    deltas = parse(HERMES, ['<tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>'])
    assert gathered(deltas) == ("<tool_call>", [("add", {})])


BROKEN = {
    "in a text": ('{"a": "hel', ""),
    "in an escape": ('{"a": "x\\u00', ""),
    "in a key": ('{"a": 1, "b', ""),
    "in a number": ('{"a": {"b": 12', ""),
    "at once": ("{", ""),
    "no JSON": ('{"a": "x", "b": null?', "} done"),
    "no value": ('{"a": "x", "b": ', "} done"),
    "a raw line end": ('{"a": "x', '\ny"}'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_arguments_that_break_off_are_left_as_they_are(case: str) -> None:
    """They are not closed: nobody made that call. For a whole answer all of it is there as text."""
    arguments, rest = BROKEN[case]
    head = '<tool_call>{"name": "add", "arguments": '
    deltas = parse(HERMES, [f"x {head}{arguments}{rest}"])
    assert deltas[:2] == [TextDelta("x"), CallBegan(0, "id0", "add")]
    assert deltas[2:4] == [CallArguments(0, arguments), CallBroken(0, f" {head}{arguments}")]
    assert deltas[4:] == ([TextDelta(rest)] if rest else [])


def test_a_call_after_one_that_broke_off() -> None:
    deltas = parse(HERMES, ['<tool_call>{"name": "add", "arguments": {]' + written(HERMES, *CALLS[:1])])
    assert [type(delta) for delta in deltas] == [
        CallBegan,
        CallArguments,
        CallBroken,
        TextDelta,
        CallBegan,
        CallArguments,
    ]
    assert gathered(deltas[4:]) == ("", CALLS[:1])
    assert [delta.index for delta in deltas if isinstance(delta, CallBegan)] == [0, 1]


@pytest.mark.parametrize(
    ("rest", "shown"),
    [
        ("<arg_key>a</arg_key><arg_value>1", '{"a": '),
        ("<arg_key>city</arg_key><arg_value>x</arg_", '{"city": "x'),
        ("<arg_key>a</arg_key><arg_value>1</arg_value><", '{"a": '),
        ("<arg_key>a", "{"),
    ],
)
def test_pairs_that_break_off_are_left_as_they_are(rest: str, shown: str) -> None:
    written = f"<tool_call>look{rest}"
    assert parse(GLM_4_7, [written]) == [CallBegan(0, "id0", "look"), CallArguments(0, shown), CallBroken(0, written)]


def test_values_have_the_types_of_their_schema() -> None:
    """A string is taken as it is written; other values are JSON, and text where they are none."""
    either = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    kinds = {"s": {"type": "string"}, "n": {"type": "integer"}, "e": either, "f": {"type": ["string", "number"]}}
    values = {"s": ' 1\n"', "n": " 12 ", "e": "12", "f": "1", "x": "a b", "y": "NaN", "z": '{"a": [1]}'}
    text = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    parser = PairParser(GLM_4_5, {"f": {"properties": kinds}}, lambda: "id")
    found = gathered(parser.push(f"<tool_call>f\n{text}</tool_call>") + parser.finish())
    expected = {"s": ' 1\n"', "n": 12, "e": "12", "f": 1, "x": "a b", "y": "NaN", "z": {"a": [1]}}
    assert found == ("", [("f", expected)])


def test_strings_in_pairs_come_as_they_are_written() -> None:
    parser = PairParser(GLM_4_5, FUNCTIONS, lambda: "id")
    text = "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>x\n<y</arg_value>\n</tool_call>"
    deltas = [delta for char in text for delta in parser.push(char)]
    seen = [delta.text for delta in deltas if isinstance(delta, CallArguments)]
    assert seen == ["{", '"city": ', '"', "x", "\\n", "<y", '"', "}"]


def test_what_follows_arguments_breaks_no_call() -> None:
    deltas = parse(HERMES, ['<tool_call>{"name": "add", "arguments": {"a": 1}; and'])
    assert gathered(deltas) == ("; and", [("add", {"a": 1})])
    assert not any(isinstance(delta, CallBroken) for delta in deltas)


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser(HERMES, ["add"], lambda: "id")
    written = '{"a": "xy", "b": 12}'
    seen = []
    for char in f'<tool_call>{{"name": "add", "arguments": {written}}}':
        seen += [delta.text for delta in parser.push(char) if isinstance(delta, CallArguments)]
    assert seen == list(written)


def test_ids_are_unique_and_fit_every_template() -> None:
    ids = {new_id() for _ in range(10_000)}
    assert len(ids) == 10_000
    assert all(len(found) == 9 and found.isalnum() and found.isascii() for found in ids)


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "{",
            "}",
            "[",
            "]",
            ",",
        ),
        *(
            ";",
            ":",
            '"',
            '"name"',
            '"arguments"',
            '"parameters"',
            '"add"',
            "add",
            " ",
            "\n",
            "x",
            "\\",
            "1",
            "true",
            "é",
        ),
        *(
            '{"name": "add", "arguments": {',
            '{"name": "add", "parameters": {',
            '"a": "b',
            '"a": {}',
            "[TOOL_CALLS]add[ARGS]{",
            "<tool_call>look\n<arg_key>",
            "</arg_key>\n<arg_value>",
            "</arg_value>",
        ),
    ]
)


@given(st.sampled_from(FORMATS), st.lists(PIECES, max_size=30).map("".join), st.data())
def test_cuts_change_nothing_and_nothing_is_lost(tools: ToolFormat, text: str, data: st.DataObject) -> None:
    whole = parse(tools, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(tools, pieces) == parse(tools, list(text)) == whole
    shown, calls = gathered(whole)  # reads the arguments of all calls, which are JSON
    assert all(isinstance(found, dict) for _, found in calls)
    began = sum(isinstance(delta, CallBegan) for delta in whole)
    broken = [delta for delta in whole if isinstance(delta, CallBroken)]
    assert began == len(calls) + len(broken)
    assert began or shown == text
    assert all(delta.text in text for delta in broken)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), JSON_VALUES), st.booleans(), st.sampled_from([None, 1]))
def test_the_scanner_takes_all_json(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanner = JsonScanner()
    assert all(map(scanner.push, text))
    assert scanner.state == "done"


@given(st.text('{}[]",:\\ \n1-.eatruflsn', max_size=30))
def test_the_scanner_takes_nothing_else(text: str) -> None:
    scanner = JsonScanner()
    taken = all(map(scanner.push, text)) and scanner.state == "done"
    try:
        is_json = isinstance(json.loads(text), dict | list)
    except ValueError:
        is_json = False
    # White space may follow JSON, but not what the scanner read whole.
    assert taken == (is_json and text == text.rstrip())
