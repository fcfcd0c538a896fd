"""Fields that the server does not know: named, refused or passed over, and never part of a request."""

import tracemalloc
from typing import Any

import pytest
from support.asking import CHAT, OLLAMA_CHAT, asked

from pi_runtime import Engine
from pi_runtime.server.api.chat import ChatRequest
from pi_runtime.server.api.plain import TokenizeRequest
from pi_runtime.server.api.served import Served
from pi_runtime.server.api.unknown_fields import MOST_NAMED, Policy, unknown_fields
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


def named(policy: Policy) -> tuple[ChatRequest, list[str]]:
    with unknown_fields(policy) as names:
        body = ChatRequest.of(REQUEST)
    return body, names


def test_they_are_named_wherever_they_are() -> None:
    assert sorted(named("warn")[1]) == sorted(NAMES)


def test_they_are_passed_over() -> None:
    assert named("ignore")[1] == []


def test_they_are_refused() -> None:
    for told in (lambda: named("refuse"), lambda: ChatRequest.of(REQUEST)):
        with pytest.raises(ApiError) as error:
            told()
        assert (error.value.status, error.value.code, error.value.param) == (400, "unknown_parameter", "first")


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_they_are_no_part_of_the_request(policy: Policy) -> None:
    body, _ = named(policy)
    assert "odd" not in body.model_dump_json()
    assert "first" not in body.model_dump_json()
    assert body.metadata == body.chat_template_kwargs == {"any": "thing"}


def test_the_next_request_has_names_of_its_own() -> None:
    assert named("warn")[1]
    with unknown_fields("warn") as names:
        TokenizeRequest.of({"content": "a"})
    assert names == []


@pytest.mark.parametrize("policy", ["refuse", "warn"])
def test_many_cost_little(policy: Policy) -> None:
    value = {"content": "a", **{f"x{n}": "y" for n in range(200_000)}}
    tracemalloc.start()
    try:
        with unknown_fields(policy) as names:
            if policy == "refuse":
                with pytest.raises(ApiError):
                    TokenizeRequest.of(value)
            else:
                assert TokenizeRequest.of(value).content == "a"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert names == [f"x{n}" for n in range(MOST_NAMED if policy == "warn" else 0)]


def test_objects_with_many_in_all_name_few() -> None:
    with unknown_fields("warn") as names:
        ChatRequest.of({"model": "m", "messages": [{"role": "user", "content": "a", "odd": 1}] * 1000})
    assert names == [f"messages[{n}].odd" for n in range(MOST_NAMED)]


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"mirostat": 2}, {"mirostat": 0}),
    ({"typical_p": 0.5}, {"typical_p": 1.0}),
    ({"dynatemp_range": 0.5}, {"dynatemp_range": 0.0}),
    ({"xtc_probability": 0.5}, {"xtc_probability": 0, "xtc_threshold": 0.1}),
    ({"dry_multiplier": 0.8}, {"dry_multiplier": 0.0, "dry_base": 1.75, "dry_sequence_breakers": ["a"]}),
    ({"repeat_last_n": 64}, {"repeat_last_n": -1}),
    ({"samplers": ["top_k"]}, {"samplers": None}),
    ({"grammar": 'root ::= "a"'}, {"grammar": ""}),
    ({"json_schema": {}}, {"json_schema": None}),
    ({"ignore_eos": True}, {"ignore_eos": False}),
    ({"n_probs": 2}, {"n_probs": 0}),
    ({"use_beam_search": True}, {"use_beam_search": False}),
    ({"stop_token_ids": [1]}, {"stop_token_ids": []}),
    ({"guided_json": {}}, {"guided_json": None}),
    ({"best_of": 2}, {"best_of": 1}),
    ({"chat_template": "x"}, {"chat_template": None}),
    ({"enable_thinking": False}, {"enable_thinking": None}),
    ({"response_format": {"type": "json_object", "schema": {}}}, {"response_format": {"type": "json_object"}}),
]


@pytest.mark.parametrize(("changes", "asks_for_nothing"), CHANGES, ids=lambda fields: str(next(iter(fields))))
@pytest.mark.parametrize("policy", ["refuse", "warn", "ignore"])
def test_what_would_change_the_answer_is_always_refused(
    policy: Policy, changes: dict[str, Any], asks_for_nothing: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    with unknown_fields(policy) as names:
        ChatRequest.of(body | asks_for_nothing)
        with pytest.raises(ApiError) as error:
            ChatRequest.of(body | changes)
    assert error.value.code == "unsupported_parameter"
    assert str(error.value.param).split(".")[0] == next(iter(changes))
    assert names == []


def test_ollamas_options_likewise(random_chat: Chat) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    with unknown_fields("warn") as names:
        asked(OLLAMA_CHAT, body | {"options": {"heat": 1}}, random_chat[0])
        with pytest.raises(ApiError):
            asked(OLLAMA_CHAT, body | {"options": {"mirostat": 1}}, random_chat[0])
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
    with unknown_fields("warn") as names:
        settings(cache_prompt=False, id_slot=3)
    assert names == []
