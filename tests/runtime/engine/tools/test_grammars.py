"""Answers that a grammar forces to call tools: what the grammar takes, and that the parser reads what comes of it."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.schemas import random_schema
from support.synthetic import END_ID, byte_tokenizer, random_artifact, small_decoder
from support.tool_calls import FORMATS, written

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.artifact.schema import Text
from pi_runtime.engine.events import CallArguments, CallBegan, CallBroken, TextDelta, joined
from pi_runtime.engine.tools.formats import (
    GEMMA_4,
    GENERIC,
    GLM_4_5,
    HERMES,
    LLAMA_3,
    MISTRAL_LIST,
    ReasoningFormat,
    ToolFormat,
)
from pi_runtime.engine.tools.output import OutputFormat
from pi_runtime.errors import Setting, UsageError
from pi_runtime.text.grammar import Grammar
from pi_runtime.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
THINK = ReasoningFormat("<think>", "</think>")
ARGUMENT_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MARKERS = {
    **dict.fromkeys(("<tool_call>", "</tool_call>", "<think>", "</think>", *ARGUMENT_TAGS), False),
    **dict.fromkeys(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"), True),
    **dict.fromkeys(GEMMA_4.markers, True),
}
"""Whether they are special where they are tokens."""
VOCABULARY = END_ID + 1 + len(MARKERS)


def with_markers() -> bytes:
    """The tokenizer of bytes, in which markers are tokens too."""
    whole = json.loads(byte_tokenizer())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for n, (marker, special) in enumerate(MARKERS.items(), END_ID + 1):
        whole["added_tokens"].append({"id": n, "content": marker, "special": special, **flags})
    return json.dumps(whole).encode()


def function(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def closed(**properties: Any) -> dict[str, Any]:
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


LOOK = function("look", closed(city={"type": "string"}), strict=True)
ADD = function("add", closed(a={"type": "integer"}))
CITY, SUM, WRONG = ("look", {"city": "x"}), ("add", {"a": 1}), ("look", {"city": "x", "b": 1})


@pytest.fixture(scope="module", params=[False, True], ids=["spelled markers", "marker tokens"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    data = with_markers() if request.param else byte_tokenizer()
    return Tokenizer(data, Text(prefix_ids=(), end_ids=(END_ID,)), vocab_size=VOCABULARY)


def form(tools: ToolFormat | None, tokenizer: Tokenizer, reasoning: ReasoningFormat | None = None) -> OutputFormat:
    tokens = {marker: token for marker in MARKERS if (token := tokenizer.added_token(marker)) is not None}
    return OutputFormat(tools, reasoning, tokens)


def takes(tokenizer: Tokenizer, grammar: Grammar | None, text: str) -> bool:
    """Whether a text, and then its end, follows from the grammar."""
    assert grammar is not None
    state, ids = tokenizer.grammars.start(grammar), [*tokenizer.encode(text), END_ID]
    return all(state.allowed(ids[:n])[token] for n, token in enumerate(ids))


@pytest.mark.parametrize("reasoning", [None, THINK], ids=["", "thinks"])
@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_a_call_is_required(tools: ToolFormat, reasoning: ReasoningFormat | None, tokenizer: Tokenizer) -> None:
    grammar = form(tools, tokenizer, reasoning).grammar("", tools=[LOOK, ADD], choice="required")
    assert takes(tokenizer, grammar, written(tools, CITY))
    assert takes(tokenizer, grammar, written(tools, SUM))
    assert not takes(tokenizer, grammar, written(tools, WRONG))
    assert not takes(tokenizer, grammar, "hi")
    # Llama's templates take one call a turn.
    assert takes(tokenizer, grammar, written(tools, CITY, SUM)) == (tools is not LLAMA_3)
    assert takes(tokenizer, grammar, f"<think>\nhm\n</think>\n\n{written(tools, SUM)}") == (reasoning is not None)


@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_one_function_is_called_once(tools: ToolFormat, tokenizer: Tokenizer) -> None:
    grammar = form(tools, tokenizer).grammar("", tools=[LOOK, ADD], choice=ADD)
    assert takes(tokenizer, grammar, written(tools, SUM))
    assert not takes(tokenizer, grammar, written(tools, CITY))
    assert not takes(tokenizer, grammar, written(tools, SUM, SUM))


@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_no_parallel_calls(tools: ToolFormat, tokenizer: Tokenizer) -> None:
    grammar = form(tools, tokenizer).grammar("", tools=[LOOK, ADD], choice="required", parallel=False)
    assert takes(tokenizer, grammar, written(tools, SUM))
    assert not takes(tokenizer, grammar, written(tools, SUM, SUM))
    free = form(tools, tokenizer).grammar("", tools=[ADD], parallel=False)
    assert takes(tokenizer, free, "hi")
    assert takes(tokenizer, free, written(tools, SUM))
    assert not takes(tokenizer, free, written(tools, SUM, SUM))


@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_strict_functions_are_called_as_they_say(tools: ToolFormat, tokenizer: Tokenizer) -> None:
    # Without a trigger a call stands alone.
    is_alone = tools is LLAMA_3
    grammar = form(tools, tokenizer, None if is_alone else THINK).grammar("", tools=[LOOK, ADD])
    for before in ("",) if is_alone else ("", "Let me see. ", "<think>\nhm {\n</think>\n\n"):
        assert takes(tokenizer, grammar, f"{before}hi")
        assert takes(tokenizer, grammar, before + written(tools, CITY))
        assert takes(tokenizer, grammar, before + written(tools, ("add", {"b": 2})))
        assert not takes(tokenizer, grammar, before + written(tools, WRONG))
        assert not takes(tokenizer, grammar, before + written(tools, ("hack", {})))


@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_functions_that_are_not_strict_leave_the_answer_free(tools: ToolFormat, tokenizer: Tokenizer) -> None:
    assert form(tools, tokenizer, THINK).grammar("", tools=[ADD]) is None
    assert form(tools, tokenizer, THINK).grammar("") is None


def test_a_form_of_the_answer(tokenizer: Tokenizer) -> None:
    """It holds after thoughts, and beside calls."""
    schema = closed(x={"type": "integer"})
    plain = form(HERMES, tokenizer).grammar("", schema=schema)
    assert takes(tokenizer, plain, '{"x": 1}')
    assert not takes(tokenizer, plain, "hi")
    assert takes(tokenizer, form(None, tokenizer).grammar("", schema=True), "[1]")
    thinks = form(HERMES, tokenizer, THINK)
    assert takes(tokenizer, thinks.grammar("", schema=schema), '<think>hm</think>\n\n{"x": 1}')
    assert takes(tokenizer, thinks.grammar("<think>\n", schema=schema), 'hm</think>{"x": 1}')
    assert not takes(tokenizer, thinks.grammar("<think>\n", schema=schema), '{"x": 1}')
    assert not takes(tokenizer, thinks.grammar("<think>\n\n</think>\n\n", schema=schema), '<think>hm</think>{"x": 1}')
    both = thinks.grammar("", schema=schema, tools=[ADD])
    assert takes(tokenizer, both, '{"x": 1}')
    assert takes(tokenizer, both, written(HERMES, SUM))
    assert not takes(tokenizer, both, "hi")


def test_what_is_impossible_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no form of calls") as refused:
        form(None, tokenizer).grammar("", tools=[ADD])
    assert refused.value.setting == Setting("tools")
    with pytest.raises(UsageError) as refused:
        form(LLAMA_3, tokenizer).grammar("", tools=[ADD], schema=closed())
    assert refused.value.setting == Setting("schema")
    with pytest.raises(UsageError) as refused:
        form(HERMES, tokenizer).grammar("", tools=[ADD, function("x", {"type": "array"})], choice="required")
    assert refused.value.setting == Setting("tools[1].function.parameters")
    with pytest.raises(UsageError, match="anyOf of all arguments together") as refused:
        form(GLM_4_5, tokenizer).grammar("", tools=[function("x", {"anyOf": [closed()]})], choice="required")
    assert refused.value.setting == Setting("tools[0].function.parameters")


def test_all_tools_together_become_large_by_references(tokenizer: Tokenizer) -> None:
    """Each alone may; many of them, of a kilobyte each, would take long."""
    doubled = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(10)} | {"d10": {}}
    large = [function(name, {"$defs": doubled, "$ref": "#/$defs/d0", "properties": {"a": {}}}) for name in "xy"]
    tools = form(HERMES, tokenizer)
    for tool in large:
        assert tools.grammar("", tools=[ADD, tool], choice="required") is not None
    with pytest.raises(UsageError, match="tool 'y': ") as refused:
        tools.grammar("", tools=[*large, ADD], choice="required")
    assert refused.value.setting == Setting("tools[1].function.parameters")
    advice = form(GENERIC, tokenizer).grammar("", tools=[*large, ADD])
    assert advice is not None
    assert '"integer"' in advice.source


def test_a_function_without_parameters(tokenizer: Tokenizer) -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    grammar = form(HERMES, tokenizer).grammar("", tools=[bare], choice="required")
    assert takes(tokenizer, grammar, written(HERMES, ("now", {})))
    assert not takes(tokenizer, grammar, written(HERMES, ("now", {"a": 1})))


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A random model that knows markers."""
    decoder = small_decoder(context_length=1024, vocab_size=VOCABULARY)
    files = {"tokenizer.json": with_markers()}
    text = Text(prefix_ids=(), end_ids=(END_ID,))
    path = random_artifact(tmp_path_factory.mktemp("tools") / "a.pi", decoder, text=text, scale=2.0, files=files)
    with load(path, device="cpu") as model:
        yield model


