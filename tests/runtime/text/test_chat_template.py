"""Chat templates are rendered as transformers renders them; what fails says where."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pi_runtime.errors import PromptError, TemplateError
from pi_runtime.text.chat_template import ChatTemplate, Limits, render

USER = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "user", "content": "  What is <b>π</b>? 😀\n"},
    {"role": "assistant", "content": '<think>\nhm\n</think>\n\nAbout 3.14 & "more".  '},
    {"role": "user", "content": "Thanks,\n\nbye"},
]
CHATS = [TALK, [{"role": "system", "content": "Be brief. "}, *TALK]]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
PATIENT = Limits(seconds=60.0)

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

    def one(template: str, chat: list[dict[str, str]], prompt: bool) -> str:
        texts, _ = render_jinja_template([chat], chat_template=template, add_generation_prompt=prompt, **VARIABLES)
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
        [*USER, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    ],
)
def test_malformed_messages(messages: list[Any]) -> None:
    with pytest.raises(PromptError, match="chat"):
        render(CHATML, messages, variables={})
