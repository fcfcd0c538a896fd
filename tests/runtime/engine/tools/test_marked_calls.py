"""Calls whose texts stand between marks: values of any kind, in any cut; what is no call stays text."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tool_calls import cuts_of, marked

from pi_runtime.engine.events import CallArguments, CallBegan, CallBroken, TextDelta
from pi_runtime.engine.history import one_form
from pi_runtime.engine.prompt_writer import PromptWriter
from pi_runtime.engine.tools.formats import GEMMA_4, ReasoningFormat
from pi_runtime.engine.tools.output import OutputFormat, tools_of
from pi_runtime.text.chat_template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "a.b-c")]
Calls = list[tuple[str, dict[str, Any]]]


def read(text: str, pieces: list[str]) -> tuple[str, Calls]:
    """The text and the whole calls of an answer."""
    parser = OutputFormat(GEMMA_4, None, {}).parser("", TOOLS, lambda: "id")
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    broken = {delta.index for delta in deltas if isinstance(delta, CallBroken)}
    names = {n: d.name for n, d in enumerate(d for d in deltas if isinstance(d, CallBegan))}
    calls = [
        (name, json.loads("".join(d.text for d in deltas if isinstance(d, CallArguments) and d.index == n)))
        for n, name in names.items()
        if n not in broken
    ]
    return "".join(d.text for d in deltas if isinstance(d, TextDelta)), calls


VALUES = [
    *(3, -1.5, 1e-7, True, None, "", "it's", 'a "b"', "a\nb\\d", "Zürich 😀", "f{x:1}, [2]", "}<tool_call|>", "a:b,c"),
    *([], {}, [[]], [{}, {}], [1, [True, None], "x"], {"a": {"b": ["True", False]}, "B": 1}, "null", "3", "<", "<|"),
]


@pytest.fixture(scope="module", params=["own", "published"])
def template(request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    source = TEMPLATE
    if request.param == "published":
        if not (folder := os.environ.get("LLAMA_CPP_SOURCE")):
            pytest.skip("LLAMA_CPP_SOURCE names no source of llama.cpp, which has Gemma 4's template")
        source = (Path(folder) / "models" / "templates" / "google-gemma-4-31B-it.jinja").read_text()
    with ChatTemplate(source) as found:
        yield found


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_as_the_template_writes_them(value: Any, template: ChatTemplate) -> None:
    arguments = {"key": value, "More": 1}
    call = {"id": "id", "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}
    writer = PromptWriter(template, tools=TOOLS, tools_as_text=False, variables={}, add_generation_prompt=False)
    told = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = writer.write(one_form(told))
    written = prompt[prompt.index(f"{GEMMA_4.trigger}call:look") : prompt.rindex(GEMMA_4.end) + len(GEMMA_4.end)]
    assert written.replace("None", "null") == f"{GEMMA_4.trigger}call:look{marked(arguments)}{GEMMA_4.end}"
    text = f"I look. {written}{GEMMA_4.trigger}call:a.b-c{{}}{GEMMA_4.end}"
    for pieces in cuts_of(text):
        assert read(text, pieces) == ("I look.", [("look", arguments), ("a.b-c", {})]), written


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("words", "words"),
        ("two words", "two words"),
        ('"a\\n, }"', "a\n, }"),
        ('{<|"|>a b<|"|>: 1, "c": [ ]}', {"a b": 1, "c": []}),
        ("True", True),
        (" 1 ", 1),
        ("01", "01"),
        ("NaN", "NaN"),
        ("\n[1,\n2]", [1, 2]),
    ],
)
def test_what_models_write_besides(argument: str, value: Any) -> None:
    text = f"{GEMMA_4.trigger} call:look{{key:{argument}}} {GEMMA_4.end}"
    for pieces in cuts_of(text):
        assert read(text, pieces) == ("", [("look", {"key": value})])


@pytest.mark.parametrize(
    "call",
    [
        *("call:other{a:1}", "call:look", "look{a:1}", "call:look(a=1)", "call:look[1]", "call: look{}", "{a:1}"),
        *("call:look{a}", "call:look{a:}", "call:look{:1}", "call:look{a:1,}", "call:look{a:1]", "call:look{a:[1}"),
        *(
            "call:look{a:[,1]}",
            "call:look{a:1,,b:2}",
            'call:look{a:"\\d"}',
            'call:look{a:<|"|>x<|"|>y}',
            "call:look{,}",
        ),
        *(
            'call:look{a:<|"|>x',
            "call:look{a:1}x",
            "call:look{a:[1,]}",
            "call:look{,}",
            'call:look{<|"|>a<|"|>}',
            "call:look{a:{}1}",
        ),
    ],
)
def test_what_is_no_call_stays_text(call: str) -> None:
    text = f"{GEMMA_4.trigger}{call}"
    whole = call.endswith("}x")  # with its end missing alone
    for pieces in cuts_of(text):
        found, calls = read(text, pieces)
        assert calls == ([("look", {"a": 1})] if whole else [])
        assert (found == text) or call.startswith("call:look{")


TEMPLATE = (
    "{% macro value(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, w in v | dictsort %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for w in v %}{{ value(w) }}{{ ',' if not loop.last }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ '<|turn>' + m.role + '\\n' }}"
    "{% for call in m.tool_calls or [] %}{{ '<|tool_call>call:' + call.function.name }}"
    "{{ value(call.function.arguments) }}{{ '<tool_call|>' }}{% endfor %}{{ m.content or '' }}{{ '<turn|>\\n' }}"
    "{% endfor %}{{ '<|turn>model\\n' if add_generation_prompt else '' }}"
)
"""Calls as Gemma 4's template writes them."""


def test_a_template_that_writes_so_is_known(template: ChatTemplate) -> None:
    assert tools_of(template) is GEMMA_4
    assert (ReasoningFormat.of(template.source) is None) == (template.source == TEMPLATE)
