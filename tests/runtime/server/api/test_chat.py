"""`/v1/chat/completions` on an engine: turns, streams, formats, and what is refused."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support import asking
from support.asking import CHAT

from pi_runtime import Engine
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError

Chat = tuple[Served, Engine]


def says(content: object, role: str = "user", **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


def ask(chat: Chat, content: object, **fields: Any) -> dict[str, Any]:
    """The whole answer, checked by OpenAI's own type."""
    messages = content if isinstance(content, list) else [says(content)]
    found: dict[str, Any] = asking.whole(CHAT, {"model": "m", "messages": messages, **fields}, chat)
    ChatCompletion.model_validate(found, strict=True)
    return found


def stream(chat: Chat, content: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, each checked by OpenAI's own type."""
    body = {"model": "m", "messages": [says(content)], "stream": True, **fields}
    *chunks, last = asking.streamed(CHAT, body, chat)
    assert last == (None, "[DONE]")
    found: list[Any] = [data for event, data in chunks if event is None]
    assert len(found) == len(chunks)
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return found


def test_a_turn(alphabet_chat: Chat) -> None:
    found = ask(alphabet_chat, "abc", max_tokens=4)
    (choice,) = found["choices"]
    message = {"role": "assistant", "content": "defg", "refusal": None, "annotations": []}
    assert choice == {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    assert found["system_fingerprint"].startswith("fp_")
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)
    assert ask(alphabet_chat, "abc")["choices"][0]["finish_reason"] == "stop"
    assert ask(alphabet_chat, "abc", max_completion_tokens=4)["id"] != found["id"]


def test_a_prompt_read_before_is_cached(random_chat: Chat) -> None:
    ask(random_chat, "a" * 100, max_tokens=1)
    details = ask(random_chat, "a" * 100 + "b", max_tokens=1)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 64


def test_messages_of_all_roles_reach_the_template(random_chat: Chat) -> None:
    served, _ = random_chat
    messages = [
        says("be brief", "system"),
        says([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "developer"),
        says("hi", name="Ann"),
        says(None, "assistant", tool_calls=[{"id": "1", "type": "function", "function": CALL}]),
        says("42", "tool", tool_call_id="1"),
        says([{"type": "refusal", "refusal": "no"}], "assistant", refusal=None),
        says("why?"),
    ]
    request = asking.asked(CHAT, {"model": "m", "messages": messages}, served)
    assert served.model.tokenizer.decode(request.texts[0]) == (
        's:be brief;s:a\nb;u:hi;a:<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>;'
        "u:<tool_response>\n42\n</tool_response>;a:no;u:why?;a:"
    )


CALL = {"name": "f", "arguments": '{"x": 1}'}
PAST: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}],
        '"arguments": {}',
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "M'}}]}],
        '{"arguments": "{\\"a\\": \\"M"}',
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
        '"arguments": {"a": 1}',
    ),
    (
        [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}]}],
        '{"input": "x"}',
    ),
    ([{"role": "assistant"}], "u:hi;a:;u:on"),
    ([{"role": "assistant", "content": None, "tool_calls": None}], "u:hi;a:;u:on"),
    ([{"role": "assistant", "content": []}], "u:hi;a:;u:on"),
    ([{"role": "assistant", "content": None, "reasoning": "hm"}], "u:hi;a:;u:on"),
    ([{"role": "assistant", "content": "", "thinking": "hm"}], "u:hi;a:;u:on"),
    ([{"role": "tool", "content": None}], "u:<tool_response>\n\n</tool_response>;u:on"),
    ([{"role": "tool", "tool_call_id": "x", "content": "\ud83d!"}], "\ufffd!"),
    ([{"role": "user", "content": "\ud83d"}], "\ufffd"),
]


