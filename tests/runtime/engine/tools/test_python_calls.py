"""Calls that stand as Python writes them: values of any kind, in any cut; what is no call stays text."""

import json
from typing import Any

import pytest
from support.tool_calls import cuts_of

from pi_runtime.engine.events import CallArguments, CallBegan, TextDelta
from pi_runtime.engine.tools.formats import PYTHON, ReasoningFormat
from pi_runtime.engine.tools.output import OutputFormat, tools_of
from pi_runtime.text.chat_template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "a.b-c")]
END = PYTHON.end
Calls = list[tuple[str, dict[str, Any]]]


def read(text: str, pieces: list[str]) -> tuple[str, Calls]:
    """The text and the calls of an answer."""
    parser = OutputFormat(PYTHON, None, {}).parser("", TOOLS, lambda: "id")
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    names = [delta.name for delta in deltas if isinstance(delta, CallBegan)]
    arguments = [
        json.loads("".join(d.text for d in deltas if isinstance(d, CallArguments) and d.index == n))
        for n in range(len(names))
    ]
    return "".join(d.text for d in deltas if isinstance(d, TextDelta)), list(zip(names, arguments, strict=True))


VALUES = [
    *(3, -1.5, True, None, "", "it's", 'a "b"', "a\nb\\d", "Zürich 😀", "f(x=1), [2]", "]<|tool_call_end|>", "a=b"),
    *([], {}, [1, [True, None], "x"], {"a": {"b": ["True", False]}}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_as_python_and_as_json_writes_them(value: Any) -> None:
    for written in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        call = f"look(key={written}, more = 1)"
        text = f"I look. {PYTHON.trigger}[{call},a.b-c()]<|tool_call_end|>"
        for pieces in cuts_of(text):
            assert read(text, pieces) == ("I look.", [("look", {"key": value, "more": 1}), ("a.b-c", {})]), written


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        (r"'\d+'", r"\d+"),  # no escape of Python
        ("'two\nlines'", "two\nlines"),
        ("(1, 'a')", [1, "a"]),
        ("{'True': True, 'n': null}", {"True": True, "n": None}),
        (r"'\u00e9'", "é"),
    ],
)
def test_what_models_write_besides(argument: str, value: Any) -> None:
    text = f"{PYTHON.trigger}[look(key={argument})]<|tool_call_end|>"
    for pieces in cuts_of(text):
        assert read(text, pieces) == ("", [("look", {"key": value})])


@pytest.mark.parametrize(
    "call",
    [
        *("other(a=1)", "look", "look(1)", "look(a=)", "look(=1)", "look(a=b)", "look(a=1, a=2)"),
        *("look(a=NaN)", r"look(a='\ud800')", r"look(a='\x')", "look(a={1, 2})", "look(a=1+1)", "look(a=f'x')"),
        *("look(a='b", "look(a=" + "[" * 3000 + ")", "a b(c=1)", "look(a=1e999)"),
    ],
    ids=lambda call: call[:20],
)
def test_what_is_no_call_stays_text(call: str) -> None:
    text = f"{PYTHON.trigger}[{call}"
    for pieces in cuts_of(text):
        assert read(text, pieces) == (text, [])


TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content or '' }}{% if m.tool_calls %}{{ '<|tool_call_start|>[' }}{% for call in m.tool_calls %}"
    "{{ call.function.name + '(' }}{% for k, v in call.function.arguments | items %}{{ k }}="
    """{% if v is string %}{{ "'" + v + "'" }}{% elif v is mapping %}{{ v | tojson }}{% else %}{{ v }}{% endif %}"""
    "{{ ', ' if not loop.last }}{% endfor %}{{ ')' }}{{ ', ' if not loop.last }}{% endfor %}"
    "{{ ']<|tool_call_end|>' }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
)
"""Calls as LFM2.5's template writes them."""


def test_a_template_that_writes_so_is_known() -> None:
    with ChatTemplate(TEMPLATE) as template:
        assert tools_of(template) is PYTHON
        assert ReasoningFormat.of(template.source) is None
