"""What every form of a request becomes: texts that the engine continues, and how their answers are made and read.

Those of chats are what the model's template makes of messages and tools, with a grammar for what the answer may be.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pi_runtime.engine.tools.output import PLAIN, OutputFormat
from pi_runtime.errors import InputError, MissingExtraError, UsageError, spelled
from pi_runtime.sequence.embedding import Pooling
from pi_runtime.sequence.settings import AnswerSettings
from pi_runtime.server.api.body import invalid
from pi_runtime.server.api.conversation import (
    AssistantMessage,
    ConversationFields,
    GrammarFields,
    Message,
    RefusalPart,
    ToolCall,
)
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import described, refused
from pi_runtime.text.chat_template import dates
from pi_runtime.text.grammar import Grammar
from pi_runtime.text.grammar_check import LIMITS, check_grammar

Goal = Literal["answers", "reading", "texts"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the engine is asked for, read and checked, whatever form of API it came in."""

    texts: Sequence[Sequence[int]]
    """What is continued: token ids, taken as they are."""
    count: int = 1
    """Answers to each text."""
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    streams: bool = False
    """Whether events are written as they come."""
    goal: Goal = "answers"
    """`reading`: the texts are computed, so that later answers to them come sooner. `texts`: they are only given back,
    with their log-probabilities where these are wanted."""
    logprobs: int | None = None
    """How many likeliest tokens come with the log-probabilities of the texts; None where these are not wanted."""
    pooling: Pooling | None = None
    """How a vector is made of each text that is given back; None where none is wanted."""
    rendered: str = ""
    """What a template made, by which thoughts may have begun already."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools whose calls are found in the answers."""
    output: OutputFormat = PLAIN
    """How the model writes calls and thoughts."""
    shows_progress: bool = False
    """Whether events say how much of the first text has been read."""
    prediction: str = ""
    """Text that is likely to come."""
    cache_salt: str | None = None
    """Given by the request, where only those with the same are to share what is kept of its texts."""

    @property
    def answers(self) -> int:
        """Answers that the engine writes."""
        return len(self.texts) * self.count * (self.goal == "answers")


TOOLS_S = LIMITS.seconds + 1.0
"""Time in which the schemas of all tools are tried alone: enough to remember one that is refused."""


def chat_prompt(
    served: Served,
    text: str,
    *,
    field: str = "messages",
    tools: Sequence[Mapping[str, Any]] = (),
    choice: str | Mapping[str, Any] = "auto",
    parallel: bool = True,
    schema: Mapping[str, Any] | bool | None = None,
    schema_field: str = "response_format",
) -> Prompt:
    """The prompt whose text a template made; settings of its answers are those that the text asks for.

    `field` and `schema_field` are the request's names of the messages and of `schema`, which is the JSON that an answer
    without calls must be. `choice` is `auto`, `none`, `required`, or the function that must be called. Raises ApiError
    for what does not fit the context, or cannot be followed.
    """
    ids = served.tokens(text, field)
    output = served.model.output
    make = partial(output.grammar, text, tools=tools, choice=choice, parallel=parallel, schema=schema)
    grammar = _grammar(served, make, "tools" if schema is None else schema_field, schema_field)
    settings = AnswerSettings(grammar=grammar, shown_tokens=output.shown_tokens(tools))
    return Prompt(texts=[ids], rendered=text, tools=tools, output=output, settings=settings)


def _grammar(served: Served, make: Callable[..., Grammar | None], field: str, schema_field: str) -> Grammar | None:
    """The grammar of answers, which is compiled now, and kept: the engine's error would not name the field.

    `make` makes it. Where it cannot be compiled, the schema of each tool is tried alone, and `make` told of the result.
    """
    grammar = _made(make, schema_field)
    if grammar is None or _compiles(grammar, field, served):
        return grammar
    until = time.monotonic() + TOOLS_S
    is_good = lambda alone: _compiles(Grammar.json_schema(alone), field, served, until - time.monotonic())  # noqa: E731
    grammar = _made(partial(make, is_good=is_good), schema_field)
    if grammar is not None and not _compiles(grammar, field, served):
        raise invalid(field, "cannot be used: it is too complex, or no text follows it")
    return grammar


