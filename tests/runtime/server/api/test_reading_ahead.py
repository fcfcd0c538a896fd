"""Requests with `max_tokens: 0`: the prompt is read ahead, nothing is answered, and usage says how much was there.

The twin is llama-server: with `n_predict: 0` "no tokens will be generated but the prompt is evaluated into the cache",
and its chat answers with an empty message that ended for its length. vLLM refuses 0.
"""

from typing import Any

import pytest
from runtime.server.api.test_chat import TOOL
from support.asking import refused, streamed, whole
from support.requests import settle

from pi_runtime import Engine
from pi_runtime.server.api.served import Served

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Chat = tuple[Served, Engine]

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": (CHATS, {"max_tokens": 0}),
    "by its newer name": (CHATS, {"max_completion_tokens": 0}),
    "as llama-server has it": (CHATS, {"n_predict": 0}),
    "of several answers": (CHATS, {"max_tokens": 0, "n": 3}),
    "with tools": (CHATS, {"max_tokens": 0, "tools": [TOOL], "tool_choice": "required"}),
    "with settings of its answer": (
        CHATS,
        {"max_tokens": 0, "min_tokens": 9, "seed": 4, "stop": ["x"], "logprobs": True},
    ),
    "a completion": (COMPLETIONS, {"max_tokens": 0}),
    "a completion, as llama-server has it": (COMPLETIONS, {"n_predict": 0}),
    "a completion of several answers": (COMPLETIONS, {"max_tokens": 0, "n": 2, "min_tokens": 9, "logprobs": 2}),
}


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {"model": "m", "temperature": 0, **asked, **fields}


def text_of(choice: Any) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_answered_and_the_prompt_is_there_afterwards(hermes: Chat, way: str) -> None:
    (path, fields), text = WAYS[way], f"{way}: " + 50 * "x"
    settle(hermes[1])
    before = hermes[1].stats
    found = [whole(path, body(path, text, **fields), hermes) for _ in range(2)]
    for answer in found:
        assert [text_of(choice) for choice in answer["choices"]] == [""] * fields.get("n", 1)
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert answer["usage"]["completion_tokens"] == 0
    first, again = (answer["usage"] for answer in found)
    tokens = first["prompt_tokens"]
    assert first["timings"]["prompt_n"] == tokens - first["prompt_tokens_details"]["cached_tokens"] > 50
    assert again["prompt_tokens_details"]["cached_tokens"] == tokens
    assert again["timings"]["prompt_n"] == 0
    ahead = hermes[1].stats
    assert ahead.ahead_tokens - before.ahead_tokens == first["timings"]["prompt_n"]
    assert ahead.prompt_tokens == before.prompt_tokens, "what is read ahead is no prompt of an answer"
    rest = {name: value for name, value in fields.items() if name in ("tools", "tool_choice")}
    answer = whole(path, body(path, text, max_tokens=3, **rest), hermes)
    assert (
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1 == tokens - 1
    )


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_a_stream_of_nothing_ends(hermes: Chat, path: str) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    events = [event for _, event in streamed(path, body(path, f"{path} streams", max_tokens=0, **fields), hermes)]
    assert events.pop() == "[DONE]"
    usage = events.pop()["usage"]
    assert usage["completion_tokens"] == 0 < usage["prompt_tokens"]
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"
    assert not any(
        choice.get("text") or choice.get("delta", {}).get("content") for e in events for choice in e["choices"]
    )


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_what_has_been_typed_up_to_now_is_there_when_more_is(hermes: Chat, path: str) -> None:
    text, cached = f"{path}: the quick brown fox jumps over the lazy dog", []
    for end in range(20, len(text), 8):
        whole(path, body(path, text[:end], max_tokens=0), hermes)
        cached.append(whole(path, body(path, text[: end + 8], max_tokens=0), hermes)["usage"])
    assert all(u["prompt_tokens"] - u["prompt_tokens_details"]["cached_tokens"] < 8 + 8 for u in cached)
    settle(hermes[1])


def test_with_echo_nothing_is_read(hermes: Chat) -> None:
    before = hermes[1].stats.ahead_tokens
    answer = whole(COMPLETIONS, body(COMPLETIONS, "echoed text", max_tokens=0, echo=True), hermes)
    assert text_of(answer["choices"][0]) == "echoed text"
    assert hermes[1].stats.ahead_tokens == before


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHATS, {"max_tokens": -2}, "max_tokens", "greater than or equal to -1"),
    (CHATS, {"max_tokens": 0, "max_completion_tokens": 1}, "max_tokens", "give one"),
    (CHATS, {"max_tokens": 0, "temperature": -1}, "temperature", "greater"),
    (
        CHATS,
        {"max_tokens": 0, "messages": [{"role": "user", "content": 600 * "x"}]},
        "messages",
        "at most 511",
    ),
    (COMPLETIONS, {"max_tokens": 0, "prompt": ["a", "b"]}, "prompt", "one prompt is read ahead at a time; found 2"),
    (COMPLETIONS, {"max_tokens": 0, "prompt": 512 * "x"}, "prompt", "at most 511"),
    (COMPLETIONS, {"max_tokens": 0, "n_predict": 2}, "max_tokens", "give one"),
]


@pytest.mark.parametrize(("path", "fields", "param", "says"), REFUSED)
def test_what_is_refused_for_an_answer_is_refused_ahead_of_it(
    hermes: Chat, path: str, fields: dict[str, Any], param: str | None, says: str
) -> None:
    refused(path, body(path, "a") | fields, hermes[0], param, says)