@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_forced_calls_validate(tools: ToolFormat, talker: Model) -> None:
    """Random models call functions with random schemas; the parser reads each call, and its arguments validate."""
    jsonschema = pytest.importorskip("jsonschema")
    rng, forms = random.Random(tools.name), form(tools, talker.tokenizer)
    functions = [function(f"f_{n}", {**random_schema(rng), "type": "object"}) for n in range(8)]
    pairs = [functions[n : n + 2] for n in range(0, 8, 2)]
    grammars = [forms.grammar("", tools=pair, choice="required", parallel=False) for pair in pairs]
    settings: Any = {"max_tokens": 250, "shown_tokens": forms.shown_tokens(functions)}
    with Engine(talker) as engine:
        streams = [
            engine.generate([1, n], sampling=Sampling(temperature=2.0, seed=n), grammar=grammar, **settings)
            for n, grammar in enumerate(3 * grammars)
        ]
        finished = 0
        for pair, stream in zip(3 * pairs, streams, strict=True):
            parser = forms.parser("", pair)
            deltas = joined([delta for piece in stream for delta in parser.push(piece)] + parser.finish())
            began, arguments, *rest = deltas
            assert isinstance(began, CallBegan)
            assert isinstance(arguments, CallArguments)
            if stream.finish_reason == "end":
                schema = next(f["function"]["parameters"] for f in pair if f["function"]["name"] == began.name)
                jsonschema.validate(json.loads(arguments.text), schema)
                finished += 1
                assert not rest
            else:  # within the arguments, or behind them
                try:
                    json.loads(arguments.text)
                except ValueError:
                    assert [type(delta) for delta in rest] == [CallBroken]
                else:
                    assert not rest
    assert finished >= 3


