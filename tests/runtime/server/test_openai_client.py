"""The server as openai-python sees it: typed answers, streams, retries, tools, and its classes of errors."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel
from support.scripted import tool_user
from support.serving import Served, events, serving, slowed, wait_until

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(
        tool_user(tmp_path_factory.mktemp("openai") / "tools.pi"), api_keys=("key",), unknown_fields="refuse"
    ) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with client_of(served) as client:
        yield client


def client_of(served: Served, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", **{"api_key": "key", "max_retries": 0, "timeout": 60, **options})


def test_a_chat(served: Served, client: OpenAI) -> None:
    found = client.chat.completions.create(model=served.name, messages=HELLO, logprobs=True, top_logprobs=2)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "abc", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [x.token for x in choice.logprobs.content] == ["a", "b", "c"]
    assert all(len(x.top_logprobs) == 2 for x in choice.logprobs.content)
    assert found.usage is not None
    assert found.usage.completion_tokens == 3


def test_a_stream_with_its_usage(served: Served, client: OpenAI) -> None:
    with client.chat.completions.create(
        model=served.name, messages=HELLO, stream=True, n=2, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert texts == ["abc", "abc"]
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks)


def test_the_clients_own_events_of_a_stream(served: Served, client: OpenAI) -> None:
    with client.chat.completions.stream(model=served.name, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_completion()
    assert found.choices[0].message.content == "abc"
    assert "content.delta" in kinds
    assert kinds[-1] == "content.done"


class City(BaseModel):
    name: str
    parts: list[str]
    is_large: bool


def test_an_answer_is_parsed_as_a_type(served: Served, client: OpenAI) -> None:
    found = client.chat.completions.parse(model=served.name, messages=HELLO, response_format=City, max_tokens=100)
    (choice,) = found.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, City)
    assert choice.message.parsed.name == "SF"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_of_a_tool_and_its_result(served: Served, client: OpenAI, choice: Any) -> None:
    found = client.chat.completions.create(
        model=served.name, messages=HELLO, tools=[WEATHER], tool_choice=choice, max_tokens=200
    )
    message = found.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert found.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "SF"})
    kept = served.engine._store.tree.nodes()
    assert any(node.outcome is not None and node.outcome.in_call for node in kept), "nobody waits for the tool"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    found = client.chat.completions.create(
        model=served.name, messages=[*HELLO, message.to_dict(), result], tools=[WEATHER], tool_choice="none"
    )
    assert found.choices[0].message.content == "abc"


def test_a_streamed_call_is_put_together_by_the_client(served: Served, client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=served.name, messages=HELLO, tools=[WEATHER], tool_choice="required", max_tokens=200
    ) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == {"city": "SF"}
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1


def test_completions_whole_and_streamed(served: Served, client: OpenAI) -> None:
    found = client.completions.create(model=served.name, prompt=["xa", "xb"], max_tokens=5)
    assert [choice.text for choice in found.choices] == ["bc", "c"]
    stream = client.completions.create(model=served.name, prompt=[ord("a")], stream=True)
    assert "".join(choice.text for chunk in stream for choice in chunk.choices) == "bc"


def test_errors_are_of_the_clients_classes(served: Served, client: OpenAI) -> None:
    chats = client.chat.completions
    with pytest.raises(openai.BadRequestError) as wrong:
        chats.create(model=served.name, messages=HELLO, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        chats.create(model=served.name, messages=HELLO, extra_body={"temprature": 1})
    assert (unknown.value.param, unknown.value.code) == ("temprature", "unknown_parameter")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=served.name, prompt=[97] * 2048)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as other:
        chats.create(model="another", messages=HELLO)
    assert other.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError), client_of(served, api_key="wrong") as stranger:
        stranger.chat.completions.create(model=served.name, messages=HELLO)


def test_a_client_that_is_turned_away_comes_again(endless: Path, serve: Any) -> None:
    served = serve(endless, slots=1, queue=0, changed=slowed(0.002))
    with client_of(served) as hasty, served.streaming(max_tokens=100_000) as response:
        arriving = events(response)  # without a name it would end, and the stream with it
        next(arriving)
        with pytest.raises(openai.RateLimitError) as busy:
            hasty.completions.create(model=served.name, prompt="a", max_tokens=2)
        assert int(busy.value.response.headers["retry-after"]) >= 1
        assert busy.value.code == "queue_full"
        found: list[str] = []

        def patient() -> None:
            with client_of(served, max_retries=4) as client:
                found.append(client.completions.create(model=served.name, prompt="a", max_tokens=2).choices[0].text)

        thread = threading.Thread(target=patient)
        thread.start()
        requests = served.service.metrics.requests
        wait_until(lambda: requests["/v1/completions", 429] >= 2)
    thread.join(60)
    assert found == ["ba"]


def test_a_server_that_loads_is_a_server_error(endless: Path, serve: Any) -> None:
    gate = threading.Event()
    served = serve(endless, gate=gate)
    with client_of(served) as client, pytest.raises(openai.InternalServerError) as loading:
        client.completions.create(model="endless", prompt="a")
    assert (loading.value.status_code, loading.value.code) == (503, "loading")
    gate.set()