@pytest.mark.parametrize(("messages", "shown"), PAST, ids=ascii)
def test_what_is_shown_of_the_past_is_no_error(random_chat: Chat, messages: list[dict[str, Any]], shown: str) -> None:
    served, _ = random_chat
    request = asking.asked(CHAT, {"model": "m", "messages": [says("hi"), *messages, says("on")]}, served)
    assert shown in served.model.tokenizer.decode(request.texts[0])


def test_tools_of_other_types_are_left_out(hermes: Chat) -> None:
    served, _ = hermes
    for more in ([], [{"type": "function", "function": {"name": "f"}}]):
        tools = [{"type": "custom", "custom": {"name": "x"}}, {"type": "web_search"}, *more]
        plain, asked = (
            asking.asked(CHAT, {"model": "m", "messages": [says("hi")], "max_tokens": 1, "tools": given}, served)
            for given in (more, tools)
        )
        assert plain.texts == asked.texts
        assert plain.tools == asked.tools


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_an_effort_that_the_template_does_not_know_is_passed_over(random_chat: Chat, effort: str) -> None:
    found = ask(random_chat, "hi", reasoning_effort=effort, max_tokens=2, seed=1)
    assert found["choices"] == ask(random_chat, "hi", max_tokens=2, seed=1)["choices"]


@pytest.mark.parametrize(("effort", "shown"), [("none", "low"), ("low", "low"), ("medium", "medium"), ("max", "high")])
def test_an_effort_that_the_template_writes(harmony: Chat, effort: str, shown: str) -> None:
    served, _ = harmony
    body = {"model": "m", "messages": [says("hi")], "reasoning_effort": effort}
    assert f"Reasoning: {shown}<" in served.model.tokenizer.decode(asking.asked(CHAT, body, served).texts[0])


def test_an_answer_goes_on_where_a_message_ends(random_chat: Chat) -> None:
    served, _ = random_chat
    messages = [says("hi"), says("well", "assistant")]
    request = asking.asked(CHAT, {"model": "m", "messages": messages, "continue_final_message": True}, served)
    assert served.model.tokenizer.decode(request.texts[0]) == "u:hi;a:well"


