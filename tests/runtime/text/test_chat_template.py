"""Chat templates are rendered as transformers renders them; what fails says where."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.templates import render

from pi_runtime.errors import PromptError, TemplateError, UsageError
from pi_runtime.text.chat_template import ChatTemplate, SandboxLimits

USER = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "user", "content": "  What is <b>π</b>? 😀\n"},
    {"role": "assistant", "content": '<think>\nhm\n</think>\n\nAbout 3.14 & "more".  '},
    {"role": "user", "content": "Thanks,\n\nbye"},
]
CHATS = [TALK, [{"role": "system", "content": "Be brief. "}, *TALK]]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
PATIENT = SandboxLimits(seconds=60.0)

CHATML = r"""{% for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}
    {{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' -}}
{% endif %}
"""
OWN = {
    "chatml": CHATML,
    "empty": "",
    "no system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}[{{ m.content | trim }}]{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.content }}|{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ x }}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}\n{{ x }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ {'b': '<é', 'a': 1} | tojson(sort_keys=true) }}",
    "namespace": "{% set ns = namespace(n=0, self=1) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "private namespace": "{% set ns = namespace(_n=0) %}{{ ns._n }}",
    "private assignment": "{% set ns = namespace() %}{% set ns._n = 1 %}{{ ns._n }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys('ab', 2) }}{{ dict.mro }}",
    "definedness": "{{ tools is none }}{{ documents is none }}"
    "{{ date is defined }}{{ unk_token }}{{ tools is defined }}",
    "macro": "{% macro turn(m) %}\n  <{{ m.role }}>{{ m.content }}\n{% endmacro %}\n{% for m in messages %}\n"
    "  {{ turn(m) }}{% endfor %}\n{{ '' -}}\n  x",
    "python methods": "{% for m in messages %}{{ m.content.strip().split('\n')[0].upper() }}{{ m['content'][:3] }}"
    "{{ m.get('name', '-') }}{{ m.items() | list }}{% endfor %}{{ '%s-%02d' % ('a', 3) }}{{ '{:>4}'.format(7) }}",
    "undefined attribute": "{{ messages[0].nothing }}{{ nothing.at_all }}",
    "date": "{{ strftime_now('%Y') | length }}",
    "line ends": "a\r\n{% if true %}\r\nb\r\n{% endif %}\r\n{{ '\\n' }}\n\n",
    "lone surrogate": "{{ '\\ud83d' }}",
    "filters": "{{ [3, 1] | sort | join(',') }}{{ 'a b' | title | center(9) }}{{ '<b>' | e }}{{ messages | pprint }}"
    "{{ '<i>x &amp; y' | striptags }}{{ 'a b' | urlencode }}{{ messages | map(attribute='role') | unique | list }}",
}


@pytest.fixture(scope="module")
def transformers_render() -> Callable[..., str]:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    def one(template: str, chat: list[dict[str, Any]], prompt: bool, tools: Any = None, **more: Any) -> str:
        names = VARIABLES | more
        texts, _ = render_jinja_template([chat], tools, chat_template=template, add_generation_prompt=prompt, **names)
        return texts[0]

    return one


def differences(template: str, theirs: Callable[..., str]) -> list[str]:
    """Where ours and transformers' rendering part, over chats with and without system message and prompt."""
    import jinja2

    cases = [(chat, prompt) for chat in CHATS for prompt in (False, True)]

    def ours(chat: list[dict[str, str]], prompt: bool) -> str | None:
        try:
            return kept.render(chat, variables=VARIABLES, add_generation_prompt=prompt)
        except TemplateError:
            return None

    with ChatTemplate(template, PATIENT) as kept:
        rendered = [ours(*case) for case in cases]
    found = []
    for (chat, prompt), mine in zip(cases, rendered, strict=True):
        try:
            expected = theirs(template, chat, prompt)
        except (jinja2.TemplateError, TypeError):
            expected = None
        if mine != expected:
            found.append(f"{len(chat)} messages, prompt {prompt}:\n{mine!r}\n{expected!r}")
    return found


@pytest.mark.parametrize("name", OWN)
def test_own_template_renders_as_in_transformers(name: str, transformers_render: Callable[..., str]) -> None:
    assert not differences(OWN[name], transformers_render)


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks up a <city>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "é"}}},
    },
}
CALL = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": "look", "arguments": {"city": "Köln", "n": [1, None]}},
}
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm\n"},
    {"role": "tool", "content": "here", "tool_call_id": "a1b2c3d4e"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "Thanks"},
]
WITHOUT_TEXT = [TOOL_TALK[0], {**TOOL_TALK[1], "content": None}, *TOOL_TALK[2:]]
HEAD = "{% for m in messages %}"
# What each family's template does with tools, in short.
FAMILIES = {
    "qwen": "{% if tools %}<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    + HEAD
    + "<|im_start|>{{ m.role }}{% if m.content %}\n{{ m.content }}{% endif %}{% for c in m.tool_calls %}"
    "{% if c.function is defined %}{% set c = c.function %}{% endif %}\n<tool_call>\n"
    """{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>"""
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "thoughts": HEAD + "{{ m.role }}{% if m.reasoning_content is defined and m.reasoning_content is not none %}"
    "<think>{{ m.reasoning_content.strip('\n') }}</think>{% endif %}{{ m.thinking }}{{ m.content }}{% endfor %}",
    "llama": "{% if not tools is none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{{ strftime_now('%Y') }}" + HEAD + "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}{% set f = m.tool_calls[0].function %}"
    """{{ '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}"""
    "{% elif m.role == 'tool' %}{{ m.content | tojson if m.content is mapping or m.content is iterable }}"
    "{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}{{ date_string }}",
    "mistral": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    + HEAD
    + "{% if tools is not none and m == users[-1] %}[AVAILABLE_TOOLS][{% for t in tools %}"
    "{% for k, v in t.function.items() "
    """if k != 'return' %}"{{ k }}": {{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}{% endfor %}]{% endif %}"""
    "{% if m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% set out = c.function | tojson %}{{ out[:-1] }}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    """, "id": "{{ c.id }}"}{% endfor %}]{{ eos_token }}{% else %}{{ m.content }}{{ m.tool_call_id }}"""
    "{% endif %}{% endfor %}",
    "hermes": "{% macro kind(s) %}{% if s.type == 'array' %}list[{{ kind(s['items']) }}]{% else %}{{ s.type }}"
    "{% endif %}{% endmacro %}{% for t in tools %}"
    "{% for k, v in t.function.parameters.properties | items %}{{ k }}: {{ kind(v) }}"
    "{% endfor %}{% endfor %}"
    + HEAD
    + "{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem.role if not loop.last }}{% endfor %}",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_and_variables_render_as_in_transformers(name: str, transformers_render: Callable[..., str]) -> None:
    tools: list[dict[str, Any]]
    chats = (TOOL_TALK, WITHOUT_TEXT, TOOL_TALK[:1])
    with ChatTemplate(FAMILIES[name], PATIENT) as kept:
        for chat, tools, more in itertools.product(
            chats, ([LOOK, LOOK], []), ({}, {"enable_thinking": False, "date_string": "x"})
        ):
            variables = VARIABLES | more
            if name == "hermes" and not tools:
                continue
            mine = kept.render(chat, variables=variables, tools=tools or None)
            assert mine == transformers_render(FAMILIES[name], chat, True, tools=tools or None, **more)


def test_published_templates_with_tools_render_as_in_transformers(
    shared: Path, transformers_render: Callable[..., str]
) -> None:
    import jinja2

    seen = 0
    for file in sorted((shared / "data" / "chat_templates").glob("*.jinja")):
        template = file.read_bytes().decode()
        if "tools" not in template:
            continue
        with ChatTemplate(template, PATIENT) as kept:
            for chat in (TOOL_TALK, WITHOUT_TEXT, TOOL_TALK[:3]):
                expected: str | None
                mine: str | None
                try:
                    expected = transformers_render(template, chat, True, tools=[LOOK])
                except (jinja2.TemplateError, TypeError):
                    expected = None
                try:
                    mine = kept.render(chat, variables=VARIABLES, tools=[LOOK])
                except TemplateError:
                    mine = None
                assert mine == expected, file.name
                seen += expected is not None
    assert seen >= 15


def test_a_process_renders_many_times() -> None:
    """It is started once, and again after a limit was exceeded."""
    endless = (
        "{% if messages[0].content == 'long' %}"
        + "{% for a in range(99999) %}" * 3
        + "{% endfor %}" * 3
        + "{% endif %}"
    )
    with ChatTemplate(
        endless + "{{ messages[0].content }}{{ raise_exception('no') if x }}", SandboxLimits(seconds=2.0)
    ) as kept:
        for _ in range(2):
            for text in ("a", "b"):
                assert kept.render([{"role": "user", "content": text}], variables={}) == text
            with pytest.raises(TemplateError, match="no"):
                kept.render(USER, variables={"x": 1})
            with pytest.raises(TemplateError, match="time limit"):
                kept.render([{"role": "user", "content": "long"}], variables={})


def test_a_process_that_was_ended_is_replaced() -> None:
    with ChatTemplate("{{ messages[0].content }}", PATIENT) as kept:
        kept.start()
        for _ in range(2):
            assert kept.render(USER, variables={}) == "hi"
            assert kept._sandboxes[0]._child is not None
            kept._sandboxes[0]._child.kill()
            kept._sandboxes[0]._child.wait()


def test_one_rendering_leaves_nothing_for_the_next() -> None:
    form = "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ y is defined }}{% set y = 1 %}{{ x }}"
    with ChatTemplate(form, PATIENT) as kept:
        assert [kept.render(USER, variables=v) for v in ({"x": 1}, {}, {"x": 2})] == ["1False1", "1False", "1False2"]


def test_a_variable_that_is_given_otherwise() -> None:
    with pytest.raises(UsageError, match="messages"):
        render(CHATML, USER, variables={"messages": []})


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x"])
def test_what_is_no_json(value: Any) -> None:
    with pytest.raises(PromptError, match="JSON"):
        render(CHATML, USER, variables={"x": value})


def test_published_templates_render_as_in_transformers(shared: Path, transformers_render: Callable[..., str]) -> None:
    files = sorted((shared / "data" / "chat_templates").glob("*.jinja"))
    assert files
    # read_bytes: universal newlines would hide the line ends that some of them have.
    found = {f.name: differences(f.read_bytes().decode(), transformers_render) for f in files}
    assert not {name: problems for name, problems in found.items() if problems}


def test_chatml() -> None:
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert render(CHATML, USER, variables={}, add_generation_prompt=False) == expected
    assert render(CHATML, USER, variables={}) == expected + "<|im_start|>assistant\n"


def test_variables() -> None:
    names = {"bos_token": "<s>", "eos_token": None, "deep": {"a": [1]}}
    form = "{{ bos_token }}{{ eos_token is defined }}{{ messages[0].content }}{{ deep.a[0] }}"
    assert render(form, USER, variables=names) == "<s>Falsehi1"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{{ raise_exception('no system role') }}", "at line 2.*no system role"),
        ("\n\n{% for %}", "at line 3"),
        ("\n{{ 1 / 0 }}", "at line 2.*ZeroDivisionError"),
        ("{% macro f(x) %}\n{{ x + 1 }}{% endmacro %}\n{{ f('a') }}", "at line 2.*TypeError"),
        ("{{ nothing.at.all }}", "at line 1.*undefined"),
        ("{{ 'a' | no_such_filter }}", "at line 1.*no_such_filter"),
        ("{{ raise_exception('\\x1b[2J\\n') }}", r"found:  \[2J $"),
    ],
)
def test_failure_says_line_and_cause(template: str, words: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render(template, USER, variables={}, limits=PATIENT)
    assert re.search(words, str(caught.value), re.DOTALL)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hi"],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "user", "content": None}],
        [{"role": 1, "content": "hi"}],
        [*USER, {"role": "user", "content": [{"type": "image", "url": "hi"}]}],
        [*USER, {"role": "user", "content": ["hi"]}],
    ],
)
def test_malformed_messages(messages: list[Any]) -> None:
    with pytest.raises(PromptError, match="chat"):
        render(CHATML, messages, variables={})
