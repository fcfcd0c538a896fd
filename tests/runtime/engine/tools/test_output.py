"""Thoughts apart from text and calls, and how many tokens they took."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_runtime.engine.events import CallArguments, CallBegan, Delta, ReasoningDelta, TextDelta, joined
from pi_runtime.engine.tools.calls import CallParser
from pi_runtime.engine.tools.formats import HERMES, ReasoningFormat, ToolFormat
from pi_runtime.engine.tools.output import OutputParser, ReasoningParser

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
