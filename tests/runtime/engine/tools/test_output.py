"""Thoughts apart from text and calls, and how many tokens they took."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tool_calls import cuts_of

from pi_runtime.engine.events import CallArguments, CallBegan, Delta, ReasoningDelta, TextDelta, joined
from pi_runtime.engine.history import one_form
from pi_runtime.engine.prompt_writer import PromptWriter
from pi_runtime.engine.tools.calls import CallParser
from pi_runtime.engine.tools.formats import HERMES, ReasoningFormat, ToolFormat
from pi_runtime.engine.tools.output import OutputFormat, OutputParser, ReasoningParser, tools_of
from pi_runtime.text.chat_template import ChatTemplate

THINK = ReasoningFormat("<think>", "</think>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLED = [CallBegan(0, "id", "add"), CallArguments(0, '{"a": 1}')]


def parse(pieces: list[str], prompt: str = "") -> list[Delta]:
    parser = OutputParser(ReasoningParser(THINK, prompt), CallParser(HERMES, ["add"], lambda: "id"))
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined(deltas + parser.finish())


@pytest.mark.parametrize(
    ("prompt", "text", "found"),
    [
        ("", "<think>\nhm,\n so \n</think>\n\nYes.", [ReasoningDelta("hm,\n so"), TextDelta("Yes.")]),
        ("<think>\n", "hm </think> Yes.\n", [ReasoningDelta("hm"), TextDelta("Yes.\n")]),
        ("", f"\n<think>hm</think>Well\n{CALL}", [ReasoningDelta("hm"), TextDelta("Well"), *CALLED]),
        ("<think>\n\n</think>\n\n", " Yes <think>x</think>", [TextDelta(" Yes <think>x</think>")]),
        ("", "  Yes <think> no </think>", [TextDelta("  Yes <think> no </think>")]),
        ("", "<thin", [TextDelta("<thin")]),
        ("", "<think>hm </thi", [ReasoningDelta("hm </thi")]),
        ("<think>", f"I could {CALL} ", [ReasoningDelta(f"I could {CALL}")]),
        ("", "<think></think>", []),
        ("", "", []),
    ],
)
def test_thoughts_come_apart(prompt: str, text: str, found: list[Delta]) -> None:
    assert parse([text], prompt) == found
    assert parse(list(text), prompt) == found


def test_thoughts_of_gemma_4() -> None:
    """Its template ends a prompt with empty thoughts unless it is to think; then the model begins them."""
    found = ReasoningFormat.of("{{ '<|channel>thought\\n' + thinking + '\\n<channel|>' }}")
    assert found is not None
    assert "<|channel>" in found.markers
    for prompt, text, wanted in (
        ("<|turn>model\n", "<|channel>thought\nhm\n<channel|>Yes.", [ReasoningDelta("hm"), TextDelta("Yes.")]),
        ("<|turn>model\n<|channel>thought\n<channel|>", "Yes.", [TextDelta("Yes.")]),
    ):
        for pieces in ([text], list(text)):
            parser = OutputParser(ReasoningParser(found, prompt), None)
            assert joined([*(d for piece in pieces for d in parser.push(piece)), *parser.finish()]) == wanted
        assert found.is_closed(prompt) == (len(wanted) == 1)


PIECES = st.sampled_from(
    ["<think>", "</think>", "<th", "ink>", "</", " ", "\n", "x", "<tool_call>", CALL, "</tool_call>"]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from(["", "<think>\n"]), st.data())
def test_cuts_change_nothing(text: str, prompt: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(pieces, prompt) == parse(list(text), prompt) == parse([text], prompt)


def test_tokens_of_thoughts_are_counted() -> None:
    parser = OutputParser(ReasoningParser(THINK, ""), None)
    for piece, tokens in (("<think>", 1), ("a ", 1), ("b", 2), ("", 1), ("</think>", 1), ("\n\n", 1), ("Yes", 5)):
        parser.push(piece, tokens)
    assert parser.reasoning_tokens == 6


def test_templates_that_think(shared: Path) -> None:
    folder = shared / "data" / "chat_templates"
    found = {file.stem for file in folder.glob("*.jinja") if ReasoningFormat.of(file.read_text())}
    assert found == {
        "deepseek-r1-distill-qwen-32b",
        "gpt-oss-120b",
        "granite-3.3-2b-instruct",
        "qwen3-0.6b",
        "smollm3-3b",
    }


def test_published_templates_have_the_formats_of_their_models(shared: Path) -> None:
    folder = shared / "data" / "chat_templates"
    found = {file.stem: tools.name for file in folder.glob("*.jinja") if (tools := ToolFormat.of(file.read_text()))}
    found = {stem: name for stem, name in found.items() if name != "generic"}
    assert found == {
        "gpt-oss-120b": "harmony",
        "hermes-3-llama-3.1-8b-tool_use": "hermes",
        "llama-3.1-8b-instruct": "llama-3",
        "llama-3.2-3b-instruct": "llama-3",
        "mistral-nemo-instruct-2407": "mistral-list",
        "qwen2.5-7b-instruct": "hermes",
        "qwen3-0.6b": "hermes",
        "smollm3-3b": "hermes",
    }


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}", "mistral-call-id"),
        ("{{ '<tool_call>\\n<function=' + name }}arguments", "generic"),
        ("{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' + key }}", "qwen-3-coder"),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm-4.5"),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>", "glm-4.7"),
        ("{{ '<|start_header_id|>' }}", "generic"),
        ("{{ '<|channel|>commentary to=functions.' + name }}", "harmony"),
        ("{{ '<|channel|>final' }}", None),
        ("{{ messages }}", "generic"),
        ("", None),
    ],
)
def test_formats_of_templates(template: str, name: str | None) -> None:
    found = ToolFormat.of(template)
    assert (found and found.name) == name


JSON_CALL = """{{ '{"name": "' + c.name + '", "arguments": ' + (c.arguments | tojson) + '}' }}"""
PAIRS = (
    "{{ '<function=' + c.name + '>\\n' }}{% for k, v in c.arguments | items %}{{ '<parameter=' + k + '>\\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>' }}"
)
TALK = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{% set c = call.function %}"
    "{{ '\\n<tool_call>\\n' }}CALL{{ '\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' if add_generation_prompt else '' }}"
)
"""Thoughts that the prompt opens, and calls: what Qwen3.5 and the thinking Qwen3-Next write."""
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}
LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object", "properties": PROPERTIES}}
ARGUMENTS = {"city": "Zürich\n</parameter> <b>", "days": 3, "deep": {"a": [1, True, None, "</tool_call>"]}}


@pytest.mark.parametrize(
    ("call", "name"), [(PAIRS, "qwen-3-coder"), (JSON_CALL, "hermes")], ids=["Qwen3.5", "Qwen3-Next"]
)
@pytest.mark.parametrize("text", ["", "I look."])
def test_what_a_template_writes_of_an_answer_is_read_as_it(call: str, name: str, text: str) -> None:
    function = {"name": "look", "arguments": json.dumps(ARGUMENTS)}
    calls = [{"id": i, "type": "function", "function": function} for i in ("a1b2c3d4e", "b1b2c3d4e")]
    said = {"role": "assistant", "content": text, "reasoning_content": "hm,\n so", "tool_calls": calls}
    messages, tools = [{"role": "user", "content": "hi"}, said], [{"type": "function", "function": LOOK}]
    with ChatTemplate(TALK.replace("CALL", call)) as template:
        found = OutputFormat(tools_of(template), ReasoningFormat.of(template.source), {})

        def written(count: int, *, asks: bool) -> str:
            options: dict[str, Any] = {"tools": tools, "tools_as_text": False, "variables": {}}
            return PromptWriter(template, **options, add_generation_prompt=asks).write(one_form(messages[:count]))

        prompt, whole = written(1, asks=True), written(2, asks=False)
    assert found.tools
    assert found.tools.name == name
    assert whole.startswith(prompt)
    for pieces in cuts_of(whole.removeprefix(prompt).removesuffix("<|im_end|>\n")):
        parser = found.parser(prompt, tools, lambda: "id")
        deltas = joined([delta for piece in pieces for delta in parser.push(piece)] + parser.finish())
        assert [d.text for d in deltas if isinstance(d, ReasoningDelta)] == ["hm,\n so"]
        assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == text
        assert sum(isinstance(d, CallBegan) for d in deltas) == len(calls)
        for n in range(len(calls)):
            arguments = "".join(d.text for d in deltas if isinstance(d, CallArguments) and d.index == n)
            assert json.loads(arguments) == ARGUMENTS
