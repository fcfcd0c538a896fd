"""The server as Anthropic's own client sees it: typed messages, its helper for streams, tools, classes of errors."""

from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from support.scripted import tool_user
from support.serving import Served, serving

anthropic: Any = pytest.importorskip("anthropic")

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tool_user(tmp_path_factory.mktemp("anthropic") / "tools.pi")
    with serving(path, api_keys=("key",), unknown_fields="refuse", aliases=("claude-x",)) as served:
        yield served


def client_of(served: Served, **options: Any) -> Any:
    given = {"api_key": "key", "max_retries": 0, "timeout": 60, **options}
    return anthropic.Anthropic(base_url=served.url, **given)


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with client_of(served) as client:
        yield client


def test_a_message(client: Any) -> None:
    found = client.messages.create(model="claude-x", max_tokens=20, messages=HELLO, metadata={"user_id": "u"})
    assert [(block.type, block.text) for block in found.content] == [("text", "abc")]
    assert (found.role, found.stop_reason, found.usage.output_tokens) == ("assistant", "end_turn", 3)
    assert found.usage.input_tokens > 0


def test_a_stream(client: Any) -> None:
    with client.messages.stream(model="claude-x", max_tokens=20, messages=HELLO, system="Be kind.") as stream:
        assert "".join(stream.text_stream) == "abc"
        found = stream.get_final_message()
    assert (found.stop_reason, found.content[0].text) == ("end_turn", "abc")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
@pytest.mark.parametrize("streams", [False, True])
def test_a_call_of_a_tool_and_its_result(client: Any, choice: Any, streams: bool) -> None:
    pytest.importorskip("llguidance")
    asked = {"model": "claude-x", "max_tokens": 200, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice}
    if streams:
        with client.messages.stream(**asked) as stream:
            found = stream.get_final_message()
    else:
        found = client.messages.create(**asked)
    (call,) = [block for block in found.content if block.type == "tool_use"]
    assert (found.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "SF"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [*HELLO, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    found = client.messages.create(**{**asked, "messages": turns, "tool_choice": {"type": "none"}})
    assert found.content[0].text == "abc"


def test_tokens_are_counted(client: Any) -> None:
    few = client.messages.count_tokens(model="claude-x", messages=HELLO)
    more = client.messages.count_tokens(model="claude-x", messages=HELLO, tools=[WEATHER], system="Be kind.")
    assert 0 < few.input_tokens < more.input_tokens


def test_the_client_s_beta_forms_and_models(served: Served, client: Any) -> None:
    found = client.beta.messages.create(
        model="claude-x", max_tokens=20, messages=HELLO, betas=["interleaved-thinking-2025-05-14", "new"]
    )
    assert found.content[0].text == "abc"
    (model,) = client.models.list().data
    assert (model.id, model.type, model.max_input_tokens) == (served.name, "model", 2048)
    assert model.created_at.year >= 2026


def test_either_header_has_the_key(served: Served) -> None:
    for options in ({"api_key": "key"}, {"api_key": None, "auth_token": "key"}):
        with client_of(served, **options) as client:
            assert client.messages.create(model="claude-x", max_tokens=1, messages=HELLO).content


@pytest.mark.parametrize(
    ("fields", "options", "kind", "said"),
    [
        ({"model": "other"}, {}, "NotFoundError", "not_found_error"),
        ({"max_tokens": -1}, {}, "BadRequestError", "invalid_request_error"),
        ({"extra_body": {"temprature": 1}}, {}, "BadRequestError", "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "a" * 30_000}]}, {}, "BadRequestError", "invalid_request_error"),
        ({}, {"api_key": "wrong"}, "AuthenticationError", "authentication_error"),
        ({"messages": [{"role": "user", "content": "a" * (5 << 20)}]}, {}, "ContentTooLargeError", "request_too_large"),
    ],
)
def test_errors_are_of_the_client_s_classes(served: Served, fields: Any, options: Any, kind: str, said: str) -> None:
    with client_of(served, **options) as client, pytest.raises(anthropic.APIStatusError) as error:
        client.messages.create(**{"model": "claude-x", "max_tokens": 5, "messages": HELLO, **fields})
    assert type(error.value).__name__ == kind
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == said


def test_every_field_is_known() -> None:
    from anthropic.types import message_count_tokens_params, message_create_params

    from pi_runtime.server.api.anthropic import AnthropicConversation, MessagesRequest

    pairs: list[Any] = [
        (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
        (AnthropicConversation, message_count_tokens_params.MessageCountTokensParams),
    ]
    for ours, theirs in pairs:
        known = {field.alias or name for name, field in ours.model_fields.items()} | ours.all_known().keys()
        assert get_type_hints(theirs).keys() <= known
