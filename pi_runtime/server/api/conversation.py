"""What a chat is made of: messages, tools, and the form of the answer, as clients send them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from pi_runtime.server.api.body import MANY, ONE_ANSWER, TOKENS, Body, Known, invalid, unsupported
from pi_runtime.text.grammar import with_white_space

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.:/-]{1,128}$")]

SchemaFields = Annotated[dict[str, Any], MANY, BeforeValidator(lambda value: {} if value == [] else value)]
"""A schema's keywords. PHP writes an empty object as an empty list."""


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """A JSON object, or JSON that follows a schema."""

    type: Literal["json_object"]
    schema_: SchemaFields | None = Field(default=None, alias="schema")


TemplateVariables = Annotated[
    Annotated[dict[str, Any], MANY] | None,
    Field(description="Further names for the model's template, such as `enable_thinking`."),
]


class GrammarFields(Body):
    """What the answer must be, from its first token on: one of these."""

    json_schema: SchemaFields | None = None
    regex: str | None = Field(default=None, description="A regular expression that the whole text matches.")
    lark: str | None = Field(default=None, description="A Lark grammar, as llguidance writes these.")
    grammar: str | None = Field(default=None, description="A grammar in llama.cpp's form, GBNF.")


class JsonSchema(Body):
    """A schema, and its name, which changes nothing."""

    name: str | None = None
    description: str | None = None
    schema_: SchemaFields | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="Accepted; every answer follows its schema.")
    fixed_separators: bool | None = Field(
        default=None, description="White space is `, ` and `: ` and no other; else the model may put in a little."
    )


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class CacheBreakpoint(Body):
    """Where a stored beginning may end: anywhere."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(Body):
    """A part of a message. Images, audio and files are not supported."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = Field(
        default=None, description="Accepted; the longest stored beginning of a prompt is found without it."
    )


class RefusalPart(Body):
    """An assistant's refusal, which is text."""

    type: Literal["refusal"]
    refusal: str


Text = str | Annotated[list[TextPart], Field(min_length=1), MANY]
AssistantPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Body):
    """The function that was called."""

    name: str
    arguments: Annotated[dict[str, Any], MANY] | str | None = Field(
        default=None, description="A JSON object as text; what is none, as a call that was cut off, stands within one."
    )


class ToolCall(Body):
    """An assistant's call of a tool."""

    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction


class CalledCustom(Body):
    """The tool that was called with text."""

    name: str
    input: str | None = None


class CustomCall(Body):
    """An assistant's call of a tool that takes text: shown as a call with the argument `input`."""

    type: Literal["custom"]
    id: str | None = None
    custom: CalledCustom


def _type_of(value: Any) -> Any:
    return value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", None)


Call = Annotated[
    Annotated[ToolCall, Tag("function")] | Annotated[CustomCall, Tag("custom")],
    Discriminator(
        _type_of, custom_error_type="union_tag_unknown", custom_error_message="input should be a function or custom"
    ),
]


class SystemMessage(Body):
    """Instructions."""

    role: Literal["system"]
    content: Text
    name: str | None = None


class DeveloperMessage(Body):
    """Instructions; where the model's template does not know this role, a system message."""

    role: Literal["developer"]
    content: Text
    name: str | None = None


class UserMessage(Body):
    """What the user says."""

    role: Literal["user"]
    content: Text
    name: str | None = None


class AssistantMessage(Body):
    """What the model said."""

    known: ClassVar[Known] = {
        **unsupported("this server reads and writes text", "audio"),
        **unsupported("use tool_calls", "function_call"),
        **unsupported("use continue_final_message", "prefix", allowed=(False,)),
    }
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantPart], MANY] | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(default=None, description="Its thoughts; the template uses or drops them.")
    reasoning: str | None = Field(default=None, description="The same by another name.")
    thinking: str | None = Field(default=None, description="The same by another name.")
    tool_calls: Annotated[list[Call], MANY] | None = None
    name: str | None = None
    annotations: Annotated[list[Any], TOKENS] | None = Field(
        default=None, description="Accepted, as answers have it; not used."
    )


