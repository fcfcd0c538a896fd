"""Calls of tools and thoughts in chats: streamed and whole, with OpenAI's ids, indexes and reasons."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support import asking
from support.asking import CHAT, OLLAMA_CHAT, RESPONSES

from pi_runtime import Engine
from pi_runtime.server.api.prompt import rendered
from pi_runtime.server.api.served import Served

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "drop"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL, OTHER], **fields}


DROP = '<tool_call>{"name": "drop", "arguments": {}}</tool_call>'


def told(served: Served, pieces: Sequence[str], reason: str = "end", **fields: Any) -> tuple[Any, list[Any]]:
    """The whole answer of a model that says these pieces, and the chunks of the same as a stream."""
    found, events = (
        asking.said(CHAT, body(stream=stream, **fields), served, pieces, reason) for stream in (False, True)
    )
    chunks = [data for _, data in events[:-1]]
    ChatCompletion.model_validate(found, strict=True)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return found, chunks


def test_calls_are_streamed_with_stable_ids_and_indexes(hermes: tuple[Served, Engine]) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"ok": tr'
    pieces = ["<th", "ink>\nhm", "m</think>\n\n", "Wait.", call, "ue}}\n</tool_call>", *'<tool_call>{"name": ']
    pieces += ['"drop", "arguments": {}}</tool_call>']
    found, chunks = told(hermes[0], pieces)
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "Wait.")
    calls = message["tool_calls"]
    assert [(c["type"], c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("function", "add", '{"ok": true}'),
        ("function", "drop", "{}"),
    ]
    assert len({c["id"] for c in calls}) == 2
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hmm"
    assert "".join(d.get("content", "") for d in deltas) == "Wait."
    streamed = [c for d in deltas for c in d.get("tool_calls", [])]
    begun = [c for c in streamed if "id" in c]
    assert [(c["index"], c["type"], c["function"]) for c in begun] == [
        (0, "function", {"name": "add", "arguments": ""}),
        (1, "function", {"name": "drop", "arguments": ""}),
    ]
    assert all("name" not in c["function"] for c in streamed if "id" not in c)
    for index, arguments in enumerate(['{"ok": true}', "{}"]):
        assert "".join(c["function"]["arguments"] for c in streamed if c["index"] == index) == arguments
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"


def test_a_call_that_breaks_off_is_not_to_be_run(hermes: tuple[Served, Engine]) -> None:
    for reason, expected in (("length", "length"), ("end", "stop")):
        broken = '<tool_call>{"name": "add", "arguments": {"ok"'
        found, chunks = told(hermes[0], [DROP, broken], reason)
        assert found["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == expected
        # Whole, it is text; a stream cannot take back what it told, and closes nothing.
        message = found["choices"][0]["message"]
        assert message["content"] == broken
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["drop"]
        streamed = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert "".join(c["function"]["arguments"] for c in streamed if c["index"] == 1) == '{"ok"'


def test_a_call_that_breaks_off_in_other_forms(hermes: tuple[Served, Engine]) -> None:
    """An item of a response can be incomplete. Ollama's calls come whole or not at all."""
    broken = '<tool_call>{"name": "add", "arguments": {"ok"'
    tool = {"type": "function", **TOOL["function"]}
    request = {"model": "m", "input": "x", "tools": [tool]}
    (item,) = asking.said(RESPONSES, request, hermes[0], [broken], "length")["output"]
    assert (item["type"], item["status"], item["arguments"]) == ("function_call", "incomplete", '{"ok"')
    for stream in (False, True):
        written = asking.said(OLLAMA_CHAT, {**body(), "stream": stream}, hermes[0], [DROP + broken], "length")
        found = [line["message"] for _, line in written] if stream else [written["message"]]
        assert "".join(message["content"] for message in found) == broken
        names = [call["function"]["name"] for message in found for call in message.get("tool_calls", [])]
        assert names == ["drop"]


