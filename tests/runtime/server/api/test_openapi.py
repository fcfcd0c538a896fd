"""The OpenAPI document: it is one, requests and answers follow its schemas, and what it refuses is refused."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from support import asking

from pi_runtime import Engine
from pi_runtime.server.api import plain
from pi_runtime.server.api.ollama import ollama_version, running, tags
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError
from pi_runtime.server.openapi import document
from pi_runtime.server.routes import ROUTES

Chat = tuple[Served, Engine]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "logprobs": True, "stream_options": {"include_usage": True}},
    "/v1/completions": {"model": "m", "prompt": "a", "max_tokens": 3, "logprobs": 1},
    "/v1/responses": {"model": "m", "input": "a", "max_output_tokens": 3, "top_logprobs": 1},
    "/v1/messages": {**CHAT, "system": "Be kind.", "stop_sequences": ["zz"]},
    "/api/chat": {"model": "m", "messages": CHAT["messages"], "options": {"num_predict": 3}},
    "/api/generate": {"model": "m:latest", "prompt": "a", "options": {"num_predict": 3}},
}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return json.loads(json.dumps(document(("m",), ROUTES)))  # type: ignore[no-any-return]


def follows(described: dict[str, Any], value: Any, schema: dict[str, Any]) -> bool:
    whole = {**schema, "components": described["components"]}
    jsonschema.Draft202012Validator.check_schema(whole)
    return jsonschema.Draft202012Validator(whole).is_valid(json.loads(json.dumps(value)))


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_all_that_is_named_is_there(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    assert {name.removeprefix("#/components/schemas/") for name in references(described)} == schemas.keys()
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    without = [operation["operationId"] for operation in operations if "200" not in operation["responses"]]
    assert {*without} == {"post_v1_rerank", "post_rerank"}


@pytest.mark.parametrize("path", REQUESTS)
def test_requests_and_answers_follow_their_schemas(described: dict[str, Any], random_chat: Chat, path: str) -> None:
    body = REQUESTS[path]
    operation = described["paths"][path]["post"]
    asked = operation["requestBody"]["content"]["application/json"]["schema"]
    content = operation["responses"]["200"]["content"]
    for stream in (False, True):
        request = {**body, "stream": stream}
        if not stream:
            request.pop("stream_options", None)
        assert follows(described, request, asked)
        if stream:
            schema = content[asking.read(path, request, random_chat[0])[1].media]["x-itemSchema"]
            events = [data for _, data in asking.streamed(path, request, random_chat) if data != "[DONE]"]
            assert all(follows(described, event, schema) for event in events)
        else:
            found = asking.whole(path, request, random_chat)
            assert follows(described, found, content["application/json"]["schema"])


WRONG = [
    {"model": "other"},
    {"unknown": 1},
    {"n": 0},
    {"temperature": 3},
    {"temperature": "1"},
    {"stop": [1]},
    {"store": 1},
    {"audio": {}},
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"logit_bias": {"a": 1}},
    {"tools": ["x"]},
    {"response_format": {"type": "xml"}},
    {"metadata": {"a": 1}},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_what_is_refused_does_not_follow_the_schema(
    described: dict[str, Any], random_chat: Chat, fields: dict[str, Any]
) -> None:
    asked = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert follows(described, CHAT, asked)
    assert not follows(described, {**CHAT, **fields}, asked)
    with pytest.raises(ApiError) as error:
        asking.asked(asking.CHAT, {**CHAT, **fields}, random_chat[0])
    operation = described["paths"]["/v1/chat/completions"]["post"]
    errors = operation["responses"][str(error.value.status)]["content"]["application/json"]["schema"]
    assert follows(described, error.value.body(), errors)


def test_answers_that_take_no_engine_follow_their_schemas(described: dict[str, Any], random_chat: Chat) -> None:
    served, _ = random_chat
    for path, method, answer in (
        ("/v1/models", "get", plain.list_models(served)),
        ("/v1/models/{name}", "get", plain.retrieve_model("m", served)),
        ("/tokenize", "post", asking.computed("/tokenize", {"content": "é", "with_pieces": True}, served)),
        ("/tokenize", "post", asking.computed("/tokenize", {"content": "é"}, served)),
        ("/detokenize", "post", asking.computed("/detokenize", {"tokens": [1]}, served)),
        ("/apply-template", "post", asking.computed("/apply-template", {"messages": CHAT["messages"]}, served)),
        ("/api/tags", "get", tags(served)),
        ("/api/ps", "get", running(served)),
        ("/api/version", "get", ollama_version()),
        ("/api/show", "post", asking.computed("/api/show", {"model": "m"}, served)),
    ):
        schema = described["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        assert follows(described, answer, schema), path
