"""`/v1/responses` on an engine: output and events, conversations without state, and what is refused."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support import asking
from support.asking import RESPONSES

from pi_runtime import Engine
from pi_runtime.server.api.answer import EventReader, GatheredAnswer
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError

Chat = tuple[Served, Engine]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def ask(chat: Chat, content: object, **fields: Any) -> Any:
    """The response as OpenAI's own type, checked strictly."""
    found = asking.whole(RESPONSES, {"model": "m", "input": content, **fields}, chat)
    return Response.model_validate(found, strict=True)


def checked(events: Sequence[tuple[str | None, Any]]) -> list[Any]:
    """The events as OpenAI's own types, checked strictly; numbered without a gap."""
    found = []
    for n, (name, data) in enumerate(events):
        assert isinstance(data, dict)
        assert (data["type"], data["sequence_number"]) == (name, n)
        found.append(EVENT.validate_python(json.loads(json.dumps(data)), strict=True))
    return found


def stream(chat: Chat, content: object, **fields: Any) -> list[Any]:
    return checked(asking.streamed(RESPONSES, {"model": "m", "input": content, "stream": True, **fields}, chat))


def test_a_response(alphabet_chat: Chat) -> None:
    found = ask(alphabet_chat, "abc", metadata={"a": "b"}, user="u")
    assert (found.output_text, found.status, found.object) == ("defghijklmnopqrstuvwxyz", "completed", "response")
    assert (found.model, found.store, found.metadata, found.user) == ("m", False, {"a": "b"}, "u")
    (item,) = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (3, 23, 26)
    assert found.usage.timings["predicted_n"] == 23


def test_a_response_that_is_cut_is_incomplete(alphabet_chat: Chat) -> None:
    found = ask(alphabet_chat, "abc", max_output_tokens=3)
    assert (found.output_text, found.status, found.incomplete_details.reason) == (
        "def",
        "incomplete",
        "max_output_tokens",
    )
    assert found.output[0].status == "incomplete"
    assert stream(alphabet_chat, "abc", max_output_tokens=3)[-1].type == "response.incomplete"


def test_the_events_of_a_stream(alphabet_chat: Chat) -> None:
    found = stream(alphabet_chat, "wx", top_logprobs=2)
    # Tokens that are there at once are one delta.
    kinds = [kind for kind, _ in groupby(event.type for event in found)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == "yz"
    added, text, part = found[3], *found[-4:-2]
    assert (added.part.text, added.part.logprobs) == ("", [])
    assert text.text == part.part.text == found[-1].response.output_text == "yz"
    assert [entry.token for entry in text.logprobs] == ["y", "z"]
    assert len(found[-1].response.output[0].content[0].logprobs[0].top_logprobs) == 2
    assert {event.response.id for event in found if hasattr(event, "response")} == {found[0].response.id}


def test_thoughts_and_calls_are_items_of_their_own(hermes: Chat) -> None:
    served, _ = hermes
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    pieces = [
        "<think>",
        "hm",
        "m</think>",
        "Wait",
        ".",
        '<tool_call>{"name": "add", "argum',
        'ents": {"x": 1}}</tool_call>',
    ]
    found = {}
    for streams in (False, True):
        body = {"model": "m", "input": "x", "tools": [tool], "stream": streams}
        events = asking.said(RESPONSES, body, served, pieces)
        found[streams] = checked(events)[-1].response if streams else Response.model_validate(events, strict=True)
        if streams:
            arguments = [event for event in checked(events) if event.type == "response.function_call_arguments.delta"]
            assert "".join(event.delta for event in arguments) == '{"x": 1}'
            indexes = [event.output_index for event in checked(events) if hasattr(event, "output_index")]
            assert indexes == sorted(indexes)
    for response in found.values():
        thoughts, message, call = response.output
        assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "hmm")
        assert (message.type, message.content[0].text) == ("message", "Wait.")
        assert (call.type, call.name, call.arguments, call.status) == ("function_call", "add", '{"x": 1}', "completed")
        assert response.usage.output_tokens_details.reasoning_tokens == 3
        assert response.usage.input_tokens_details.cached_tokens == 4


def test_an_error_ends_a_stream(alphabet_chat: Chat) -> None:
    request, writer = asking.read(RESPONSES, {"model": "m", "input": "abc", "stream": True}, alphabet_chat[0])
    reader, answer = EventReader(request, alphabet_chat[0].model.tokenizer), GatheredAnswer(0, 0)
    written = b"".join(asking.write(writer, answer, event) for event in reader.read("d", [1]))
    *_, told, failed = checked(asking.parsed(written + writer.failed(ApiError(500, "broken"))))
    assert (told.type, told.message) == ("error", "broken")
    assert (failed.type, failed.response.status, failed.response.error.message) == (
        "response.failed",
        "failed",
        "broken",
    )


