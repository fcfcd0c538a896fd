"""The form that a request gives its answer: any text, or JSON by a schema."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from pi_runtime.server.api.body import MANY, Body, Unsupported

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]
    schema_: Annotated[None, Unsupported("use json_schema")] = Field(default=None, alias="schema")


class JsonSchema(Body):
    """A schema, and its name, which changes nothing."""

    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any], MANY] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="Accepted; every answer follows its schema.")


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def schema_of(response_format: ResponseFormat | None) -> Mapping[str, Any] | None:
    """The schema that an answer must follow, if any."""
    match response_format:
        case JsonObjectFormat():
            return {"type": "object"}
        case JsonSchemaFormat(json_schema=JsonSchema(schema_=schema)):
            return {} if schema is None else schema
    return None
