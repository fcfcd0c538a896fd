"""Ollama's routes on an engine: lines of JSON, options, figures, and errors in its form."""

from datetime import datetime
from typing import Any

import pytest
from support import asking
from support.asking import OLLAMA_CHAT, OLLAMA_GENERATE, computed

from pi_runtime import Engine
from pi_runtime.server.api.answer import NDJSON
from pi_runtime.server.api.ollama import ollama_version, running, tags
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError

Chat = tuple[Served, Engine]


def lines(chat: Chat, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of a stream."""
    body = {"model": "m", **fields}
    assert asking.read(path, body, chat[0])[1].media == NDJSON
    found: list[Any] = [line for _, line in asking.streamed(path, body, chat)]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def whole(chat: Chat, path: str, **fields: Any) -> dict[str, Any]:
    """The answer as one object."""
    found: dict[str, Any] = asking.whole(path, {"model": "m", "stream": False, **fields}, chat)
    return found


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat(alphabet_chat: Chat) -> None:
    found = lines(alphabet_chat, OLLAMA_CHAT, messages=says("abc"), options={"num_predict": 4})
    assert "".join(line["message"]["content"] for line in found) == "defg"
    assert {line["message"]["role"] for line in found} == {"assistant"}
    assert {line["model"] for line in found} == {"m"}
    assert all(datetime.fromisoformat(line["created_at"]) for line in found)
    last = found[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("length", 3, 4)
    for key in ("total_duration", "prompt_eval_duration", "eval_duration"):
        assert isinstance(last[key], int)
        assert last[key] > 0
    one = whole(alphabet_chat, OLLAMA_CHAT, messages=says("abc"))
    assert one["message"] == {"role": "assistant", "content": "defghijklmnopqrstuvwxyz"}
    assert (one["done"], one["done_reason"]) == (True, "stop")


def test_a_prompt(alphabet_chat: Chat) -> None:
    found = lines(alphabet_chat, OLLAMA_GENERATE, prompt="abc", options={"stop": ["gh"]})
    assert "".join(line["response"] for line in found) == "def"
    assert found[-1]["done_reason"] == "stop"
    assert whole(alphabet_chat, OLLAMA_GENERATE, prompt="x", raw=True)["response"] == "yz"


def test_a_prompt_goes_through_the_template_unless_it_is_raw(random_chat: Chat) -> None:
    served, _ = random_chat

    def prompt(**fields: Any) -> str:
        request = asking.asked(OLLAMA_GENERATE, {"model": "m:latest", "prompt": "x", **fields}, served)
        return served.model.tokenizer.decode(request.texts[0])

    assert prompt(system="be brief") == "s:be brief;u:x;a:"
    assert prompt(raw=True) == "x"


def test_options_have_their_effect(random_chat: Chat) -> None:
    served, _ = random_chat
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": "x", "num_predict": 5,
        "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 2048, "num_thread": 8,
    }  # fmt: skip
    settings = asking.asked(OLLAMA_CHAT, {"model": "m", "messages": says("a"), "options": options}, served).settings
    sampling = settings["sampling"]
    assert sampling is not None
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.9, 0.1)
    assert (sampling.seed, sampling.repetition_penalty) == (3, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert (settings["max_tokens"], settings["stop"]) == (5, ["x"])
    for without in (-1, -2, 0):
        body = {"model": "m", "messages": says("a"), "options": {"num_predict": without}}
        assert asking.asked(OLLAMA_CHAT, body, served).settings["max_tokens"] is None


def test_a_form_of_the_answer(random_chat: Chat) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for form in ("json", schema):
        found = whole(random_chat, OLLAMA_CHAT, messages=says("a"), format=form, options={"num_predict": 3})
        assert found["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_whole_or_not_at_all(hermes: Chat, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    expected = [{"index": 0, "name": "add", "arguments": {"x": 1}}]
    for text in (call, call + call[:-20]):
        body = {"model": "m", "messages": says("a"), "tools": [tool], "stream": stream}
        found = asking.said(OLLAMA_CHAT, body, hermes[0], [text], "length")
        answers: list[Any] = [line for _, line in found] if stream else [found]
        calls = [call["function"] for answer in answers for call in answer["message"].get("tool_calls", [])]
        assert calls == expected


def test_without_a_prompt_the_model_is_loaded(random_chat: Chat) -> None:
    for path, fields in ((OLLAMA_CHAT, {"messages": []}), (OLLAMA_GENERATE, {})):
        (line,) = lines(random_chat, path, **fields)
        assert line["done_reason"] == "load"


@pytest.mark.parametrize(
    ("path", "fields", "status", "says"),
    [
        (OLLAMA_CHAT, {}, 400, "messages"),
        (OLLAMA_CHAT, {"model": "other", "messages": []}, 404, "'m'"),
        (
            OLLAMA_CHAT,
            {"messages": [{"role": "user", "content": "a", "images": ["x"]}]},
            400,
            "images: not supported",
        ),
        (OLLAMA_CHAT, {"messages": [], "options": {"mirostat": 2}}, 400, "options.mirostat: not supported"),
        (OLLAMA_CHAT, {"messages": [], "options": {"mirostat": False}}, 400, "options.mirostat: not supported"),
        (OLLAMA_CHAT, {"messages": [], "options": {"heat": 2}}, 400, "options.heat: unknown field"),
        (OLLAMA_GENERATE, {"prompt": "a", "suffix": "b"}, 501, "fill in"),
        (OLLAMA_GENERATE, {"prompt": "a", "context": [1]}, 400, "context: not supported"),
        (OLLAMA_GENERATE, {"prompt": "a", "format": {"type": "nothing"}}, 400, "format"),
        (OLLAMA_GENERATE, {"prompt": "a", "raw": True, "format": "json"}, 400, "format"),
    ],
)
def test_what_is_wrong_is_told(random_chat: Chat, path: str, fields: dict[str, Any], status: int, says: str) -> None:
    with pytest.raises(ApiError) as error:
        asking.asked(path, {"model": "m", **fields}, random_chat[0])
    assert error.value.status == status
    assert error.value.body_at(path).keys() == {"error"}
    assert says in error.value.body_at(path)["error"]


PAST: list[tuple[dict[str, Any], str]] = [
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        '"arguments": {"a": 1}',
    ),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}, '"arguments": {}'),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        '"arguments": {"arguments": "{"}',
    ),
    ({"role": "assistant", "content": None}, "u:hi;a:;u:on;"),
    ({"role": "assistant"}, "u:hi;a:;u:on;"),
    ({"role": "tool", "tool_name": "f", "content": "\ud83d!"}, "\ufffd!"),
]


@pytest.mark.parametrize(("message", "shown"), PAST, ids=ascii)
def test_what_is_shown_of_the_past_is_no_error(random_chat: Chat, message: dict[str, Any], shown: str) -> None:
    served, _ = random_chat
    body = {"model": "m", "messages": [*says("hi"), message, *says("on")]}
    assert shown in served.model.tokenizer.decode(asking.asked(OLLAMA_CHAT, body, served).texts[0])


def test_tools_of_other_types_and_efforts_are_passed_over(random_chat: Chat) -> None:
    served, _ = random_chat
    plain = asking.asked(OLLAMA_CHAT, {"model": "m", "messages": says("hi")}, served).texts
    for more in ({"tools": [{"type": "web_search"}]}, {"think": True}, {"think": False}, {"think": "high"}):
        assert asking.asked(OLLAMA_CHAT, {"model": "m", "messages": says("hi"), **more}, served).texts == plain


Chat = tuple[Served, Engine]


def test_the_model_is_listed(random_chat: Chat) -> None:
    served, _ = random_chat
    (model,) = tags(served)["models"]
    assert (model["name"], model["digest"]) == ("m:latest", served.model.digest)
    assert model["size"] > 0
    assert model["details"]["family"] == "llama"


def test_the_model_is_loaded(random_chat: Chat) -> None:
    served, _ = random_chat
    (listed,), (loaded,) = tags(served)["models"], running(served)["models"]
    assert {name: loaded[name] for name in listed.keys() & loaded.keys()} == {  # type: ignore[literal-required]
        name: value for name, value in listed.items() if name != "modified_at"
    }
    assert (loaded["context_length"], loaded["size_vram"]) == (192, 0)


def test_the_version_is_a_version() -> None:
    assert [part.isdigit() for part in ollama_version()["version"].split(".")] == [True] * 3


@pytest.mark.parametrize(
    "body", [{"model": "m"}, {"name": "m:latest"}, {"model": "m:latest", "verbose": True}], ids=str
)
def test_the_model_is_described(random_chat: Chat, body: dict[str, Any]) -> None:
    served, _ = random_chat
    found, decoder = computed("/api/show", body, served), served.model.manifest.decoder
    info = found["model_info"]
    assert info["general.architecture"] == decoder.family
    assert info[f"{decoder.family}.context_length"] == served.model.context == 192
    assert info[f"{decoder.family}.embedding_length"] == decoder.d_model
    assert f"{decoder.family}.expert_count" not in info
    assert found["details"] == tags(served)["models"][0]["details"]
    assert found["template"] == served.template
    assert found["capabilities"] == ["completion", "tools"]
    assert "num_ctx 192\ntemperature 0.0\n" in found["parameters"]


def test_what_the_template_knows_is_a_capability(hermes: Chat) -> None:
    assert computed("/api/show", {"model": "m"}, hermes[0])["capabilities"] == ["completion", "tools", "thinking"]


def test_a_model_without_template_is_described(endless_served: Served) -> None:
    found = computed("/api/show", {"model": "m"}, endless_served)
    assert (found["template"], found["capabilities"]) == ("", ["completion"])


@pytest.mark.parametrize(("body", "status"), [({"model": "other"}, 404), ([], 400), ({"model": 1}, 400)], ids=str)
def test_what_is_wrong_of_a_model_is_told(random_chat: Chat, body: Any, status: int) -> None:
    with pytest.raises(ApiError) as error:
        computed("/api/show", body, random_chat[0])
    assert error.value.status == status
