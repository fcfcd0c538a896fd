"""OpenAI's own client against the server: what it parses, streams, retries and raises."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pydantic
import pytest
from support.scripted import saying, scripted_artifact
from support.serving import Served, serving, slowed, wait_until

Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("client") / "alphabet.pi"
    files = {"chat_template.jinja": b"{{ messages[-1].content }}"}
    scripted_artifact(path, saying("abcdefghijklmnopqrstuvwxyz"), context=4096, files=files)
    with serving(path, slots=2, queue=0, api_keys=("secret",), changed=slowed(0.001)) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0, timeout=30) as client:
        yield client


def test_a_chat_whole_and_in_parts(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "uvw"}]
    whole = client.chat.completions.create(model="alphabet", messages=messages)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("xyz", "stop")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 3)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="alphabet", messages=messages, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "xyz"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


def test_completions_and_responses(client: openai.OpenAI) -> None:
    found = client.completions.create(model="alphabet", prompt=["a", "k"], max_tokens=2)
    assert [choice.text for choice in found.choices] == ["bc", "lm"]
    assert client.responses.create(model="alphabet", input="w").output_text == "xyz"
    with client.responses.stream(model="alphabet", input="w") as stream:
        assert stream.get_final_response().output_text == "xyz"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["alphabet"]
    assert client.models.retrieve("alphabet").id == "alphabet"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


class Weather(pydantic.BaseModel):
    rains: bool


def test_an_answer_by_a_schema_is_parsed(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "a"}]
    found = client.chat.completions.parse(
        model="alphabet",
        messages=messages,
        response_format=Weather,
        max_tokens=200,
        logit_bias=dict.fromkeys(["9", "10", "13", "32"], -100),
    )
    assert isinstance(found.choices[0].message.parsed, Weather)


def test_errors_have_their_classes(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="alphabet", prompt="a", temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_the_client_comes_again_when_it_was_told_to(served: Served, client: openai.OpenAI) -> None:
    with served.service.admission.ticket() as ticket:
        ticket.take(2)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="alphabet", prompt="a", max_tokens=1)
        assert refused.value.response.headers["retry-after"] == "1"
        threading.Timer(0.5, ticket.release).start()
        patient = client.with_options(max_retries=9)
        assert patient.completions.create(model="alphabet", prompt="a", max_tokens=1).choices[0].text == "b"


def test_a_stream_that_is_closed_ends_its_answer(endless: Path, serve: Serve) -> None:
    served = serve(endless, changed=slowed(0.002))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=30) as client:
        stream = client.completions.create(model="endless", prompt="a", max_tokens=4000, stream=True)
        next(stream)
        stream.close()
        wait_until(served.is_idle)
    assert served.engine.stats.generated_tokens < 4000
