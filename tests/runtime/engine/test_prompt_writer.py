"""Nothing of a conversation is lost on its way into the prompt, whatever the template can do.

A prompt that goes on from an assistant's text ends with it.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError as JinjaError
from support.conversations import ASKED, CALLING, CONVERSATIONS, GIVEN, HOURS, MORE, SAID, call, lost, result
from support.published_templates import LIMITS, VARIABLES, compare
from support.synthetic import random_artifact, small_decoder
from support.templates import ALL, CHATML, DEEPSEEK, GEMMA, GLM, HARMONY, LLAMA, MISTRAL, QWEN

from pi_runtime import Model, load
from pi_runtime.engine import prompt_writer
from pi_runtime.engine.history import one_form
from pi_runtime.engine.prompt_writer import PromptWriter, prompt_before, without_last_text
from pi_runtime.engine.tools.formats import ReasoningFormat
from pi_runtime.engine.tools.output import tools_of
from pi_runtime.errors import PromptError, TemplateError, UsageError
from pi_runtime.text.chat_template import ChatTemplate
from pi_runtime.text.sandbox import SandboxLimits

Templates = dict[str, ChatTemplate]


@pytest.fixture(scope="module")
def templates() -> Iterator[Templates]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(ChatTemplate(source, LIMITS)) for name, source in ALL.items()}


def write(template: ChatTemplate | str, messages: list[Any], tools: Any = (), **variables: Any) -> str:
    if isinstance(template, str):
        with ChatTemplate(template, LIMITS) as own:
            return write(own, messages, tools, **variables)
    form = tools_of(template)
    writer = PromptWriter(
        template,
        tools=tools,
        tools_as_text=form is not None and form.is_generic,
        variables={**VARIABLES, **variables},
        add_generation_prompt=True,
    )
    return writer.write(one_form(messages))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ALL)
def test_all_parts_reach_the_prompt(templates: Templates, name: str, conversation: str) -> None:
    messages, words = CONVERSATIONS[conversation]
    assert not lost(write(templates[name], messages), words)
    assert not lost(write(templates[name], messages, [HOURS]), f"{words} hours")


def test_a_prompt_that_needs_no_help_is_that_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    # What is done for a client: parts are lines, results stand in the order of calls, arguments are objects, and a role
    # that is only copied is none that the model knows.
    helped = {"parts", "results in another order", "a result without a call"}
    helped |= {name for name in CONVERSATIONS if "arguments" in name or "developer" in name}
    same, differing = 0, []
    for name, source in ALL.items():
        (tmp_path / f"{name}.jinja").write_text(source)
        for one in compare(tmp_path / f"{name}.jinja"):
            same += one.ours == one.theirs
            if one.differs and one.conversation not in helped:
                differing.append((name, one.conversation))
    assert same > 200
    # The last system message is shown there, before all else.
    assert differing == [("deepseek", "a system message in the middle")]


def test_published_templates_show_all_parts(shared: Path) -> None:
    pytest.importorskip("transformers")
    found = [one for file in sorted((shared / "data" / "chat_templates").glob("*.jinja")) for one in compare(file)]
    assert len(found) > 2000
    assert not [one for one in found if one.ours.lost or one.ours.text is None]


def test_where_calls_and_tools_are_told() -> None:
    text = write(CHATML, [ASKED, CALLING, GIVEN], [HOURS])
    assert text.startswith("<|im_start|>system\nYou may call one or more functions")
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "hours", "arguments": {"day": "QQQ"}}\n</tool_call><|im_end|>'
        in text
    )
    assert "<|im_start|>user\n<tool_response>\nRRR\n</tool_response><|im_end|>" in text
    text = write(GEMMA, [{"role": "system", "content": "SSS"}, ASKED], [HOURS])
    assert text.startswith("<start_of_turn>user\nSSS\n\nYou may call")
    assert text.endswith("</tool_call>\n\nUUU<end_of_turn>\n<start_of_turn>model")


@pytest.mark.parametrize(
    ("template", "messages", "part"),
    [
        (
            HARMONY,
            [ASKED, {**CALLING, "content": "TTT", "reasoning": "HHH"}, GIVEN],
            "<|channel|>analysis<|message|>HHH\n\nTTT<|end|><|start|>assistant to=functions.hours",
        ),
        (
            HARMONY,
            [ASKED, {**CALLING, "content": "TTT"}, GIVEN, SAID, MORE],
            "<|channel|>final<|message|>TTT<|end|><|start|>assistant to=functions.hours",
        ),
        (
            HARMONY,
            [
                ASKED,
                {**CALLING, "tool_calls": [call("a", "{}"), call("b", "{}", "other")]},
                result("b", "2"),
                result("a", "1"),
            ],
            "commentary json<|message|>{}<|call|><|start|>functions.hours to=assistant<|channel|>commentary<|message|>"
            '"1"<|end|><|start|>assistant to=functions.other',
        ),
        (HARMONY, [result("x", "RRR"), ASKED, CALLING, GIVEN], "to=functions.hours<|channel|>commentary json"),
        (
            LLAMA,
            [ASKED, {**CALLING, "content": "TTT"}, GIVEN],
            'TTT<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{"name"',
        ),
        (MISTRAL, [ASKED, {**CALLING, "content": "TTT"}, GIVEN, SAID], "TTT</s>[TOOL_CALLS]"),
        (MISTRAL, [ASKED, CALLING, GIVEN, MORE], '"call_id": "a1b2c3d4e"}[/TOOL_RESULTS]</s>[AVAILABLE_TOOLS]'),
        (MISTRAL, [ASKED, MORE], "[INST]UUU\n\nVVV[/INST]"),
        (DEEPSEEK, [ASKED, CALLING, GIVEN], '<call>hours\n{"day": "QQQ"}</call><result>RRR</result>'),
        (GLM, [ASKED, CALLING, GIVEN], "<|assistant|><tool_call>hours"),
        (QWEN, [ASKED, {**CALLING, "thinking": "HHH"}, GIVEN], "<think>\nHHH\n</think>\n\n<tool_call>"),
        (QWEN, [ASKED, {**CALLING, "tool_calls": [call("x", '{"day": "Mo')]}], '{"arguments": "{\\"day\\": \\"Mo"}'),
    ],
)
def test_how_it_is_shown(template: str, messages: list[Any], part: str) -> None:
    assert part in write(template, messages, [HOURS] if template not in (DEEPSEEK,) else ())


def test_ids_are_rewritten_alike(templates: Templates) -> None:
    calls = [call("call_5Yt0aGz3", "{}"), call("a1b2c3d4e", "{}"), call("call_6", "{}")]
    messages = [ASKED, {**CALLING, "tool_calls": calls}, *(result(c["id"], "R") for c in calls)]
    text = write(templates["mistral"], messages, [HOURS])
    ids = [part.split('"')[1] for part in text.split('"id": ')[1:]]
    assert ids == [part.split('"')[1] for part in text.split('"call_id": ')[1:]]
    assert len(set(ids)) == 3
    assert ids[1] == "a1b2c3d4e"
    assert all(len(i) == 9 and i.isalnum() for i in ids)


TOOLS: list[dict[str, Any]] = [
    {"name": "hours"},
    {"name": "hours", "description": None, "parameters": None},
    {"name": "hours", "parameters": {}},
    {"name": "hours", "parameters": {"type": "object"}},
    {"name": "hours", "parameters": {"type": "object", "properties": {"a": {}}}},
    {"name": "hours", "parameters": {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}},
    {"name": "hours", "parameters": {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}]}}}},
    {"name": "hours", "parameters": {"type": "object", "properties": {"a": {"type": "array"}}}},
    {"name": "hours", "parameters": {"type": "object", "properties": {"a": {"type": "object"}}}},
    {"name": "hours", "parameters": {"type": "object", "properties": []}},
]


@pytest.mark.parametrize("function", TOOLS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_tools_may_say_little(templates: Templates, name: str, function: dict[str, Any]) -> None:
    kept = {key: value for key, value in function.items() if value is not None}
    text = write(templates[name], [ASKED], [{"type": "function", "function": kept}])
    assert not lost(text, "UUU hours")


def test_a_tool_is_shown_as_it_is_where_that_can_be(templates: Templates) -> None:
    text = write(templates["qwen"], [ASKED], [{"type": "function", "function": {"name": "hours"}}])
    assert '{"type": "function", "function": {"name": "hours"}}' in text


def test_what_cannot_be_shown_is_named() -> None:
    # A role that is nobody's is dropped, and nothing else can be done with it.
    users = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }};{% endif %}{% endfor %}"
    with pytest.raises(PromptError, match="message 1 of the chat: content is not shown by the model's chat template"):
        write(users, [ASKED, {"role": "narrator", "content": "NNN"}, SAID])
    with pytest.raises(TemplateError, match="never"):
        write("{{ raise_exception('never') }}", [ASKED])


def test_a_template_that_means_to_show_a_part_is_left_alone() -> None:
    assert write("{{ messages[-1].content }}", [ASKED, SAID, CALLING, GIVEN, SAID, MORE]) == "VVV"


def test_long_conversations_take_linear_time(templates: Templates) -> None:
    calls = [call(f"c{n}", "{}") for n in range(3000)]
    results = [result(f"c{n}", "r") for n in reversed(range(3000))]
    messages = [ASKED, {**CALLING, "tool_calls": calls}, *results, *([ASKED, SAID] * 1000), MORE]
    for name in ("qwen", "llama", "mistral", "chatml"):
        start = time.process_time()
        write(templates[name], messages)
        assert time.process_time() - start < 5, name


def test_all_renderings_of_a_conversation_have_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails late each time is tried in several ways."""
    now, took_s = [0.0], 1.9
    monkeypatch.setattr(prompt_writer, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def reply(_: Any, seconds: float) -> dict[str, Any]:
        now[0] += min(seconds, took_s)
        if seconds < took_s:
            raise TemplateError("time limit")
        return {"error": "no", "line": None}

    with ChatTemplate(ALL["qwen"]) as template:
        assert template.abilities.is_whole
        monkeypatch.setattr(template, "_reply", reply)
        with pytest.raises(TemplateError, match="time limit"):
            write(template, [ASKED, CALLING, GIVEN, SAID, MORE], [HOURS])
        assert now[0] <= prompt_writer.RENDERINGS * template.limits.seconds


def test_a_template_that_takes_too_long_is_not_asked_again() -> None:
    slow = "{% for m in messages %}{% for n in messages %}{% for o in messages %}{{ m.content[:0] }}{% endfor %}"
    source = (
        f"{slow}{{% endfor %}}{{{{ m.content }}}}{{% endfor %}}{{% for t in tools or [] %}}{{{{ t }}}}{{% endfor %}}"
    )
    with ChatTemplate(source, SandboxLimits(seconds=1.0)) as template:
        assert template.abilities.is_whole
        began = time.monotonic()
        with pytest.raises(TemplateError, match="time limit"):
            write(template, [{"role": "user", "content": "hi"}] * 1001, [HOURS])
        assert time.monotonic() - began < 2


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
    messages, said = without_last_text(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text, **more}], "4711"
    )
    with ChatTemplate(source) as template:
        rendered = template.render(messages, variables={}, add_generation_prompt=False)
    return prompt_before("4711", rendered, said, THINK) + said


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
        without_last_text(messages, "4711")


def test_published_templates_go_on_as_in_transformers(shared: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    tried = 0
    for path in sorted((shared / "data/chat_templates").glob("*.jinja")):
        source = path.read_text("utf-8")
        try:
            (expected,), _ = render_jinja_template([chat], chat_template=source, continue_final_message=True, **FRAME)
        except (TypeError, JinjaError):  # the template fails without tools, or with what it is not given here
            continue
        messages, said = without_last_text([*chat[:-1], {**chat[-1], "content": "The answer is "}], "4711")
        with ChatTemplate(source) as template:
            rendered = template.render(messages, variables=FRAME, add_generation_prompt=False)
        assert prompt_before("4711", rendered, said, ReasoningFormat.of(source)) + said == f"{expected} ", path.name
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
