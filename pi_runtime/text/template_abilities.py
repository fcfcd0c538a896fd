"""What a chat template can show, found by rendering small conversations of unusual words with it.

A word of the template's source says little: Gemma 2's has `system` in the error that it raises for such a message.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

Message = Mapping[str, Any]
Attempt = Callable[..., str | None]
"""Renders messages, with `tools`, `add_generation_prompt` and further `variables`; None where the template fails."""
SYSTEM, FIRST, SAID, SECOND, KEY, VALUE, RESULT, THOUGHT, EXTRA = (f"qz{n}zq" for n in range(9))
ASKS, ANSWERS, ASKS_AGAIN, INSTRUCTS, INSTRUCTS_LATER = (
    {"role": role, "content": text}
    for role, text in zip(
        ("user", "assistant", "user", "system", "system"), (FIRST, SAID, SECOND, SYSTEM, EXTRA), strict=True
    )
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""How much a model may be asked to think, rising."""
CALL_ID, FOREIGN_ID = "a1B2c3D4e", "call_0a1b2c3d4e5f6a7b"
NAME = "qz_look"
LOOKUP = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Looks it up.",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "A word."}},
            "required": [KEY],
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a message with calls, and their results, are given to a template."""

    content: Mapping[str, str | None]
    """The content of a message that has calls and no text, by its key: absent, empty or null."""
    arguments_are_text: bool
    names_results: bool
    """Whether results have the name of the function."""
    short_ids: bool = True
    """Whether ids have nine letters and digits."""
    allows_several: bool = False
    """Whether a message may have several calls."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What reaches the prompt, and in which form."""

    is_whole: bool = False
    """Whether each message of a plain conversation does. A template that shows a part of it means to."""
    typed: frozenset[str] = frozenset()
    """Roles whose content must be a list of parts, {"type": "text", "text": …}."""
    system: bool = True
    """Whether a system message before the user's does."""
    system_alone: bool = True
    """Whether it does without a user's."""
    system_later: bool = True
    """Whether a second system message does, in the middle of a conversation."""
    developer: bool = False
    """Whether a message of the role `developer` does, and not as one of any role."""
    repeats: bool = True
    """Whether a role may come twice in a row, and a conversation begin with the assistant."""
    nothing: str = ""
    """What an assistant says that says nothing: a blank where the template fails without."""
    tools: bool = False
    """Whether the name of a function and those of its parameters do."""
    empty_tools: bool = False
    """Whether a chat without tools must have an empty list of them."""
    calls: CallForm | None = None
    """None where calls and results do not reach the prompt."""
    written: str = ""
    """What the template writes for a call, as if the model had: empty where it shows none."""
    preface: str = ""
    """What the template writes because there are tools."""
    switch: bool = False
    """Whether `enable_thinking` changes anything."""
    efforts: Mapping[str, str] = field(default_factory=dict)
    """What `reasoning_effort` must be for each of `EFFORTS`; empty where it changes nothing."""


UNKNOWN = Abilities()
"""Of a template that renders nothing, or takes too long: messages are given as they are."""


def abilities_of(attempt: Attempt) -> Abilities:
    """Probe a template."""
    probe = _Probe(attempt)
    forms: Iterator[tuple[set[str], Sequence[Any] | None]] = product((set(), {"user"}), (None, []))
    for probe.typed, probe.no_tools in forms:
        if probe.shows([ASKS]):
            break
    else:
        return UNKNOWN
    is_whole = probe.shows_typed("assistant", [ASKS, ANSWERS, ASKS_AGAIN])
    has_system = probe.shows_typed("system", [INSTRUCTS, ASKS])
    tools = probe.shows([ASKS], NAME, KEY, tools=[LOOKUP])
    calls = probe.call_form(tools)
    return Abilities(
        is_whole=is_whole,
        typed=frozenset(probe.typed),
        system=has_system,
        system_alone=has_system and probe.shows([INSTRUCTS]),
        system_later=has_system
        and probe.shows([INSTRUCTS, ASKS, ANSWERS, INSTRUCTS_LATER, ASKS_AGAIN])
        and probe.shows([INSTRUCTS, INSTRUCTS_LATER, ASKS]),
        developer=probe.knows_developer(),
        repeats=probe.shows([ASKS, ASKS_AGAIN, ANSWERS, {**ANSWERS, "content": EXTRA}, {**ASKS, "content": THOUGHT}])
        and probe.shows([ANSWERS, ASKS]),
        nothing="" if probe.shows([ASKS, {**ANSWERS, "content": ""}, ASKS_AGAIN]) else " ",
        tools=tools,
        empty_tools=probe.no_tools is not None,
        calls=calls,
        written=probe.written(calls, tools) if calls else "",
        preface=probe.preface() if tools else "",
        switch=probe.switches(),
        efforts=probe.efforts(),
    )


def as_parts(message: Message, typed: frozenset[str] | set[str]) -> dict[str, Any]:
    """A message with its content in parts, where its role wants that."""
    content = message.get("content")
    if message["role"] not in typed or not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}


