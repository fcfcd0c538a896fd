"""What a request may cost before anything is known of it: every list and object has a bound, and errors are few."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

import pi_runtime.server.app  # noqa: F401  it imports every form of a request
from pi_runtime.server.api.body import TOKENS, Body
from pi_runtime.server.api.chat import ChatRequest
from pi_runtime.server.api.completions import CompletionRequest
from pi_runtime.server.api.plain import DetokenizeRequest, TokenizeRequest
from pi_runtime.server.errors import ApiError
from pi_runtime.server.openapi import document
from pi_runtime.server.routes import ROUTES

MEBIBYTE = 1 << 20


def bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for each in kind.__subclasses__():
        yield each
        yield from bodies(each)


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every dict within a schema of pydantic's core."""
    if isinstance(schema, dict):
        yield schema
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ():
        yield from parts(each)


@pytest.mark.parametrize("kind", sorted({*bodies()}, key=str), ids=lambda kind: kind.__name__)
def test_every_list_and_object_of_a_request_has_a_bound(kind: type[Body]) -> None:
    fields = [part for part in parts(kind.__pydantic_core_schema__) if part.get("type") in ("list", "dict")]
    assert all("max_length" in field for field in fields)
    assert all(field["fail_fast"] for field in fields if field["type"] == "list")


def test_that_walk_finds_lists_and_objects() -> None:
    kinds = [part.get("type") for part in parts(ChatRequest.__pydantic_core_schema__)]
    assert kinds.count("list") > 5
    assert kinds.count("dict") > 3


HELLO = [{"role": "user", "content": "a"}]
WRONG: list[tuple[type[Body], dict[str, Any], str]] = [
    (CompletionRequest, {"model": "m", "prompt": [-1] * 100_000}, "prompt[0]"),
    (CompletionRequest, {"model": "m", "prompt": [[]] * 50_000}, "prompt[0]"),
    (CompletionRequest, {"model": "m", "prompt": [1] * (TOKENS.most + 1)}, "prompt"),
    (DetokenizeRequest, {"tokens": [None] * 100_000}, "tokens[0]"),
    (ChatRequest, {"model": "m", "messages": [1] * 10_000}, "messages[0]"),
    (ChatRequest, {"model": "m", "messages": [1] * 100_000}, "messages"),
    (ChatRequest, {"model": "m", "messages": HELLO, "tools": [1] * 10_000}, "tools[0]"),
    (TokenizeRequest, {"content": 1, **{f"x{n}": 1 for n in range(100_000)}}, "content"),
]


@pytest.mark.parametrize(("kind", "value", "param"), WRONG)
def test_a_wrong_request_has_few_errors(kind: type[Body], value: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(value)
    assert raised.value.error_count() <= 10
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as told:
            kind.of(value)
        assert tracemalloc.get_traced_memory()[1] < MEBIBYTE
    finally:
        tracemalloc.stop()
    assert told.value.param == param
    assert len(told.value.message) < 500


def test_what_is_shown_of_a_long_value_is_its_beginning() -> None:
    with pytest.raises(ApiError) as told:
        TokenizeRequest.of({"content": [["abc", None, {"d": 1.5}]] * 100_000})
    shown = repr([["abc", None, {"d": 1.5}]] * 10)[:80]
    assert told.value.message == f"content: input should be a valid string; found {shown}…"


def test_the_document_has_no_bound_that_costs_a_million_items_to_try() -> None:
    def bounds(schema: object) -> list[int]:
        if isinstance(schema, list):
            return [found for item in schema for found in bounds(item)]
        if not isinstance(schema, dict):
            return []
        own = [schema[name] for name in ("maxItems", "maxProperties") if isinstance(schema.get(name), int)]
        return own + bounds(list(schema.values()))

    found = bounds(document(("model",), ROUTES))
    assert found
    assert max(found) <= 1000
