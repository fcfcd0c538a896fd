"""What a running model is given, damaged: prompts and chat templates."""

from pathlib import Path
from random import Random

import pytest
from support.fuzz import mutations
from support.fuzz.cases import Cases
from support.fuzz.texts import SHORT, check, damaged_lines
from support.synthetic import random_artifact, small_decoder
from support.templates import render

from pi_runtime import load
from pi_runtime.commands.prompts import PromptFile
from pi_runtime.engine.engine import Engine
from pi_runtime.text.chat_template import SandboxLimits

pytestmark = pytest.mark.slow


PROMPTS = (
    {"prompt": "Once", "max_tokens": 2, "temperature": 0.5, "top_k": 3, "seed": 1, "stop": ["x"], "logprobs": 1},
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "logit_bias": {"65": -1.5}, "min_p": 0.1},
    {"prompt": "a", "prompt_logprobs": 1, "answers": 2, "max_tokens": 1, "id": {"any": ["thing"]}, "top_p": 0.9},
)


def test_prompt_files(cases: Cases, tmp_path: Path) -> None:
    files = {"chat_template.jinja": b"{{ messages[-1].content }}"}
    artifact = random_artifact(tmp_path / "a.pi", small_decoder(), files=files)
    path, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    with load(artifact, device="cpu") as model, Engine(model, slots=2) as engine:

        def read() -> None:
            output.unlink(missing_ok=True)
            PromptFile(path, model, {"max_tokens": 2}).answer(engine, output, lambda _done, _total: None)

        check(cases, SHORT, 0.5, lambda rng: damaged_lines(rng, path, PROMPTS), read)


TEMPLATES = (
    "{{ messages[-1].content }}",
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}",
    "{% macro f(x) %}{{ x * 2 }}{% endmacro %}{% for i in range(3) %}{{ f(i) }}{% endfor %}",
    "{% set ns = namespace(a='x') %}{% for i in range(9) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "{{ tools | tojson(indent=2) }}{{ strftime_now('%Y') }}{{ raise_exception('no') if messages | length > 9 }}",
)
HOSTILE = (
    *("{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**9 }}", "{{ range(10**9) | list | length }}"),
    *("{{ 10 ** 10 ** 9 }}", "{{ [1] * 10**8 }}", "{{ 'a' | center(10**9) }}", "{{ '%999999999d' | format(1) }}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}"),
    *("{{ messages.__init__.__globals__ }}", "{{ '{0.__class__}'.format(1) }}", "{{" * 3000, "{{ " + "(" * 5000),
    "{{ " + "a." * 20000 + "b }}",
)


def test_chat_templates(cases: Cases) -> None:
    """Templates are programs: some are hostile on purpose. Their process is watched by its own limits."""
    limits = SandboxLimits(seconds=1.0)
    messages = [{"role": "user", "content": "Hello"}]
    template = ""

    def damaged(rng: Random) -> str:
        nonlocal template
        template = rng.choice(HOSTILE) if rng.random() < 0.2 else rng.choice(TEMPLATES)
        for _ in range(rng.choice((0, 1, 3))):
            template = mutations.text(rng, template)
        return template

    check(cases, SHORT, 1, damaged, lambda: render(template, messages, variables={}, limits=limits))