class _Probe:
    """Renders probes, with content in the form that was found up to then."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.typed: set[str] = set()
        self.no_tools: Sequence[Any] | None = None

    def render(self, messages: Sequence[Message], **given: Any) -> str | None:
        shown = [as_parts(message, self.typed) for message in messages]
        return self._attempt(shown, **{"tools": self.no_tools, "variables": {}, **given})

    def shows(self, messages: Sequence[Message], *words: str, **given: Any) -> bool:
        """Whether the texts of all messages reach the prompt, and further words."""
        text = self.render(messages, **given)
        return text is not None and all(word in text for word in (*words, *(m.get("content") or "" for m in messages)))

    def shows_typed(self, role: str, messages: Sequence[Message]) -> bool:
        """The same, with the role's content in parts where it must be."""
        if self.shows(messages):
            return True
        self.typed.add(role)
        if self.shows(messages):
            return True
        self.typed.discard(role)
        return False

    def knows_developer(self) -> bool:
        """Whether a developer's message is shown as that, which no unknown role's is."""
        known, unknown = "developer", "d" + EXTRA  # of one first letter, which is all that some templates write
        texts = [self.render([{"role": role, "content": SYSTEM}, ASKS]) for role in (known, unknown)]
        return texts[0] is not None and SYSTEM in texts[0] and texts[0] != (texts[1] or "").replace(unknown, known)

    def switches(self) -> bool:
        """Whether `enable_thinking` makes a difference."""
        on, off = (self.render([ASKS], variables={"enable_thinking": thinks}) for thinks in (True, False))
        return on != off

    def efforts(self) -> dict[str, str]:
        """What `reasoning_effort` must be: the nearest that does not fail, of the usual three where each is written."""
        without, unknown, *shown = (
            self.render([ASKS], variables=variables)
            for variables in ({}, *({"reasoning_effort": effort} for effort in (EXTRA, *EFFORTS)))
        )
        texts = dict(zip(EFFORTS, shown, strict=True))
        if all(text == without for text in texts.values()):
            return {}
        is_written = unknown is not None and EXTRA in unknown
        same = {
            effort for effort, text in texts.items() if is_written and text == (unknown or "").replace(EXTRA, effort)
        }
        able = [n for n, effort in enumerate(EFFORTS) if texts[effort] is not None]
        able = [n for n in able if EFFORTS[n] not in same or EFFORTS[n] in ("low", "medium", "high")] or able
        return {effort: EFFORTS[min(able, key=lambda m: abs(m - n))] for n, effort in enumerate(EFFORTS) if able}

    def call_form(self, tools: bool) -> CallForm | None:
        """The first form in which calls and results reach the prompt; arguments as JSON at best."""
        given = {"tools": [LOOKUP]} if tools else {}
        contents: list[dict[str, str | None]] = [{}, {"content": ""}, {"content": None}]
        for typed in ((), ("tool",)):
            self.typed |= {*typed}
            for names, content, is_text in product((False, True), contents, (False, True)):
                form = CallForm(content=content, arguments_are_text=is_text, names_results=names)
                text = self.render(_called(form), **given) or ""
                # Not in Python's way to write an object, nor as text within text.
                is_json = f"'{KEY}': '{VALUE}'" not in text and f'\\"{VALUE}' not in text
                if is_json and all(word in text for word in (FIRST, KEY, VALUE, RESULT, SAID, SECOND)):
                    return self._further(form, given)
            self.typed -= {*typed}
        return None

    def _further(self, form: CallForm, given: Mapping[str, Any]) -> CallForm:
        """What else the form allows: ids of other servers, several calls in one message."""
        short = not self.shows(_called(form, call_id=FOREIGN_ID), KEY, VALUE, **given)
        several = self.shows(_called(form, more=(EXTRA, THOUGHT)), VALUE, EXTRA, **given)
        return replace(form, short_ids=short, allows_several=several)

    def written(self, form: CallForm, tools: bool) -> str:
        """What stands where an answer does, if it is a call, without the end of the turn."""
        given: dict[str, Any] = {"tools": [LOOKUP]} if tools else {}
        text = self.render(_called(form)[:2], add_generation_prompt=False, **given)
        said = self.render([ASKS, ANSWERS], add_generation_prompt=False, **given)
        if text is None or said is None or VALUE not in text or SAID not in said:
            return ""
        return text[_parting(text, said) :].removesuffix(said.rpartition(SAID)[2])

    def preface(self) -> str:
        """The text that comes with tools."""
        without, text = self.render([ASKS]), self.render([ASKS], tools=[LOOKUP])
        return "" if without is None or text is None else text[_parting(text, without) :]


def _parting(text: str, other: str) -> int:
    """Where a text parts from another one: before the marker, where that is within one."""
    found = next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    begin = text.rfind("<", 0, found)
    return begin if begin >= 0 and ">" not in text[begin:found] else found


def _called(form: CallForm, *, call_id: str = CALL_ID, more: tuple[str, str] | None = None) -> list[Message]:
    """A conversation with a call and its result, or two of both: `more` are the second argument and result."""
    pairs = [(call_id, VALUE, RESULT), *([] if more is None else [(f"{call_id[:-1]}9", *more)])]
    calls, results = [], []
    for found, value, result in pairs:
        arguments = {KEY: value}
        function = {"name": NAME, "arguments": json.dumps(arguments) if form.arguments_are_text else arguments}
        calls.append({"id": found, "type": "function", "function": function})
        named = {"name": NAME} if form.names_results else {}
        results.append({"role": "tool", "tool_call_id": found, "content": result, **named})
    turn = {"role": "assistant", **form.content, "tool_calls": calls}
    return [ASKS, turn, *results, ANSWERS, ASKS_AGAIN]