def test_a_stream_says_what_the_whole_says(random_chat: Chat) -> None:
    fields = {"n": 2, "seed": 5, "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "max_tokens": 9}
    expected = ask(random_chat, "hello", **fields)
    *chunks, last = stream(random_chat, "hello", **fields, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == 18
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in expected["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        entries = [x for c in own if c["logprobs"] for x in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert len(entries) == 9
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_log_probabilities_have_the_bytes_of_parts_of_characters(random_chat: Chat) -> None:
    bias = {"logit_bias": {str("é".encode()[0]): 100}}
    (choice,) = ask(random_chat, "a", logprobs=True, max_tokens=1, **bias)["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["top_logprobs"]) == ("\\xc3", [0xC3], [])
    assert choice["message"]["content"] == "\ufffd"


def test_the_same_seed_gives_the_same_text(random_chat: Chat) -> None:
    def text(**fields: Any) -> str:
        return str(ask(random_chat, "a", temperature=1.9, max_tokens=12, **fields)["choices"][0]["message"]["content"])

    for seed in (-2, 0, 7, 2**32 - 1, 2**63 - 1):
        assert text(seed=seed) == text(seed=seed) != text(seed=1)
    assert text() != text()
    assert text(seed=-1) != text(seed=-1)


def test_json_follows_a_schema(random_chat: Chat) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    for response_format, keys in (
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}, {"ok"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, {"ok"}),
    ):
        fields = {"response_format": response_format, "max_tokens": 100, "logit_bias": {"32": -100, "10": -100}}
        (choice,) = ask(random_chat, "a", **fields)["choices"]
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["content"]).keys() == keys
    form = {"name": "x", "schema": schema, "fixed_separators": True}
    (choice,) = ask(random_chat, "a", response_format={"type": "json_schema", "json_schema": form})["choices"]
    assert choice["message"]["content"] in ('{"ok": true}', '{"ok": false}')
    (choice,) = ask(random_chat, "a", response_format={"type": "json_object"}, max_tokens=5)["choices"]
    assert choice["message"]["content"].lstrip().startswith("{")
    (choice,) = ask(random_chat, "a", response_format={"type": "text"}, max_tokens=5)["choices"]


def test_a_prediction_becomes_a_guess(alphabet_chat: Chat) -> None:
    served, _ = alphabet_chat
    prediction = {"type": "content", "content": [{"type": "text", "text": "defg"}]}
    request = asking.asked(CHAT, {"model": "m", "messages": [says("abc")], "prediction": prediction}, served)
    assert request.prediction == "defg"


def test_neutral_values_are_accepted(alphabet_chat: Chat) -> None:
    neutral = {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory",
        "modalities": ["text"],
        "verbosity": "medium",
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "stop": None,
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "top_p": 1,
        "logprobs": False,
        "stream": False,
        "chat_template_kwargs": {},
        "audio": None,
        "stream_options": None,
    }
    assert ask(alphabet_chat, "abc", max_tokens=2, **neutral)["choices"][0]["message"]["content"] == "de"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "user", "content": "a" * 200}]}, "messages", "at most 191 fit"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "bot"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "found 5"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo", "unknown field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "shell", "id": "1"}]}]},
            "messages[0].tool_calls[0].type",
            "function or custom",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]}, "messages[0].audio", "supported"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"max_tokens": -2}, "max_tokens", "greater than or equal to -1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "give one"),
        ({"n": 0}, "n", "greater"),
        ({"n": 99}, "n", "at most 16"),
        ({"top_logprobs": 1}, "top_logprobs", "logprobs: true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"tools": [{"type": "custom"}], "tool_choice": "required"}, "tool_choice", "only with tools"),
        ({"tools": ["x"]}, "tools[0]", "dict"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [TOOL, TOOL]}, "tools", "same name"),
        ({"tool_choice": "required"}, "tool_choice", "only with tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "none of the tools",
        ),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"store": 0}, "store", "boolean"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty", "0.01"),
        ({"service_tier": "flex"}, "service_tier", "not supported"),
        ({"verbosity": "high"}, "verbosity", "not supported"),
        ({"web_search_options": {}}, "web_search_options", "not supported"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        ({"moderation": {"model": "x"}}, "moderation", "not supported"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options", "not supported"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "none"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"prediction": {"type": "content"}}, "prediction.content", "required"),
        ({"seed": 2**63}, "seed", "less"),
        ({"top_p": 1.1}, "top_p", "1"),
        ({"presence_penalty": 2.5}, "presence_penalty", "2"),
        ({"continue_final_message": True}, "continue_final_message", "assistant"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {"messages": []}, "tools": [TOOL]}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {"tools": []}, "tools": [TOOL]}, "chat_template_kwargs", "tools"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": 1}, "messages": [USER, USER]},
            "chat_template_kwargs",
            "add_generation_prompt",
        ),
        ({"chat_template_kwargs": {"documents": []}, "messages": [USER, USER]}, "chat_template_kwargs", "documents"),
    ],
)
def test_what_is_wrong_is_named(random_chat: Chat, fields: dict[str, Any], param: str, says: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    assert asking.refused(CHAT, body, random_chat[0], param, says).startswith(param)


@pytest.mark.parametrize("name", ["self", "variables", "seconds", "given"])
def test_a_variable_of_a_template_may_have_any_other_name(random_chat: Chat, name: str) -> None:
    asking.read(
        CHAT, {"model": "m", "messages": [USER, USER], "chat_template_kwargs": {name: "x"}, "tools": []}, random_chat[0]
    )


def test_a_model_without_a_template_has_no_chats(endless_served: Served) -> None:
    with pytest.raises(ApiError, match="no chat template"):
        asking.asked(CHAT, {"model": "m", "messages": [says("x")]}, endless_served)