class ToolMessage(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: str | Annotated[list[TextPart], MANY] | None = None
    tool_call_id: str | None = None
    name: str | None = None


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: SchemaFields | None = Field(default=None, description="JSON Schema of its arguments.")
    strict: bool | None = Field(
        default=None, description="Arguments follow the schema to the letter; else it is advice with `auto`."
    )


class Tool(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


def of_other_type(value: Any) -> str:
    """The tag of a tool that a request has: those of other types than `function` are of no use here."""
    kind = value.get("type") if isinstance(value, dict) else None
    return "other" if isinstance(kind, str) and kind != "function" else "function"


OtherTool = Annotated[
    dict[str, Any], MANY, Field(description="A tool of another type: accepted, and left out of what the model is told.")
]
AnyTool = Annotated[Annotated[Tool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(of_other_type)]


class FunctionName(Body):
    """A function by its name."""

    name: Name


class NamedTool(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Those of the tools that may, or must, be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1), MANY]


class AllowedToolsChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)


class ConversationFields(Body):
    """A chat, and what may follow."""

    known: ClassVar[Known] = {
        **{name: ONE_ANSWER[name] for name in ("best_of", "echo")},
        **unsupported("the template writes them", "add_special_tokens", allowed=(False,)),
        **unsupported("the model's own template is used", "chat_template"),
        **unsupported("put them into a message", "documents", allowed=([],)),
        **unsupported("use chat_template_kwargs", "enable_thinking"),
        **unsupported("use reasoning_effort", "reasoning"),
        **unsupported("thoughts come as they are", "include_reasoning", allowed=(True,)),
        **unsupported("thoughts come as reasoning_content", "reasoning_format", allowed=("auto", "deepseek")),
    }
    messages: Annotated[list[Message], Field(min_length=1), MANY]
    response_format: ResponseFormat | None = None
    tools: Annotated[list[AnyTool], MANY] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None,
        description="Passed over where the model's template does not know it; `none` turns `enable_thinking` off.",
    )
    chat_template_kwargs: TemplateVariables = None
    add_generation_prompt: bool | None = Field(
        default=None, description="`false`: the assistant's turn does not begin."
    )
    continue_final_message: bool | None = Field(
        default=None, description="The answer goes on where the last message, an assistant's, ends."
    )

    @cached_property
    def allowed_tools(self) -> tuple[list[dict[str, Any]], Any]:
        """The tools that may be called, and the choice among them, as `allowed_tools` finds them."""
        return allowed_tools(self.tools or [], self.tool_choice)


def schema_of(response_format: ResponseFormat | JsonSchema | None) -> Mapping[str, Any] | bool | None:
    """The schema that an answer must follow, if any."""
    match response_format:
        case JsonObjectFormat():
            return {"type": "object"} if response_format.schema_ is None else response_format.schema_
        case JsonSchemaFormat(json_schema=JsonSchema() as asked) | (JsonSchema() as asked):
            schema = asked.schema_ or {}
            return with_white_space(schema, fixed=True) if asked.fixed_separators else schema
    return None


def allowed_tools(
    tools: Sequence[Tool | dict[str, Any]], choice: ToolChoice | None
) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, as templates know them, and `auto`, `required`, `none` or the one."""
    functions = [tool for tool in tools if isinstance(tool, Tool)]
    if not functions and choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "allowed only with tools")
    known = {tool.function.name: tool.model_dump(exclude_none=True) for tool in functions}
    if len(known) < len(functions):
        raise invalid("tools", "two tools have the same name")
    match choice:
        case NamedTool():
            _check_tool(choice.function.name, known)
            return [*known.values()], choice.model_dump()
        case AllowedToolsChoice():
            names = dict.fromkeys(tool.function.name for tool in choice.allowed_tools.tools)
            for name in names:
                _check_tool(name, known)
            return [known[name] for name in names], choice.allowed_tools.mode
    return ([], "none") if choice == "none" else ([*known.values()], choice or "auto")


def _check_tool(name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise invalid("tool_choice", f"{name!r} is none of the tools")