def asked_grammar(body: GrammarFields, served: Served, but: str | None = None) -> Grammar | None:
    """The grammar that a request gives in any form `but` one. Raises ApiError for several, and for one that is none."""
    given = {name: value for name in GrammarFields.model_fields if (value := getattr(body, name)) not in (None, "")}
    if len(given) > 1:
        raise invalid([*given][1], f"give one of {' and '.join(given)}")
    given.pop(but or "", None)
    if not given:
        return None
    ((name, source),) = given.items()
    try:
        grammar = Grammar.gbnf(source) if name == "grammar" else Grammar.of(**{name: source})
    except UsageError as error:
        raise invalid(name, described(error, error.reason)) from None
    if grammar is not None and not _compiles(grammar, name, served):
        raise invalid(name, "cannot be used: it is wrong, too complex, or no text follows it")
    return grammar


def _made(make: Callable[..., Grammar | None], schema_field: str) -> Grammar | None:
    try:
        return make()
    except UsageError as error:
        name = error.setting.name if error.setting else "tools"
        raise invalid(schema_field if name == "schema" else name, spelled(error.reason)) from None


def _compiles(grammar: Grammar, field: str, served: Served, seconds: float = math.inf) -> bool:
    """Whether a grammar can be compiled, and that is found out within so many seconds."""
    try:
        served.model.tokenizer.grammars.start(grammar, nbytes=check_grammar(grammar, seconds=seconds))
    except MissingExtraError as error:
        raise invalid(field, f"{spelled(error.what)}: {spelled(error.remedy)}", code="unsupported_value") from None
    except UsageError:
        return False
    except InputError as error:
        raise invalid(field, spelled(error.what)) from None
    return True


def rendered(
    served: Served,
    messages: Sequence[Mapping[str, Any]],
    *,
    field: str = "messages",
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The text that the model's template makes of messages. `field` is the request's name of them.

    Raises ApiError for what the template refuses.
    """
    if not served.template:
        raise invalid(field, "the model has no chat template; use /v1/completions")
    try:
        return served.model.chat_prompt(
            messages,
            tools=tools,
            variables={**dates(), **variables},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except UsageError as error:
        if error.setting is not None:
            raise invalid(error.setting.name, described(error, error.reason)) from None
        # a name of these arguments among the variables
        raise invalid("chat_template_kwargs", refused(error).message) from None
    except InputError as error:
        raise invalid(field, refused(error).message) from None


def chat_text(body: ConversationFields, served: Served) -> str:
    """The text that the model's template makes of a chat. Raises ApiError for what is wrong with it."""
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid("continue_final_message", "not with add_generation_prompt: the turn has begun already")
    tools, _ = body.allowed_tools
    messages = [template_message(message) for message in body.messages]
    effort = reasoning_variables(body.reasoning_effort, served)
    return rendered(
        served,
        messages,
        tools=tools,
        variables={**effort, **(body.chat_template_kwargs or {})},
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


def reasoning_variables(effort: str | None, served: Served) -> dict[str, Any]:
    """The names by which a template knows how much the model is to think: none where it knows none."""
    found: dict[str, Any] = {}
    if effort is None:
        return found
    if served.abilities.switch:
        found["enable_thinking"] = effort != "none"
    if effort in served.abilities.efforts:
        found["reasoning_effort"] = served.abilities.efforts[effort]
    return found


def template_message(message: Message) -> dict[str, Any]:
    """A message as `ChatModel.chat_prompt` takes it: content is text."""
    content = text_of(message.content)
    if not isinstance(message, AssistantMessage):
        return {**message.model_dump(exclude_none=True, exclude={"content"}), "content": content}
    found = message.model_dump(
        include={"role", "name", "reasoning_content", "reasoning", "thinking"}, exclude_none=True
    )
    found["content"] = content or message.refusal or ""
    if message.tool_calls:
        found["tool_calls"] = [
            call.model_dump()
            if isinstance(call, ToolCall)
            else custom_call(call.id, call.custom.name, call.custom.input)
            for call in message.tool_calls
        ]
    return found


def custom_call(call_id: str | None, name: str, text: str | None) -> dict[str, Any]:
    """A call of a tool that takes text, as one of a function."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"input": text or ""}}}


def text_of(content: str | list[Any] | None) -> str:
    """The text of a message's content; parts stand on lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
