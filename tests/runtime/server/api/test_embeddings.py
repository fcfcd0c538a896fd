"""Embeddings over the forms of API that have them."""

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse
from support.asking import refused, whole

from pi_runtime import Engine
from pi_runtime.server.api.served import Served

OPENAI, OLLAMA = "/v1/embeddings", "/api/embed"
Chat = tuple[Served, Engine]


@pytest.fixture(params=["mean", "last"])
def chat(random_chat: Chat, request: pytest.FixtureRequest) -> Chat:
    served, engine = random_chat
    return replace(served, settings=replace(served.settings, embeddings=request.param)), engine


@pytest.mark.parametrize("given", ["abc", [97, 98, 99], ["abc", [100], "e"], [[1, 2], [3]]], ids=str)
def test_vectors_are_the_models_own(chat: Chat, given: Any) -> None:
    served, _ = chat
    texts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    wanted = [served.model.embed(text, served.settings.embeddings) for text in texts]
    tokens = sum(map(len, texts))
    found = whole(OPENAI, {"model": "m", "input": given}, chat)
    CreateEmbeddingResponse.model_validate(found)
    assert [one["embedding"] for one in found["data"]] == wanted
    assert [one["index"] for one in found["data"]] == [*range(len(texts))]
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert whole(OLLAMA, {"model": "m", "input": given}, chat) == {
        "model": "m", "embeddings": wanted, "prompt_eval_count": tokens
    }  # fmt: skip


def test_base64_has_the_same_numbers(chat: Chat) -> None:
    plain = whole(OPENAI, {"input": "abc"}, chat)["data"][0]["embedding"]
    found = whole(OPENAI, {"input": "abc", "encoding_format": "base64"}, chat)["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(found), "<f4").tolist() == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [999]}, "input[0]"),
        ({"input": "a" * 193}, "input"),
        ({"input": {"content": "a"}}, "input.content"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ["a"] * 2049}, "input"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_wrong_is_named(chat: Chat, fields: dict[str, Any], param: str) -> None:
    refused(OPENAI, fields, chat[0], param)


@pytest.mark.parametrize("path", [OPENAI, "/embeddings", OLLAMA])
def test_a_server_that_was_not_asked_for_them_says_how(random_chat: Chat, path: str) -> None:
    refused(path, {"input": "a"}, random_chat[0], None, "--embeddings", 501)
