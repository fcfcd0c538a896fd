"""Fields that the server does not know: named, refused or passed over, and never part of a request."""

import tracemalloc
from typing import Any

import pytest
from support.asking import CHAT, asked

from pi_runtime import Engine
from pi_runtime.server.api.body import MOST_NAMED
from pi_runtime.server.api.chat import ChatRequest
from pi_runtime.server.api.ollama import OllamaChatRequest
from pi_runtime.server.api.plain import TokenizeRequest
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError

Chat = tuple[Served, Engine]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"any": {"thing": 1}}, "odd": 1}}
REQUEST: dict[str, Any] = {
    "model": "m",
    "first": 1,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "odd": {"x": 1}}], "odd": 1}],
    "stream_options": {"odd": 1},
    "stream": True,
    "tools": [TOOL],
    "metadata": {"any": "thing"},
    "chat_template_kwargs": {"any": "thing"},
}
NAMES = ["first", "messages[0].odd", "messages[0].content[0].odd", "tools[0].function.odd", "stream_options.odd"]


def named() -> tuple[ChatRequest, list[str]]:
    names: list[str] = []
    return ChatRequest.of(REQUEST, names), names


def test_they_are_named_wherever_they_are() -> None:
    assert sorted(named()[1]) == sorted(NAMES)


def test_they_are_refused() -> None:
    with pytest.raises(ApiError) as error:
        ChatRequest.of(REQUEST)
    assert (error.value.status, error.value.code, error.value.param) == (400, "unknown_parameter", "first")


def test_they_are_no_part_of_the_request() -> None:
    body, _ = named()
    assert "odd" not in body.model_dump_json()
    assert "first" not in body.model_dump_json()
    assert body.metadata == body.chat_template_kwargs == {"any": "thing"}


def test_a_request_without_any_names_none() -> None:
    names: list[str] = []
    TokenizeRequest.of({"content": "a"}, names)
    assert names == []


@pytest.mark.parametrize("is_refused", [True, False])
def test_many_cost_little(is_refused: bool) -> None:
    value = {"content": "a", **{f"x{n}": "y" for n in range(200_000)}}
    names: list[str] = []
    tracemalloc.start()
    try:
        if is_refused:
            with pytest.raises(ApiError):
                TokenizeRequest.of(value)
        else:
            assert TokenizeRequest.of(value, names).content == "a"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert names == [f"x{n}" for n in range(0 if is_refused else MOST_NAMED)]


def test_objects_with_many_in_all_name_few() -> None:
    names: list[str] = []
    ChatRequest.of({"model": "m", "messages": [{"role": "user", "content": "a", "odd": 1}] * 1000}, names)
    assert names == [f"messages[{n}].odd" for n in range(MOST_NAMED)]


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"mirostat": 2}, {"mirostat": 0}),
    ({"typical_p": 0.5}, {"typical_p": 1.0}),
    ({"dynatemp_range": 0.5}, {"dynatemp_range": 0.0}),
    ({"xtc_probability": 0.5}, {"xtc_probability": 0, "xtc_threshold": 0.1}),
    ({"dry_multiplier": 0.8}, {"dry_multiplier": 0.0, "dry_base": 1.75, "dry_sequence_breakers": ["a"]}),
    ({"samplers": ["top_k"]}, {"samplers": None}),
    ({"n_probs": 2}, {"n_probs": 0}),
    ({"use_beam_search": True}, {"use_beam_search": False}),
    ({"stop_token_ids": [1]}, {"stop_token_ids": []}),
    ({"guided_json": {}}, {"guided_json": None}),
    ({"best_of": 2}, {"best_of": 1}),
    ({"chat_template": "x"}, {"chat_template": None}),
    ({"enable_thinking": False}, {"enable_thinking": None}),
    ({"documents": ["a"]}, {"documents": []}),
]


@pytest.mark.parametrize(("changes", "asks_for_nothing"), CHANGES, ids=lambda fields: str(next(iter(fields))))
@pytest.mark.parametrize("names", [None, []], ids=["refused", "named"])
def test_what_would_change_the_answer_is_always_refused(
    names: list[str] | None, changes: dict[str, Any], asks_for_nothing: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    ChatRequest.of(body | asks_for_nothing, names)
    with pytest.raises(ApiError) as error:
        ChatRequest.of(body | changes, names)
    assert error.value.code == "unsupported_parameter"
    assert str(error.value.param).split(".")[0] == next(iter(changes))
    assert not names


def test_ollamas_options_likewise() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    names: list[str] = []
    OllamaChatRequest.of(body | {"options": {"heat": 1}}, names)
    with pytest.raises(ApiError):
        OllamaChatRequest.of(body | {"options": {"mirostat": 1}}, names)
    assert names == ["options.heat"]


def test_other_names_of_a_setting(random_chat: Chat) -> None:
    served, _ = random_chat
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}

    def settings(**fields: Any) -> Any:
        return asked(CHAT, body | fields, served).settings

    assert settings(n_predict=5)["max_tokens"] == settings(n_predict=5, max_tokens=5)["max_tokens"] == 5
    assert settings(n_predict=-1)["max_tokens"] is None
    assert settings(repeat_penalty=1.5)["sampling"].repetition_penalty == 1.5
    for fields in ({"n_predict": 5, "max_tokens": 6}, {"repeat_penalty": 1.5, "repetition_penalty": 1.25}):
        with pytest.raises(ApiError) as error:
            settings(**fields)
        assert error.value.param in fields
    settings(cache_prompt=False, id_slot=3)  # known, so not refused
