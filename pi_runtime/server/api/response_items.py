"""What a request of the Responses API holds: items of a conversation, and what chat templates make of them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pi_runtime.server.api.body import MANY, TOKENS, Body, Unsupported, invalid
from pi_runtime.server.api.chat_prompt import arguments_of
from pi_runtime.server.api.conversation import CacheBreakpoint, CalledFunction, Function, FunctionName, NamedTool
from pi_runtime.server.api.served import Served

Status = Literal["in_progress", "completed", "incomplete"]
UNUSED = "Accepted, as answers have it; not used."


class InputText(Body):
    """Text. Images and files are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    annotations: Annotated[list[Any], TOKENS] | None = Field(default=None, description=UNUSED)
    logprobs: Annotated[list[Any], TOKENS] | None = Field(default=None, description=UNUSED)


class InputRefusal(Body):
    """A refusal, which is text."""

    type: Literal["refusal"]
    refusal: str


InputPart = Annotated[InputText | InputRefusal, Field(discriminator="type")]


class InputMessage(Body):
    """A message: of the user, of whoever instructs, or an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputPart], Field(min_length=1), MANY]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(default=None, description="Accepted; not used.")


class InputCall(Body):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="A JSON object as text.")
    id: str | None = None
    status: Status | None = None


class InputCallOutput(Body):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], Field(min_length=1), MANY]
    id: str | None = None
    name: str | None = None
    status: Status | None = None


class ReasoningText(Body):
    """Some thoughts."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Body):
    """Earlier thoughts; the template uses or drops them."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ReasoningText], MANY] | None = None
    content: Annotated[list[ReasoningText], MANY] | None = None
    encrypted_content: Annotated[None, Unsupported("thoughts are text here")] = None
    status: Status | None = None


def _type_of(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _type_of,
        custom_error_type="union_tag_unknown",
        custom_error_message="input should be a message, function_call, function_call_output or reasoning",
    ),
]


class OfFunctions(Body):
    """An object whose `type` is `function`, the only kind of tool that there is."""

    type: Literal["function"]


class FunctionTool(Function, OfFunctions):
    """A function that the model may call."""


class FunctionChoice(FunctionName, OfFunctions):
    """A function by its name."""

    def as_chats_have_it(self) -> NamedTool:
        """The same choice as chats have it."""
        return NamedTool(type="function", function=self)


class AllowedChoice(Body):
    """Those of the tools that may, or must, be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1), MANY]


def template_messages(
    instructions: str | None, items: str | Sequence[InputItem], served: Served
) -> list[dict[str, Any]]:
    """The messages of a conversation as chat templates know them.

    The thoughts, text and calls of one turn are items of their own here, and one message there.
    """
    found: list[dict[str, Any]] = []
    if instructions is not None:
        found.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    thoughts: str | None = None
    for n, item in enumerate(items):
        match item:
            case InputReasoning():
                thoughts = "\n".join(part.text for part in item.content or item.summary or []) or None
                continue
            case InputCallOutput():
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case InputMessage(role="assistant"):
                found.append({"role": "assistant", "content": _text(item.content)})
            case InputMessage():
                is_known = item.role != "developer" or "developer" in served.template
                found.append({"role": item.role if is_known else "system", "content": _text(item.content)})
            case InputCall():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                call = {"name": item.name, "arguments": arguments_of(function, f"input[{n}]")}
                if found[-1:] == [] or found[-1]["role"] != "assistant" or thoughts is not None:
                    found.append({"role": "assistant", "content": ""})
                calls = found[-1].setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": call})
        if thoughts is not None and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = thoughts
        thoughts = None
    if not found:
        raise invalid("input", "at least one message is required")
    return found


def _text(content: str | Sequence[InputText | InputRefusal]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in content)
