"""Prompts of conversations by a model's chat template, so that nothing of them is lost on the way.

Where a conversation is more than turns of the user and the assistant, another one of its shape, with a word for each
text, is rendered first. A word that does not reach the prompt says which part the template drops; the conversation is
then arranged in another way. Thoughts are the template's own affair: most drop those of earlier turns on purpose.

Where the answer goes on from an assistant's text, that message is rendered with a text that nobody has in its place.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from pi_runtime.engine.history import INSTRUCTS, Message, Way, arranged, with_tools_as_text
from pi_runtime.engine.tools.formats import ReasoningFormat
from pi_runtime.errors import PromptError, Setting, TemplateError, UsageError
from pi_runtime.text.chat_template import ChatTemplate

T = TypeVar("T")
Tool = Mapping[str, Any]
Part = tuple[int | None, str]
"""A part of a conversation: the message, if it is one's, and what it is of it."""
TEXT = "content"
RENDERINGS = 3
"""All renderings of one conversation may take as long together as so many may."""


class PromptWriter:
    """Writes the prompts of conversations with certain tools and variables."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        tools: Sequence[Tool] = (),
        tools_as_text: bool,
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> None:
        """`tools_as_text`: messages tell of the tools: the template does not, or its form of calls is not known."""
        self._template, self._tools, self._tools_as_text = template, tools, tools_as_text
        self._variables = {name: value for name, value in variables.items() if value is not None}
        self._add_generation_prompt = add_generation_prompt
        self._until = time.monotonic() + RENDERINGS * template.limits.seconds

    def write(self, given: Sequence[Message]) -> str:
        """The prompt of messages in one form (see `history`). Raises PromptError for what the template cannot show.

        Raises what `ChatTemplate.render` raises too.
        """
        failed: TemplateError | PromptError | None = None
        for tools in _forms(self._tools):
            try:
                way = self._way(given, tools)
            except PromptError as error:  # a limit that the template exceeds it exceeds with other tools too
                failed = failed or error
                continue
            try:
                return self._rendered(self._template.render, given, tools, way)
            except TemplateError as error:
                failed = failed or error
        assert failed is not None
        raise failed

    def _rendered(self, render: Callable[..., T], messages: Sequence[Message], tools: Sequence[Tool], way: Way) -> T:
        """What a method of the template makes of messages that are arranged in a way, and of tools."""
        abilities = self._template.abilities
        if tools and self._tools_as_text:
            messages, tools = with_tools_as_text(messages, tools), ()
        return render(
            arranged(messages, abilities, way),
            tools=tools or ([] if abilities.empty_tools else None),
            variables=self._variables,
            add_generation_prompt=self._add_generation_prompt,
            seconds=self._until - time.monotonic(),
        )

    def _way(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Way:
        """The first way in which all parts reach the prompt. Raises PromptError where there is none."""
        abilities = self._template.abilities
        way = Way(calls_as_text=bool(tools) and self._tools_as_text)
        if not abilities.is_whole or (not tools and _is_plain(messages)):
            return way
        parts, shapes = _words(messages)
        best: list[Part] | None = None
        for _ in range(6):
            text = self._rendered(self._template.attempt, shapes, tools, way)
            missing = None if text is None else [*_missing(text, parts, tools)]
            if missing == []:
                return way
            if missing is not None and (best is None or len(missing) < len(best)):
                best = missing
            further = _next(way, messages, missing)
            if further is None:
                break
            way = further
        if best is None:
            return Way(calls_as_text=way.calls_as_text)  # the template's own error says more
        n, what = best[0]
        place = what if n is None else f"message {n} of the chat: {what}"
        raise PromptError(f"{place} is not shown by the model's chat template", remedy="leave it out")


def _next(way: Way, messages: Sequence[Message], missing: Sequence[Part] | None) -> Way | None:
    """What is tried after a way that the template failed at, or by which parts are missing."""
    if all(m["role"] in INSTRUCTS for m in messages):
        return None if way.user_instructs else replace(way, user_instructs=True)
    if way.calls_as_text or not any("tool_calls" in m or m["role"] == "tool" for m in messages):
        return None
    if missing is None and not way.results_as_text and _has_result_alone(messages):
        return replace(way, results_as_text=True)
    beside = frozenset(n for n, m in enumerate(messages) if "tool_calls" in m and m["content"])
    if missing is None and beside and not way.text_in_thoughts:
        return replace(way, text_in_thoughts=True)
    lost = beside if missing is None else beside & {n for n, what in missing if what == TEXT}
    if lost - way.apart:
        return replace(way, apart=way.apart | lost)
    return Way(calls_as_text=True)


def _has_result_alone(messages: Sequence[Message]) -> bool:
    """Whether a result follows no call, nor another result."""
    return any(
        m["role"] == "tool" and "tool_calls" not in before and before["role"] != "tool"
        for before, m in pairwise([{"role": ""}, *messages])
    )


def _words(messages: Sequence[Message]) -> tuple[list[tuple[str, Part]], list[Message]]:
    """The messages with a word for each of their texts, and the words of those parts that must reach the prompt."""
    parts, found = list[tuple[str, Part]](), list[Message]()

    def word(n: int, what: str) -> str:
        parts.append((f"qz{len(parts)}zq", (n, what)))
        return parts[-1][0]

    for n, message in enumerate(messages):
        shape = {**message, "content": word(n, TEXT) if message["content"].strip() else ""}
        if "reasoning_content" in message:
            shape["reasoning_content"] = "qzzq"
        if "tool_calls" in message:
            what = (f"tool_calls[{c}]" for c in range(len(message["tool_calls"])))
            shape["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {"qz": word(n, next(what))}}}
                for call in message["tool_calls"]
            ]
        found.append(shape)
    return parts, found


def _missing(text: str, parts: Sequence[tuple[str, Part]], tools: Sequence[Tool]) -> Iterator[Part]:
    at = 0
    for word, part in parts:
        # Most stand in their order, so that a long conversation is not searched from its beginning each time.
        found = text.find(word, at)
        if found < 0 and (found := text.find(word)) < 0:
            yield part
        at = max(at, found)
    for tool in tools:
        name = tool["function"]["name"]
        if name not in text and json.dumps(name, ensure_ascii=False)[1:-1] not in text:
            yield None, f"the tool {name}"


def _is_plain(messages: Sequence[Message]) -> bool:
    """Whether the user and the assistant take turns, after one who instructs or nobody."""
    roles = [message["role"] for message in messages]
    rest = roles[1:] if roles and roles[0] in INSTRUCTS else roles
    is_plain = rest[::2] == ["user"] * len(rest[::2]) and rest[1::2] == ["assistant"] * len(rest[1::2])
    return is_plain and len(rest) % 2 == 1 and not any("tool_calls" in message for message in messages)


def _forms(tools: Sequence[Tool]) -> Iterator[Sequence[Tool]]:
    """The tools as they are, then with what may be left out, then with schemas as plain as templates count on."""
    yield [*tools]
    if tools:
        empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
        filled = [{**tool, "function": {**empty, **tool["function"]}} for tool in tools]
        yield filled
        yield [
            {**tool, "function": {**tool["function"], "parameters": _plain(tool["function"]["parameters"], "object")}}
            for tool in filled
        ]


def _plain(schema: Any, kind: str = "string") -> dict[str, Any]:
    """A schema with one type in each place, and properties of each object."""
    found = dict(schema) if isinstance(schema, Mapping) else {}
    kinds = found.get("type")
    if isinstance(kinds, list):
        kinds = next((one for one in kinds if one != "null"), None)
    found["type"] = kinds if isinstance(kinds, str) else "object" if "properties" in found else kind
    if found["type"] == "object":
        properties = found.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        found["properties"] = {name: _plain(item) for name, item in properties.items()}
    if found["type"] == "array":
        found["items"] = _plain(found.get("items"))
    return found


CONTINUE = Setting("continue_final_message")


def without_last_text(messages: Sequence[Message], place: str) -> tuple[list[Message], str]:
    """Messages in one form (see `history`), with `place` for the text of the last one, and that text.

    Raises UsageError where the last one is no assistant's.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        found = repr(last.get("role"))[:80]
        raise UsageError("the last message must be an assistant's", setting=CONTINUE, found=found)
    return [*messages[:-1], {**last, "content": place}], last["content"]


def prompt_before(place: str, rendered: str, text: str, reasoning: ReasoningFormat | None) -> str:
    """The rendered prompt before the text that `place` stands for. Raises UsageError where it stands nowhere.

    What the template does with a text (many trim it, some leave its thoughts out) does not matter then. Where it begins
    thoughts for the message, and the text has thoughts of its own, the template's empty ones are left out.
    """
    begin, found, _ = rendered.rpartition(place)
    if not found:
        raise UsageError("the model's chat template does not show the last message's text", setting=CONTINUE)
    begin = begin.replace(place, text)  # a template may show it before, too
    if reasoning is None or reasoning.answer:
        return begin
    empty = re.search(rf"{re.escape(reasoning.begin)}(\s*){re.escape(reasoning.end)}\s*\Z", begin[-1000:])
    if empty is None:
        return begin
    kept = len(begin) - len(empty[0])
    if text.lstrip().startswith(reasoning.begin):
        return begin[:kept]
    if reasoning.end in text:  # its thoughts have begun where the template begins them
        return begin[: kept + len(reasoning.begin) + len(empty[1]) // 2]
    return begin
