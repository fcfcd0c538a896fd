"""Every field that openai-python can send is known: supported, accepted for its neutral values, or refused by name."""

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from pydantic import TypeAdapter

from pi_runtime.server.api.body import Body
from pi_runtime.server.api.chat import ChatRequest
from pi_runtime.server.api.completions import CompletionRequest
from pi_runtime.server.api.responses import ResponseRequest

PARAMS: list[tuple[type[Body], Any]] = [
    (ChatRequest, chat.CompletionCreateParamsStreaming),
    (CompletionRequest, completions.CompletionCreateParamsStreaming),
    (ResponseRequest, responses.ResponseCreateParamsStreaming),
]


@pytest.mark.parametrize(("request_type", "params"), PARAMS)
def test_every_field_is_known(request_type: type[Body], params: Any) -> None:
    assert get_type_hints(params).keys() <= request_type.model_fields.keys() | request_type.all_known().keys()


@pytest.mark.parametrize(("request_type", "params"), PARAMS)
def test_null_asks_for_nothing(request_type: type[Body], params: Any) -> None:
    """Clients write null for what they leave out; only what must be there may not be null."""
    needed = {"model", "messages", "prompt", "input"}
    for name in (get_type_hints(params).keys() & request_type.model_fields.keys()) - needed:
        field: Any = request_type.model_fields[name]
        assert TypeAdapter(field.rebuild_annotation()).validate_python(None) is None, name
