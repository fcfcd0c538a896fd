"""Nothing of a conversation is lost on its way into the prompt, whatever the template can do."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.conversations import ASKED, CALLING, CONVERSATIONS, GIVEN, HOURS, MORE, SAID, call, lost, result
from support.published_templates import LIMITS, VARIABLES, compare
from support.templates import ALL, CHATML, DEEPSEEK, GEMMA, GLM, HARMONY, LLAMA, MISTRAL, QWEN

from pi_runtime.engine import prompt_writer
from pi_runtime.engine.history import one_form
from pi_runtime.engine.prompt_writer import PromptWriter
from pi_runtime.engine.tools.output import tools_of
from pi_runtime.errors import PromptError, TemplateError
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
        are_told=form is not None and form.is_told,
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