def test_calls_in_channels(harmony: tuple[Served, Engine]) -> None:
    head = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    thoughts = ["<|chan", "nel|>analysis<|message|>h", "m<|end|><|start|>assistant"]
    found, chunks = told(harmony[0], [*thoughts, head, '{"ok": tr', "ue}"])
    (choice,) = found["choices"]
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"ok": true}'}
    streamed = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(c["function"]["arguments"] for c in streamed) == '{"ok": true}'
    found, chunks = told(harmony[0], [*thoughts, head, '{"ok"'], "length")
    assert found["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert found["choices"][0]["message"]["content"] == f'<|start|>assistant{head}{{"ok"'
    assert "tool_calls" not in found["choices"][0]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_in_channels_that_is_required_is_made(harmony: tuple[Served, Engine], choice: Any) -> None:
    # Without thoughts, which may be long: "a" comes only where nothing else may.
    fields = {"tools": [TOOL], "tool_choice": choice, "logit_bias": {"97": -100}}
    found = asking.whole(CHAT, body(**fields, max_completion_tokens=300), harmony)
    (call,) = found["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert set(json.loads(call["function"]["arguments"])) == {"ok"}


def test_calls_alone_have_no_content(hermes: tuple[Served, Engine]) -> None:
    found, _ = told(hermes[0], ['<tool_call>{"name": "drop", "arguments": {}}</tool_call>'])
    assert found["choices"][0]["message"]["content"] is None


def test_text_is_text_where_no_tool_may_be_called(hermes: tuple[Served, Engine]) -> None:
    text = '<tool_call>{"name": "drop", "arguments": {}}</tool_call>'
    found, _ = told(hermes[0], [text], tool_choice="none")
    assert found["choices"][0]["message"]["content"] == text


CHOICES = [
    ("required", {"add", "drop"}),
    ({"type": "function", "function": {"name": "add"}}, {"add"}),
    (
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [OTHER]},
        },
        {"drop"},
    ),
]


@pytest.mark.parametrize(("choice", "names"), CHOICES)
def test_a_call_that_is_required_is_made(hermes: tuple[Served, Engine], choice: Any, names: set[str]) -> None:
    # Without white space and thoughts, which may be long.
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "logit_bias": {"10": -100, "32": -100, "9": -100}}
    fields["chat_template_kwargs"] = {"enable_thinking": False}
    found = asking.whole(CHAT, body(**fields, max_completion_tokens=300), hermes)
    ChatCompletion.model_validate(found, strict=True)
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in names
    if call["function"]["name"] == "add":
        assert json.loads(call["function"]["arguments"]).keys() == {"ok"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_tool_that_is_named_many_times_is_one_tool(hermes: tuple[Served, Engine], path: str) -> None:
    """Else a body of a megabyte would become a prompt of gigabytes."""
    served, _ = hermes
    names = [{"type": "function", "function": {"name": "add"}}, OTHER]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": names * 20}}
    fields: dict[str, Any] = body()
    if path == "/v1/responses":
        flat = [{"type": "function", **tool["function"]} for tool in fields["tools"]]
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}] * 20}
        fields = {"model": fields["model"], "input": "x", "tools": flat}
    text = served.model.tokenizer.decode(asking.asked(path, {**fields, "tool_choice": choice}, served).texts[0])
    assert text.count('"name": "add"') == 1


def test_what_the_template_is_given(hermes: tuple[Served, Engine]) -> None:
    served, _ = hermes
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"ok":true}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "2"})
    request = asking.asked(CHAT, body(messages=messages, reasoning_effort="none"), served)
    text = served.model.tokenizer.decode(request.texts[0])
    assert text.startswith('[{"type": "function", "function": {"name": "add", "description": "Adds."')
    assert text.endswith(
        'u:x;a:<tool_call>{"name": "add", "arguments": {"ok": true}}</tool_call>;t:2;a:<think></think>'
    )
    request = asking.asked(CHAT, body(tool_choice="none", reasoning_effort="high"), served)
    assert served.model.tokenizer.decode(request.texts[0]) == "u:x;a:"


def test_a_template_without_calls(random_chat: tuple[Served, Engine]) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert '<tools>\n{"type": "function"' in rendered(random_chat[0], messages, tools=[OTHER], variables={})


def test_a_schema_that_cannot_be_followed_is_named(hermes: tuple[Served, Engine]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    asking.refused(CHAT, body(tools=None, response_format=form), hermes[0], "response_format")