def test_a_conversation_of_items_reaches_the_template(hermes: Chat) -> None:
    served, _ = hermes
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "add",
            "arguments": "{}",
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "2", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": "thanks"},
    ]
    request = asking.asked(RESPONSES, {"model": "m", "input": items, "instructions": "Hi."}, served)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    expected = f"s:Hi.;s:be brief;u:1+1?;a:{call};t:2;a:2;u:thanks;a:"
    assert served.model.tokenizer.decode(request.texts[0]) == expected


PAST: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "M'}],
        '{"arguments": "{\\"a\\": \\"M"}',
    ),
    ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": None}], '"arguments": {}'),
    ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}}], '"arguments": {"a": 1}'),
    ([{"type": "custom_tool_call", "call_id": "c", "name": "apply", "input": "+a"}], '"arguments": {"input": "+a"}'),
    ([{"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}], '"arguments": {"command": ["ls"]}'),
    ([{"type": "local_shell_call", "id": "c", "status": "completed"}], '"name": "local_shell", "arguments": {}'),
    ([{"type": "custom_tool_call_output", "call_id": "c", "output": "done"}], "t:done;"),
    ([{"type": "local_shell_call_output", "id": "c", "output": "done"}], "t:done;"),
    ([{"type": "function_call_output", "call_id": "c", "output": None}], "t:;"),
    ([{"type": "function_call_output", "call_id": "c", "output": []}], "t:;"),
    ([{"type": "web_search_call", "id": "ws", "status": "completed", "action": {}}], "u:hi;u:on;a:"),
    ([{"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAA"}], "u:hi;u:on;a:"),
    ([{"type": "message", "role": "assistant", "content": None}], "a:;u:on;"),
    ([{"type": "message", "role": "assistant", "content": []}], "a:;u:on;"),
]


@pytest.mark.parametrize(("items", "shown"), PAST, ids=str)
def test_what_is_shown_of_the_past_is_no_error(hermes: Chat, items: list[dict[str, Any]], shown: str) -> None:
    served, _ = hermes
    hi, on = ({"role": "user", "content": text} for text in ("hi", "on"))
    request = asking.asked(RESPONSES, {"model": "m", "input": [hi, *items, on]}, served)
    assert shown in served.model.tokenizer.decode(request.texts[0])


def test_tools_of_other_types_are_left_out(hermes: Chat) -> None:
    served, _ = hermes
    others = [
        {"type": "web_search"},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
        {"type": "namespace", "name": "n", "description": "", "tools": [{"type": "function", "name": "x"}]},
    ]
    function = {"type": "function", "name": "f"}
    for tools in ([*others, function], others):
        request = asking.asked(RESPONSES, {"model": "m", "input": "hi", "tools": tools}, served)
        assert [tool["function"]["name"] for tool in request.tools] == ["f"] * (function in tools)
        assert "web_search" not in request.rendered
    assert ask(hermes, "hi", tools=[*others, function], max_output_tokens=1).tools[0].type == "web_search"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_an_effort_that_the_template_does_not_know_is_passed_over(random_chat: Chat, effort: str) -> None:
    served, _ = random_chat
    plain, asked = (
        asking.asked(RESPONSES, {"model": "m", "input": "hi", **more}, served).texts
        for more in ({}, {"reasoning": {"effort": effort}})
    )
    assert plain == asked


def test_json_follows_a_schema(random_chat: Chat) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "name": "x", "schema": {**schema, "additionalProperties": False}, "strict": True}
    found = ask(random_chat, "a", text={"format": form}, logit_bias={"32": -100, "10": -100, "9": -100})
    assert json.loads(found.output_text).keys() == {"ok"}
    assert found.text.format.schema_ == form["schema"]
    found = ask(random_chat, "a", text={"format": form | {"fixed_separators": True}})
    assert found.output_text in ('{"ok": true}', '{"ok": false}')


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "list"),
        ({"input": []}, "input", "at least 1"),
        ({"input": "a" * 200}, "input", "at most 191 fit"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "image",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"store": 1}, "store", "boolean"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "only with tools"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type", "function_call"),
        ({"tool_choice": "required"}, "tool_choice", "only with tools"),
        ({"include": ["file_search_call.results"]}, "include[0]", "logprobs"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "none"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not supported"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}},
            "text.format",
            "text.format: type: no type of JSON",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"n": 2}, "n", "not supported"),
        ({"nonsense": 2}, "nonsense", "unknown field"),
    ],
)
def test_what_is_wrong_is_named(random_chat: Chat, fields: dict[str, Any], param: str, says: str) -> None:
    asking.refused(RESPONSES, {"model": "m", "input": "x", **fields}, random_chat[0], param, says)
