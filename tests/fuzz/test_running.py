"""What a running model is given, damaged: prompts, saved sessions and chat templates."""

import hashlib
import json
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
from support.fuzz import mutations
from support.fuzz.cases import Cases
from support.fuzz.texts import SHORT, check, damaged_lines
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.commands.prompts import PromptFile
from pi_runtime.engine.engine import Engine
from pi_runtime.text.chat_template import SandboxLimits, render

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


def test_saved_sessions(cases: Cases, tmp_path: Path) -> None:
    """The digest at the end is computed anew, so that damage gets past it."""
    artifact, path = random_artifact(tmp_path / "a.pi", small_decoder()), tmp_path / "s"
    with load(artifact, device="cpu") as model, Engine(model, slots=2) as engine:
        with engine.session() as session:
            "".join(session.generate("Once upon a time", max_tokens=4))
            session.save(path)
        original = path.read_bytes()
        size = int.from_bytes(original[13:21], "little")
        header, rest = json.loads(original[21 : 21 + size]), original[21 + size : -32]

        def damaged(rng: Random) -> str:
            changed, what = deepcopy(header), "bytes"
            if rng.random() < 0.5:
                what = mutations.tree(rng, changed)
            text = mutations.spelled(changed)
            data = original[:13] + len(text).to_bytes(8, "little") + text + rest
            data = mutations.data(rng, data) if rng.random() < 0.5 else data
            path.write_bytes(data + hashlib.sha256(data).digest())
            return what

        def read() -> None:
            with engine.load_session(path) as restored:
                "".join(restored.generate("a", max_tokens=1))

        check(cases, SHORT, 0.5, damaged, read)


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
