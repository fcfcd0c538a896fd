"""What a chat is made of: messages and tools as clients send them, and the prompt that the model's template makes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pi_runtime.errors import InputError, MissingExtraError, UsageError, spelled
from pi_runtime.server.api.body import MANY, TOKENS, Body, Unsupported, invalid
from pi_runtime.server.api.logprobs import ShownLogprobs
from pi_runtime.server.api.served import Served
from pi_runtime.server.api.turn import Turn
from pi_runtime.server.errors import described, refused
from pi_runtime.server.tools.output import OutputFormat
from pi_runtime.text.grammar import Grammar
from pi_runtime.text.grammar_check import check_grammar

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


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
    arguments: str = Field(description="A JSON object as text.")


class ToolCall(Body):
    """An assistant's call of a tool."""

    type: Literal["function"]
    id: str
    function: CalledFunction


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

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantPart], MANY] | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(default=None, description="Its thoughts; the template uses or drops them.")
    tool_calls: Annotated[list[ToolCall], MANY] | None = None
    name: str | None = None
    annotations: Annotated[list[Any], TOKENS] | None = Field(
        default=None, description="Accepted, as answers have it; not used."
    )
    audio: Annotated[None, Unsupported("this server reads and writes text")] = None
    function_call: Annotated[None, Unsupported("use tool_calls")] = None
    prefix: Annotated[Literal[False] | None, Unsupported("use continue_final_message")] = None


class ToolMessage(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: Text
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], MANY] | None = Field(
        default=None, description="JSON Schema of its arguments."
    )
    strict: bool | None = None


class Tool(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


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


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked, and how its answer is read."""

    text: str
    ids: Sequence[int]
    grammar: Grammar | None
    tools: Sequence[Mapping[str, Any]]
    output: OutputFormat

    @property
    def shown_tokens(self) -> Sequence[int]:
        """Special tokens that the text of its answer shows, for those who read it."""
        return self.output.shown_tokens(self.tools)

    def turn(self, served: Served) -> Turn:
        """What gathers one answer."""
        shown = ShownLogprobs(served.model.tokenizer, self.shown_tokens)
        return Turn(self.output.parser(self.text, self.tools), shown)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, and what the answer to them may be, in the words of chat templates."""

    messages: Sequence[Mapping[str, Any]]
    messages_field: str = "messages"
    """The field of the request that they come from."""
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    """`auto`, `required`, or the function that must be called."""
    parallel: bool = True
    """Whether one answer may have several calls."""
    schema: Mapping[str, Any] | None = None
    """What JSON the answer must be, where it is no call."""
    schema_field: str = "response_format"
    """The field of the request that says so."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further names of the template."""
    add_generation_prompt: bool = True
    continues: bool = False
    """Whether the answer goes on where the last message ends."""

    def prompt(self, served: Served) -> Prompt:
        """What the template makes of it. Raises ApiError for what the template refuses, or the model cannot do."""
        text = self.text(served)
        ids = served.encode(text, self.messages_field)
        served.check_length(len(ids), self.messages_field)
        grammar = served.output.grammar(
            text, tools=self.tools, choice=self.tool_choice, parallel=self.parallel, schema=self.schema
        )
        tokenizer = served.model.tokenizer
        if grammar is not None:
            # Compiled now, and kept: the engine's error would not name the field.
            try:
                check_grammar(grammar)
                tokenizer.grammars.start(grammar)
            except MissingExtraError as error:
                message = f"{spelled(error.what)}: {spelled(error.remedy)}"
                raise invalid(self._grammar_field, message, code="unsupported_value") from None
            except UsageError as error:
                raise invalid(self._grammar_field, described(error, error.reason)) from None
            except InputError as error:
                raise invalid(self._grammar_field, spelled(error.what)) from None
        return Prompt(text, ids, grammar, self.tools, served.output)

    @property
    def _grammar_field(self) -> str:
        return "tools" if self.schema is None else self.schema_field

    def text(self, served: Served) -> str:
        """The text that the template makes of it. Raises ApiError for what the template refuses."""
        if not served.template:
            raise invalid(self.messages_field, "the model has no chat template; use /v1/completions")
        try:
            text = served.model.chat_prompt(
                self.messages,
                tools=self.tools,
                variables=self.variables,
                add_generation_prompt=self.add_generation_prompt and not self.continues,
            )
        except UsageError as error:  # a name of these arguments among the variables
            raise invalid("chat_template_kwargs", refused(error).message) from None
        except InputError as error:
            raise invalid(self.messages_field, refused(error).message) from None
        return self._continued(text) if self.continues else text

    def _continued(self, text: str) -> str:
        """The prompt up to the end of the last message's content."""
        content = str(self.messages[-1].get("content") or "").strip()
        at = text.rfind(content)
        if self.messages[-1]["role"] != "assistant" or not content or at < 0:
            raise invalid("continue_final_message", "the last message must be an assistant's, and the template show it")
        return text[: at + len(content)]


def template_message(message: Message, place: str, served: Served) -> dict[str, Any]:
    """A message as chat templates know it: content is text, and the arguments of calls are objects."""
    found: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    if message.role == "developer" and "developer" not in served.template:
        found["role"] = "system"
    if message.name is not None:
        found["name"] = message.name
    if isinstance(message, ToolMessage):
        found["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        found["content"] = found["content"] or message.refusal or ""
        if message.reasoning_content is not None:
            found["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": arguments_of(call.function, f"{place}.tool_calls[{n}].function"),
                    },
                }
                for n, call in enumerate(message.tool_calls)
            ]
        elif message.content is None and message.refusal is None:
            raise invalid(f"{place}.content", "required where there are no tool_calls")
    return found


def text_of(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    """The text of a message's content; parts stand on lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def arguments_of(function: CalledFunction, place: str) -> dict[str, Any]:
    """The arguments of a call as an object, as templates expect them."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.arguments", "a JSON object as text is expected")
    return arguments


def allowed_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, as templates know them, and `auto`, `required`, `none` or the one."""
    known = {tool.function.name: tool.model_dump(exclude_none=True) for tool in tools}
    if len(known) < len(tools):
        raise invalid("tools", "two tools have the same name")
    match choice:
        case NamedTool():
            _check_tool(choice.function.name, known)
            return [*known.values()], choice.model_dump()
        case AllowedToolsChoice():
            names = [tool.function.name for tool in choice.allowed_tools.tools]
            for name in names:
                _check_tool(name, known)
            return [known[name] for name in names], choice.allowed_tools.mode
    return ([], "none") if choice == "none" else ([*known.values()], choice or "auto")


def _check_tool(name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise invalid("tool_choice", f"{name!r} is none of the tools")
