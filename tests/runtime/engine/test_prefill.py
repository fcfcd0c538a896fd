"""Answers that go on from an assistant's message: the prompt ends with its text, whatever that is."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Model, load
from pi_runtime.engine.prefill import before, taken_out
from pi_runtime.engine.tools.reasoning import ReasoningFormat
from pi_runtime.errors import UsageError
from pi_runtime.text.chat_template import ChatTemplate

HEAD = "{{ '<|im_start|>' + m.role + '\\n' }}"
EACH = "{% for m in messages %}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "plain": EACH + HEAD + "{{ m.content }}" + END,
    "trims": EACH + HEAD + "{{ m.content | trim }}" + END,
    "a space before": EACH
    + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }} </s>"
    "{% endif %}{% endfor %}",
    "repeats": "{{ messages[-1].content }}\n" + EACH + HEAD + "{{ m.content }}" + END,
    "drops thoughts": EACH + HEAD + "{{ m.content.split('</think>')[-1] }}" + END,
    "empty thoughts": EACH
    + HEAD
    + "{% if m.role == 'assistant' %}{% set c = m.content %}{% set r = '' %}{% if '</think>' in c"
    " %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}"
    "{% endif %}{{ '<think>\\n' + r + '\\n</think>\\n\\n' + c }}{% else %}{{ m.content }}{% endif %}" + END,
    "thoughts apart": EACH + HEAD + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}" + END,
    "only if there is any": EACH + HEAD + "{% if m.content %}{{ m.content }}{% endif %}" + END,
}
TEXTS = [
    "<",
    "end",
    "The answer is ",
    "",
    "  two",
    "\n\n",
    "|",
    "im_end",
    "assistant",
    "hi",
    "<|im_end|>",
    "é\u3000",
    "a" * 500,
    "</s>",
]
FRAME = {"bos_token": "<s>", "eos_token": "</s>"}
THINK = ReasoningFormat("<think>", "</think>")


def prompt(source: str, text: str, **more: Any) -> str:
    messages, said = taken_out(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text, **more}], "4711"
    )
    with ChatTemplate(source) as template:
        rendered = template.render(messages, variables={}, add_generation_prompt=False)
    return before("4711", rendered, said, THINK) + said


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_ends_with_the_text(name: str, text: str) -> None:
    """Before it stands what stands before any other text."""
    source = TEMPLATES[name]
    assert prompt(source, text) == prompt(source, "4712").replace("4712", text)
    assert prompt(source, text).endswith(text)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("more", [{}, {"reasoning_content": "hm"}], ids=["", "thoughts"])
def test_a_text_that_templates_leave_as_it_is_goes_on_as_in_transformers(name: str, more: dict[str, str]) -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is", **more}]
    (expected,), _ = render_jinja_template([chat], chat_template=TEMPLATES[name], continue_final_message=True)
    assert prompt(TEMPLATES[name], "The answer is", **more) == expected.replace("CONTINUE_FINAL_MESSAGE_TAG ", "")


@pytest.mark.parametrize(
    ("text", "before_it"),
    [
        ("<think>\nso", ""),
        ("\n<think>\nso\n</think>\n\nThe", ""),
        ("so\n</think>\n\nThe", "<think>\n"),
        ("The", "<think>\n\n</think>\n\n"),
    ],
)
def test_empty_thoughts_make_room_for_those_of_the_text(text: str, before_it: str) -> None:
    turn = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(TEMPLATES["empty thoughts"], text) == turn + before_it + text


def test_parts_go_on_as_the_lines_that_they_are(model: Model) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": parts}]
    assert model.chat_prompt(messages, continue_final_message=True) == "u:hi;a:a\nb "


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "hi"}]])
def test_no_message_to_be_continued(messages: list[Any]) -> None:
    with pytest.raises(UsageError, match="continue_final_message: the last message must be an assistant's"):
        taken_out(messages, "4711")


def test_published_templates_go_on_as_in_transformers(shared: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    tried = 0
    for path in sorted((shared / "data/chat_templates").glob("*.jinja")):
        source = path.read_text("utf-8")
        try:
            (expected,), _ = render_jinja_template([chat], chat_template=source, continue_final_message=True, **FRAME)
        except (TypeError, TemplateError):  # the template fails without tools, or with what it is not given here
            continue
        messages, said = taken_out([*chat[:-1], {**chat[-1], "content": "The answer is "}], "4711")
        with ChatTemplate(source) as template:
            rendered = template.render(messages, variables=FRAME, add_generation_prompt=False)
        assert before("4711", rendered, said, ReasoningFormat.of(source)) + said == f"{expected} ", path.name
        tried += 1
    assert tried > 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    source = (
        EACH + "{{ m.role[0] }}:{{ m.content | trim }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}</think>"
    )
    path = tmp_path_factory.mktemp("prefill") / "a.pi"
    decoder = small_decoder(context_length=1024)
    with load(random_artifact(path, decoder, scale=2.0, files={"chat_template.jinja": source.encode()})) as found:
        yield found


@settings(max_examples=25, deadline=None)
@given(text=st.text(st.sampled_from("a <>/\nthinkusr;:")))
def test_a_chat_goes_on_from_any_text(model: Model, text: str) -> None:
    messages = [{"role": "user", "content": "hi;a:"}, {"role": "assistant", "content": text}]
    assert model.chat_prompt(messages, continue_final_message=True) == f"u:hi;a:;a:{text}"


def test_a_template_that_does_not_show_the_text(tmp_path: Path) -> None:
    files = {"chat_template.jinja": b"{{ messages[0].content }}"}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    other = load(random_artifact(tmp_path / "a.pi", small_decoder(), files=files))
    with other, pytest.raises(UsageError, match="does not show the last message's text"):
        other.chat_prompt(messages, continue_final_message=True)


def test_a_long_text_takes_no_longer_than_a_prompt_of_its_length(model: Model) -> None:
    """A search from the end for a text that repeats itself would take minutes."""
    text = "aa</think>" + "a" * 400_000
    messages = [{"role": "user", "content": "a" * 400_000}, {"role": "assistant", "content": text}]
    began = time.perf_counter()
    assert model.chat_prompt(messages, continue_final_message=True).endswith(text)
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize(
    ("text", "is_open", "is_closed"),
    [
        ("", False, False),
        ("<think>", True, False),
        ("<think>\nso ", True, False),
        ("<think>so</think>", False, True),
        ("The answer", False, True),
        ("\n", False, False),
    ],
)
def test_thoughts_go_on_where_the_text_has_begun_them(model: Model, text: str, is_open: bool, is_closed: bool) -> None:
    messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": text}]
    found = model.chat_prompt(messages, continue_final_message=True)
    assert (THINK.is_open(found), THINK.is_closed(found)) == (is_open, is_closed)
    parser = model.output.parser(found)
    deltas = [delta for part in (" so", "</think>", "b") for delta in parser.push(part)] + parser.finish()
    thoughts = "".join(delta.text for delta in deltas if type(delta).__name__ == "ReasoningDelta")
    assert thoughts == ((" so" if text.endswith(" ") else "so") if is_open else "")
