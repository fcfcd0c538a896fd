"""What a template can show is found by rendering, whatever words its source has."""

# ruff: noqa: E501  templates are broken where they read well

from types import SimpleNamespace
from typing import Any

import pytest
from support.templates import ALL, APRIEL, CHATML, DEEPSEEK, GEMMA, GLM, HARMONY, HERMES, LLAMA, MISTRAL, QWEN, TYPED

from pi_runtime.errors import TemplateError
from pi_runtime.text import chat_template
from pi_runtime.text.chat_template import ChatTemplate
from pi_runtime.text.sandbox import SandboxLimits
from pi_runtime.text.template_abilities import EFFORTS, UNKNOWN, Abilities, abilities_of


def abilities(source: str) -> Abilities:
    with ChatTemplate(source, SandboxLimits(seconds=60.0)) as template:
        return template.abilities


def form(found: Abilities) -> str:
    """How calls are given, in a word."""
    calls = found.calls
    if calls is None:
        return "as text"
    parts = {
        {"": "empty", None: "null"}.get(calls.content.get("content", 0), "absent"): True,
        "text": calls.arguments_are_text,
        "named": calls.names_results,
        "short": calls.short_ids,
        "one": not calls.allows_several,
    }
    return " ".join(name for name, holds in parts.items() if holds)


TABLE: dict[str, tuple[str, str, str]] = {
    CHATML: ("system system_alone system_later repeats", "", "as text"),
    GEMMA: ("", "", "as text"),
    TYPED: ("system system_alone system_later repeats", "assistant system user", "as text"),
    QWEN: ("system system_alone system_later repeats tools switch", "", "empty"),
    LLAMA: ("system system_alone system_later repeats tools", "", "absent one"),
    MISTRAL: ("system tools", "", "absent short"),
    HARMONY: ("system system_alone developer repeats tools", "", "absent one"),
    DEEPSEEK: ("system system_alone repeats", "", "null text"),
    GLM: ("system system_alone system_later repeats tools", "", "absent"),
    HERMES: ("system system_alone system_later repeats tools empty_tools", "", "absent"),
    APRIEL: ("system system_alone system_later repeats tools", "", "absent"),
}


@pytest.mark.parametrize("source", TABLE, ids=[*ALL])
def test_what_templates_can_show(source: str) -> None:
    found, (able, typed, calls) = abilities(source), TABLE[source]
    names = ("system", "system_alone", "system_later", "developer", "repeats", "tools", "empty_tools", "switch")
    assert {name for name in names if getattr(found, name)} == {*able.split()}
    assert sorted(found.typed) == typed.split()
    assert form(found) == calls
    assert found.is_whole


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        # Words that say nothing: in a comment, and in an error.
        (CHATML + "{# system developer tools tool_calls enable_thinking reasoning_effort [TOOL_CALLS] #}", "as text"),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('tools') }}{% endif %}{{ m.content }}{% endfor %}",
            "as text",
        ),
        # Python's way to write an object is not shown where text is.
        (
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}",
            "absent text",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
            "absent",
        ),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ m.name + m.content }}{% else %}{{ m.content }}{% endif %}"
            "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
            "absent named",
        ),
    ],
)
def test_words_of_a_source_say_nothing(source: str, calls: str) -> None:
    found = abilities(source)
    assert form(found) == calls
    assert (found.developer, found.tools, found.switch, found.efforts) == (False, False, False, {})


def test_an_assistant_that_must_say_something() -> None:
    must = "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}{{ m.content }}{% endfor %}"
    assert abilities(must).nothing == " "
    assert abilities(CHATML).nothing == ""


WRITTEN = "{{ reasoning_effort }}{{ messages[0].content }}"
KNOWN = (
    "{% if reasoning_effort == 'none' %}no{% elif reasoning_effort == 'max' %}all{% endif %}{{ messages[0].content }}"
)
STRICT = (
    "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'high') %}{{ raise_exception('effort') }}"
    "{% endif %}{{ reasoning_effort }}{{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("source", "given"),
    [
        (CHATML, {}),
        (WRITTEN, dict(zip(EFFORTS, ["low", "low", "low", "medium", "high", "high", "high"], strict=True))),
        (KNOWN, {effort: effort for effort in EFFORTS}),
        (STRICT, dict(zip(EFFORTS, ["low", "low", "low", "low", "high", "high", "high"], strict=True))),
    ],
)
def test_how_much_a_model_is_asked_to_think(source: str, given: dict[str, str]) -> None:
    assert abilities(source).efforts == given


@pytest.mark.parametrize(
    "source", ["", "{{ raise_exception('no') }}", "{% for %}", "{% for n in range(999999999) %}{% endfor %}"]
)
def test_a_template_that_shows_nothing(source: str) -> None:
    with ChatTemplate(source, SandboxLimits(seconds=0.5)) as template:
        assert template.abilities == UNKNOWN


def test_a_template_is_probed_once() -> None:
    count = 0

    def attempt(messages: list[Any], **_: Any) -> str:
        nonlocal count
        count += 1
        return "".join(str(m.get("content")) for m in messages)

    abilities_of(attempt)
    assert count < 60
    with ChatTemplate(CHATML) as template:
        assert template.abilities is template.abilities


def test_a_template_that_is_slow_each_time_is_not_probed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(chat_template, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def reply(variables: dict[str, Any], seconds: float) -> dict[str, Any]:
        now[0] += min(seconds, 1.9)
        if seconds < 1.9:
            raise TemplateError("time limit")
        return {"text": str(variables["messages"])}

    with ChatTemplate(CHATML) as template:
        monkeypatch.setattr(template, "_reply", reply)
        assert template.abilities == UNKNOWN
        assert now[0] <= chat_template.PROBES * template.limits.seconds
