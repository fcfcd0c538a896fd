"""Answers of gpt-oss: thoughts, text and calls in channels, whatever way the answer is cut, and grammars of them."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.synthetic import END_ID, byte_tokenizer
from support.templates import HARMONY as TEMPLATE

from pi_runtime.artifact.schema import Text
from pi_runtime.engine.events import CallArguments, CallBegan, CallBroken, Delta, ReasoningDelta, TextDelta, joined
from pi_runtime.engine.tools.formats import MARKERS
from pi_runtime.engine.tools.output import OutputFormat
from pi_runtime.errors import UsageError
from pi_runtime.text.tokenizer import Tokenizer

PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THINK, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


STOPPED = byte_tokenizer().replace(b"<|end|>", b"<|stop|>")
"""The tokenizer of bytes, whose end token is another than harmony's end of a message."""
ADD = function("add", a={"type": "integer"})


@pytest.fixture(scope="module", params=[False, True], ids=["spelled markers", "marker tokens"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    whole = json.loads(STOPPED)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for n, marker in enumerate(MARKERS if request.param else (), END_ID + 1):
        whole["added_tokens"].append({"id": n, "content": marker, "special": True, **flags})
    text = Text(prefix_ids=(), end_ids=(END_ID,))
    return Tokenizer(json.dumps(whole).encode(), text, vocab_size=END_ID + 1 + len(MARKERS))


BYTES = Tokenizer(STOPPED, Text(prefix_ids=(), end_ids=(END_ID,)), vocab_size=END_ID + 1)
FORMAT = OutputFormat.of(TEMPLATE, BYTES)


def parse(pieces: list[str], prompt: str = PROMPT, tools: tuple[Any, ...] = (ADD,)) -> list[Delta]:
    count = itertools.count()
    parser = FORMAT.parser(prompt, tools, lambda: f"id{next(count)}")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined(deltas + parser.finish())


def called(index: int, arguments: str) -> list[Delta]:
    return [CallBegan(index, f"id{index}", "add"), CallArguments(index, arguments)]


ANSWERS: dict[str, tuple[str, list[Delta]]] = {
    "thoughts and text": (f"{THINK}hm <b>{NEXT}{FINAL}Yes.<|return|>", [ReasoningDelta("hm <b>"), TextDelta("Yes.")]),
    "an answer alone": (f"{FINAL}a < b\n", [TextDelta("a < b\n")]),
    "a call": (f'{THINK}hm{NEXT}{CALL}{{"a": 1}}<|call|>', [ReasoningDelta("hm"), *called(0, '{"a": 1}')]),
    "the end token is not shown": (f'{CALL}{{"a": 1}}', called(0, '{"a": 1}')),
    "the tool beside the role": (
        f'{THINK}x{NEXT} to=functions.add<|channel|>commentary json<|message|> {{"a": 1}} <|call|>',
        [ReasoningDelta("x"), *called(0, '{"a": 1}')],
    ),
    "a preamble": (
        f'<|channel|>commentary<|message|>I add.{NEXT}{CALL}{{"a": "<|x"}}<|call|>',
        [TextDelta("I add."), *called(0, '{"a": "<|x"}')],
    ),
    "two calls": (
        f'{CALL}{{"a": 1}}<|call|><|start|>assistant{CALL}{{"a": 2}}<|call|>',
        [*called(0, '{"a": 1}'), *called(1, '{"a": 2}')],
    ),
    "plain text": ("tomorrow <| \n", [TextDelta("tomorrow <| \n")]),
    "cut in a header": (f"{THINK}x{NEXT}<|channel|>fin", [ReasoningDelta("x")]),
    "cut in a marker": (f"{FINAL}x <|en", [TextDelta("x <|en")]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_messages_come_apart(case: str) -> None:
    text, found = ANSWERS[case]
    assert parse([text]) == found
    assert parse(list(text)) == found


def test_thoughts_that_the_prompt_began() -> None:
    assert parse([f"hm{NEXT}{FINAL}Yes."], PROMPT + THINK) == [ReasoningDelta("hm"), TextDelta("Yes.")]


@pytest.mark.parametrize("text", [f"{CALL}add(1)<|call|>", f"{CALL}[1]", CALL, f"{CALL} "])
def test_a_call_without_arguments_is_text(text: str) -> None:
    assert parse([text]) == [TextDelta(text.removesuffix("<|call|>"))]


@pytest.mark.parametrize("name", ["a.b", "a:b", "server/tool", "a-b_1", "x" * 128])
def test_names_that_a_request_may_have(name: str) -> None:
    text = CALL.replace(".add ", f".{name} ") + "{}"
    for pieces in ([text], [*text]):
        assert parse(pieces, tools=(function(name),)) == [CallBegan(0, "id0", name), CallArguments(0, "{}")]


def test_a_call_of_another_tool_is_text() -> None:
    text = '<|channel|>commentary to=functions.hack<|message|>{"a": 1}'
    assert parse([text]) == [TextDelta(text)]
    assert parse([f"{CALL}{{}}"], tools=()) == [TextDelta(f"{CALL}{{}}")]


@pytest.mark.parametrize(
    ("arguments", "rest"),
    [
        ('{"a": "hel', ""),
        ('{"a": 1, "b', "<|call|>"),
        ("{", ""),
        ('{"a": "x", "b": null?', "} done"),
        ('{"a": 1', "<|message|> done"),
    ],
)
def test_a_call_that_breaks_off_is_left_as_it_is(arguments: str, rest: str) -> None:
    for cut in ([f"{CALL}{arguments}{rest}"], list(f"{CALL}{arguments}{rest}")):
        deltas = parse(cut)
        assert deltas[0] == CallBegan(0, "id0", "add")
        assert isinstance(deltas[1], CallArguments)
        assert deltas[2] == CallBroken(0, CALL + deltas[1].text)
        assert (CALL + deltas[1].text + "".join(d.text for d in deltas[3:] if isinstance(d, TextDelta))) == (
            f"{CALL}{arguments}{rest}".removesuffix("<|call|>")
        )


def test_what_follows_arguments_is_text() -> None:
    assert parse([f'{CALL}{{"a": 1}} and']) == [*called(0, '{"a": 1}'), TextDelta("and")]


def test_tokens_of_thoughts_are_counted() -> None:
    parser = FORMAT.parser(PROMPT)
    for piece, tokens in ((THINK, 3), ("a ", 1), ("b", 2), (NEXT, 3), (FINAL, 3), ("Yes", 5)):
        parser.push(piece, tokens)
    assert parser.reasoning_tokens == 9


PIECES = st.sampled_from(
    [*MARKERS, THINK, FINAL, CALL, NEXT, "<|", "<", "{", "}", '{"a": "b', "to=", "assistant", " ", "x"]
)


@given(st.lists(PIECES, max_size=14).map("".join), st.sampled_from([PROMPT, PROMPT + THINK]), st.data())
def test_cuts_change_nothing(text: str, prompt: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = parse([text], prompt)
    assert parse(pieces, prompt) == parse(list(text), prompt) == whole
    broken = {delta.index for delta in whole if isinstance(delta, CallBroken)}
    for delta in whole:
        if isinstance(delta, CallArguments) and delta.index not in broken:
            assert isinstance(json.loads(delta.text), dict)


def takes(tokenizer: Tokenizer, text: str, **asked: Any) -> bool:
    """Whether a text, and then its end, follows from the grammar of an answer."""
    grammar = OutputFormat.of(TEMPLATE, tokenizer).grammar(PROMPT, **asked)
    assert grammar is not None
    state, ids = tokenizer.grammars.start(grammar), [*tokenizer.encode(text), END_ID]
    return all(state.allowed(ids[:n])[token] for n, token in enumerate(ids))


def test_a_call_that_must_be_made(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance")
    asked: dict[str, Any] = {"tools": [ADD], "choice": "required"}
    for before in ("", f"{THINK}hm{NEXT}"):
        assert takes(tokenizer, f'{before}{CALL}{{"a": 1}}', **asked)
        assert not takes(tokenizer, f'{before}{CALL}{{"a": "x"}}', **asked)
        assert not takes(tokenizer, f"{before}{FINAL}Yes.", **asked)


def test_a_call_that_may_be_made(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance")
    for before in ("", f"{THINK}hm{NEXT}"):
        assert takes(tokenizer, f'{before}{CALL}{{"a": 1}}', tools=[ADD])
        assert takes(tokenizer, f"{before}{FINAL}Yes.", tools=[ADD])
        assert not takes(tokenizer, f'{before}{CALL}{{"a": "x"}}', tools=[ADD])


def test_a_form_of_the_answer(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "integer"}
    for before in ("", f"{THINK}hm{NEXT}"):
        assert takes(tokenizer, f"{before}{FINAL}12", schema=schema)
        assert not takes(tokenizer, f"{before}{FINAL}x", schema=schema)
        assert not takes(tokenizer, f"{before}12", schema=schema)
        assert takes(tokenizer, f'{before}{CALL}{{"a": 1}}', schema=schema, tools=[ADD])


def test_tools_of_a_template_without_them() -> None:
    found = OutputFormat.of("<|start|>assistant<|channel|>final<|message|>", BYTES)
    with pytest.raises(UsageError, match="no form of calls"):
        found.grammar(PROMPT, tools=[ADD])
