"""Answers that take no engine."""

from typing import Any

import pytest
from openai.types import Model
from support.asking import computed, refused

from pi_runtime import Engine
from pi_runtime.server.api import plain
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError


@pytest.fixture
def served(random_chat: tuple[Served, Engine]) -> Served:
    return random_chat[0]


def test_a_text_becomes_tokens_and_tokens_a_text(served: Served) -> None:
    assert computed("/tokenize", {"content": "aé"}, served) == {"tokens": [97, 0xC3, 0xA9]}
    assert computed("/detokenize", {"tokens": [97, 0xC3, 0xA9, 256]}, served) == {"content": "aé"}
    assert computed("/detokenize", {"tokens": []}, served) == {"content": ""}
    assert computed("/tokenize", {"content": "aé<|end|>", "with_pieces": True, "add_special": True}, served) == {
        "tokens": [
            {"id": 97, "piece": "a"},
            {"id": 0xC3, "piece": [0xC3]},
            {"id": 0xA9, "piece": [0xA9]},
            {"id": 256, "piece": "<|end|>"},
        ]
    }


def test_a_chat_becomes_a_prompt(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert computed("/apply-template", {"messages": messages}, served) == {"prompt": "u:hi;a:"}
    assert computed("/apply-template", {"messages": messages, "add_generation_prompt": False}, served) == {
        "prompt": "u:hi;"
    }


def test_a_template_is_told_the_date(prefixed_chat: tuple[Served, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama-server tells it; a request may name another, and `chat_prompt` alone renders as transformers does."""
    monkeypatch.setattr("pi_runtime.text.chat_template.time.strftime", lambda form: form)
    served, messages = prefixed_chat[0], [{"role": "user", "content": "hi"}]
    assert computed("/apply-template", {"messages": messages}, served) == {"prompt": "%d %b %Y|%b %d %Y|hi"}
    other = {"messages": messages, "chat_template_kwargs": {"date_string": "then"}}
    assert computed("/apply-template", other, served) == {"prompt": "then|%b %d %Y|hi"}
    assert served.model.chat_prompt(messages) == "||hi"


def test_the_model_is_listed(served: Served) -> None:
    (found,) = plain.list_models(served)["data"]
    Model.model_validate(found, strict=True)
    assert plain.retrieve_model("m", served) == found
    assert found["context_length"] == 192
    with pytest.raises(ApiError, match="this server has one model"):
        plain.retrieve_model("gpt", served)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "\ud800"}, "content"),
        ("/tokenize", {"content": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "user", "content": 1}], "model": "m"}, "messages[0].content"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: dict[str, Any], param: str | None) -> None:
    refused(path, body, served, param)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_texts_are_not_ranked(served: Served, path: str) -> None:
    refused(path, {"query": "b", "documents": ["c"]}, served, None, "writes text", 501)
