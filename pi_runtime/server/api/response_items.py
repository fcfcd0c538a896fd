"""What a request of the Responses API holds: items of a conversation, and what chat templates make of them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pi_runtime.server.api.body import MANY, TOKENS, Body, invalid
from pi_runtime.server.api.chat_prompt import custom_call
from pi_runtime.server.api.conversation import (
    CacheBreakpoint,
    Function,
    FunctionName,
    NamedTool,
    OtherTool,
    RefusalPart,
    of_other_type,
)

Status = Literal["in_progress", "completed", "incomplete"]
UNUSED = "Accepted, as answers have it; not used."


class ItemFields(Body):
    """What items of an answer have besides."""

    id: str | None = None
    status: Status | None = None


class InputText(Body):
    """Text. Images and files are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    annotations: Annotated[list[Any], TOKENS] | None = Field(default=None, description=UNUSED)
    logprobs: Annotated[list[Any], TOKENS] | None = Field(default=None, description=UNUSED)


InputPart = Annotated[InputText | RefusalPart, Field(discriminator="type")]


class InputMessage(ItemFields):
    """A message: of the user, of whoever instructs, or an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputPart], MANY] | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(default=None, description="Accepted; not used.")


class InputCall(ItemFields):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[dict[str, Any], MANY] | str | None = Field(
        default=None, description="A JSON object as text; what is none, as a call that was cut off, stands within one."
    )


class InputCustomCall(ItemFields):
    """An earlier call of a tool that takes text: shown as a call with the argument `input`."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str | None = None


class InputShellCall(ItemFields):
    """An earlier call of the tool `local_shell`, whose arguments are its action."""

    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: Annotated[dict[str, Any], MANY] | None = None


class InputCallOutput(ItemFields):
    """What a function, or another tool, gave."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str | None = None
    output: str | Annotated[list[InputText], MANY] | None = None
    name: str | None = None


class ReasoningText(Body):
    """Some thoughts."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(ItemFields):
    """Earlier thoughts; the template uses or drops them."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], MANY] | None = None
    content: Annotated[list[ReasoningText], MANY] | None = None
    encrypted_content: str | None = Field(default=None, description="Accepted; only text is used.")


OTHERS = (
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "computer_call",
    "mcp_list_tools",
    "mcp_call",
)
"""Items of what the API's own tools did, which is no text."""
InputOther = Annotated[
    dict[str, Any], MANY, Field(description=f"Passed over: what the API's own tools did ({', '.join(OTHERS)}).")
]


def _kind_of(item: Any) -> str:
    """The tag of an item."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return next((tag for tag, kinds in KINDS.items() if kind in kinds), str(kind))


KINDS = {
    "output": ("function_call_output", "custom_tool_call_output", "local_shell_call_output"),
    "other": OTHERS,
}
InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputShellCall, Tag("local_shell_call")]
    | Annotated[InputCallOutput, Tag("output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputOther, Tag("other")],
    Discriminator(
        _kind_of,
        custom_error_type="union_tag_unknown",
        custom_error_message="input should be a message, function_call, function_call_output or reasoning",
    ),
]


class OfFunctions(Body):
    """An object whose `type` is `function`, the only kind of tool that is called."""

    type: Literal["function"]


class FunctionTool(Function, OfFunctions):
    """A function that the model may call."""


AnyFunctionTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(of_other_type)
]


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


def template_messages(instructions: str | None, items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages of a conversation as `ChatModel.chat_prompt` takes them.

    The thoughts, text and calls of one turn are items of their own here, and one message there.
    """
    found: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    thoughts: list[str] = []
    for item in items:
        if isinstance(item, dict):
            continue
        if isinstance(item, InputReasoning):
            thoughts += [part.text for part in item.content or item.summary or []]
            continue
        _add(found, item, begins=bool(thoughts))
        if thoughts and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = "\n".join(thoughts)
        thoughts = []
    if not found:
        raise invalid("input", "at least one message is required")
    return found


def _add(
    found: list[dict[str, Any]],
    item: InputMessage | InputCall | InputCustomCall | InputShellCall | InputCallOutput,
    *,
    begins: bool,
) -> None:
    """Add an item to the messages: a call to that of the assistant before it, unless thoughts begin another."""
    match item:
        case InputCallOutput():
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        case InputMessage():
            found.append({"role": item.role, "content": _text(item.content)})
        case _:
            if not found or found[-1]["role"] != "assistant" or begins:
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(_call(item))


def _call(item: InputCall | InputCustomCall | InputShellCall) -> dict[str, Any]:
    """A call as chats have it."""
    match item:
        case InputCustomCall():
            return custom_call(item.call_id, item.name, item.input)
        case InputShellCall():
            function: dict[str, Any] = {"name": "local_shell", "arguments": item.action}
            return {"id": item.call_id or item.id, "type": "function", "function": function}
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _text(content: str | Sequence[InputText | RefusalPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in content)