def test_special_tokens_show_only_where_asked(talker: Model) -> None:
    forms = form(MISTRAL_LIST, talker.tokenizer)
    now = function("now", closed())
    grammar = forms.grammar("", tools=[now], choice=now)
    texts = [
        "".join(talker.generate([1], grammar=grammar, shown_tokens=shown)) for shown in ((), forms.shown_tokens([now]))
    ]
    assert texts == ['[{"name": "now", "arguments": {}}]', '[TOOL_CALLS][{"name": "now", "arguments": {}}]']
    assert forms.shown_tokens() == []
    assert [type(d) for d in forms.parser("", [now]).push(texts[0])] == [TextDelta]


def test_definitions_that_every_pair_would_repeat_are_bounded(tokenizer: Tokenizer) -> None:
    """Else two lists of a megabyte together would make a grammar of gigabytes."""
    properties = {f"p{n}": {"$ref": "#/$defs/a"} for n in range(1000)}
    schema = {"properties": properties, "required": [*properties] * 10, "$defs": {"a": {"type": "integer"}}}
    forms = form(GLM_4_5, tokenizer)
    grammar = forms.grammar("", tools=[function("f", schema)], choice="required")
    assert grammar is not None
    assert len(grammar.source) < 1_000_000
    schema["$defs"]["b"] = {"const": "x" * 5000}
    with pytest.raises(UsageError, match=r"too long: 5[0-9]+ bytes for each of 1000 properties"):
        forms.grammar("", tools=[function("f", schema)], choice="required")
