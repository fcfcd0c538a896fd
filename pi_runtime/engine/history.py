"""A conversation as clients show it, in one form, and then in the form that a template can show.

What a client shows of the past is no error of its: it may come from another server, or have been cut off.
"""

import hashlib
import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from pi_runtime.errors import PromptError
from pi_runtime.text.chat_template import REASONING, check_message
from pi_runtime.text.template_abilities import Abilities, CallForm, as_parts

Message = dict[str, Any]
INSTRUCTS = ("system", "developer")
PREFACE = """\
You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Tells of tools where a chat template knows none, in the words that Hermes and Qwen have."""
MOST_LEVELS = 100
"""Deepest nesting of arguments that come as text; those beyond stay text."""
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(frozen=True, kw_only=True)
class Way:
    """How parts that a template does not take together are given to it."""

    calls_as_text: bool = False
    """Calls are part of their message's text, and results are the user's."""
    text_in_thoughts: bool = False
    """Text beside thoughts and calls ends the thoughts."""
    results_as_text: bool = False
    """Results that follow no call are the user's."""
    user_instructs: bool = False
    """Who instructs is the user."""
    apart: frozenset[int] = frozenset()
    """Messages whose text is one message, and whose calls are another."""


def one_form(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with text as content, thoughts by one name, and calls with ids and objects as arguments.

    Keys that are None are dropped, half a surrogate pair becomes U+FFFD. Results stand in the order of their calls.
    Raises PromptError for what are no messages.
    """
    found: list[Message] = []
    for n, given in enumerate(messages):
        check_message(n, given)
        message = {key: unicode(value) for key, value in given.items() if value is not None}
        thoughts = next((message[key] for key in REASONING if message.get(key)), None)
        message = {key: value for key, value in message.items() if key not in REASONING}
        if thoughts is not None:
            message["reasoning_content"] = thoughts
        message["content"] = _text(message.get("content"))
        if message.get("tool_call_id"):
            message["tool_call_id"] = str(message["tool_call_id"])
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [_call(n, call) for call in calls]
        found.append(message)
    return _in_order(_with_ids(found))


def unicode(value: Any) -> Any:
    """A JSON value whose texts are Unicode."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {unicode(key): unicode(item) for key, item in value.items()}
    return [unicode(item) for item in value] if isinstance(value, list | tuple) else value


def arguments_of(given: Any) -> dict[str, Any]:
    """The arguments of a call as an object; what is none, such as JSON that was cut off, stands within one.

    >>> arguments_of('{"a": 1}'), arguments_of(None), arguments_of('{"a": ')
    ({'a': 1}, {}, {'arguments': '{"a": '})
    """
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError):
            found = given
    if found is None:
        return {}
    if _is_deep(found):
        found = given
    return found if isinstance(found, dict) else {"arguments": found}


def _is_deep(value: Any) -> bool:
    """Whether a JSON value is nested deeper than what follows it level by level can go."""
    level = [value]
    for _ in range(MOST_LEVELS):
        held = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [*chain.from_iterable(held)]
        if not level:
            return False
    return True


def arranged(messages: Sequence[Message], abilities: Abilities, way: Way) -> list[Message]:
    """The messages as a template takes them."""
    found = [
        {**message, "role": "system"} if message["role"] == "developer" and not abilities.developer else message
        for message in messages
    ]
    if way.calls_as_text or abilities.calls is None:
        found = with_calls_as_text(found)
    else:
        found = _with_native_calls(found, abilities.calls, way)
    found = _with_instructions(found, abilities, way)
    if not abilities.repeats:
        found = _alternating(found)
    for n, message in enumerate(found):
        if message["role"] == "assistant" and "tool_calls" not in message and not message["content"]:
            found[n] = {**message, "content": abilities.nothing}
    return [as_parts(message, abilities.typed) for message in found]


def _text(content: Any) -> str:
    """The text of a message's content; parts stand on lines of their own."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _call(n: int, given: Any) -> dict[str, Any]:
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        expected = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        raise PromptError(f"message {n} of the chat: tool_calls", expected=expected, found=repr(given)[:80])
    kept = {key: value for key, value in function.items() if key not in ("arguments", "id", "type")}
    found = {"type": "function", "function": {**kept, "arguments": arguments_of(function.get("arguments"))}}
    return {**({"id": str(given["id"])} if given.get("id") else {}), **found}


def _with_ids(messages: list[Message]) -> list[Message]:
    """Calls and results that have no id get one: a result that of the first call, by its name or none, without one."""
    count, waiting = 0, dict[str, None]()
    named = defaultdict[str | None, deque[str]](deque)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call.setdefault("id", f"call_{count}")
            count += 1
            waiting[call["id"]] = None
            named[call["function"]["name"]].append(call["id"])
            named[None].append(call["id"])
        if message["role"] != "tool":
            continue
        if not message.get("tool_call_id"):
            name = message.get("name")
            first = named[name if name in named else None]
            while first and first[0] not in waiting:
                first.popleft()
            if first:
                message["tool_call_id"] = first[0]
        waiting.pop(message.get("tool_call_id", ""), None)
    return messages


def _in_order(messages: list[Message]) -> list[Message]:
    """Results that follow one another, in the order of the calls before them."""
    found, order = list[Message](), dict[str, int]()
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            found += sorted(group, key=lambda result: order.get(result.get("tool_call_id", ""), len(order)))
        else:
            found += group
            order = {call["id"]: n for n, call in enumerate(found[-1].get("tool_calls", ()))}
    return found


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with the tools in the first one, which instructs."""
    preface = PREFACE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if not messages or messages[0]["role"] not in INSTRUCTS:
        return [{"role": "system", "content": preface}, *messages]
    return [{**messages[0], "content": _joined([messages[0]["content"], preface])}, *messages[1:]]


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls and results as text; results that follow one another are one message of the user."""
    found = list[Message]()
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            found.append({"role": "user", "content": "\n".join(results)})
            continue
        for message in group:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            written = [json.dumps({k: call[k] for k in ("name", "arguments")}, ensure_ascii=False) for call in calls]
            text = [message["content"]] * bool(message["content"])
            content = "\n".join([*text, *(f"<tool_call>\n{one}\n</tool_call>" for one in written)])
            found.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content})
    return found


def _with_native_calls(messages: Sequence[Message], form: CallForm, way: Way) -> list[Message]:
    """The messages with calls and results in the template's form."""
    found, names, follows = list[Message](), dict[str, str](), False
    for n, message in enumerate(messages):
        calls = message.get("tool_calls")
        follows = bool(calls) or (follows and message["role"] == "tool")
        if message["role"] == "tool":
            is_text = way.results_as_text and not follows
            found += with_calls_as_text([message]) if is_text else [_result(message, form, names)]
        elif not calls:
            found.append(message)
        else:
            names |= {call["id"]: call["function"]["name"] for call in calls}
            text, rest = message["content"], {k: v for k, v in message.items() if k != "content"}
            if text and n in way.apart:
                found.append({"role": message["role"], "content": text})
                text = ""
            elif text and way.text_in_thoughts and "reasoning_content" in rest:
                rest["reasoning_content"] = f"{rest['reasoning_content']}\n\n{text}"
                text = ""
            rest["tool_calls"] = [_given_call(call, form) for call in calls]
            found.append({**rest, "content": text} if text else {**rest, **form.content})
    return found if form.allows_several else _one_at_a_time(found, form)


def _given_call(call: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    function = call["function"]
    if form.arguments_are_text:
        function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "id": _given_id(call["id"], form), "function": function}


def _given_id(call_id: str, form: CallForm) -> str:
    """The id of a call in the form that a template takes: the same for the call and its result."""
    if not form.short_ids or SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _result(message: Message, form: CallForm, names: Mapping[str, str]) -> Message:
    """A result in the template's form; one without a call has the name of none."""
    call_id = message.get("tool_call_id", "")
    found = {**message, "tool_call_id": _given_id(call_id, form)} if call_id or form.short_ids else message
    return {"name": names.get(call_id, "unknown"), **found} if form.names_results else found


def _one_at_a_time(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """Each call in a message of its own, with its results behind it; results of no call come last."""
    found, at = list[Message](), 0
    while at < len(messages):
        message, calls = messages[at], messages[at].get("tool_calls", ())
        at += 1
        if len(calls) < 2:
            found.append(message)
            continue
        results: dict[str, list[Message]] = {call["id"]: [] for call in calls}
        while at < len(messages) and messages[at]["role"] == "tool":
            results.setdefault(messages[at].get("tool_call_id", ""), []).append(messages[at])
            at += 1
        for n, call in enumerate(calls):
            rest = {"role": message["role"], **form.content} if n else message
            found += [{**rest, "tool_calls": [call]}, *results.pop(call["id"], ())]
        found += chain.from_iterable(results.values())
    return found


def _with_instructions(messages: Sequence[Message], abilities: Abilities, way: Way) -> list[Message]:
    """The messages with those of the system where the template shows them: else the user says it."""
    leading = next((n for n, message in enumerate(messages) if message["role"] not in INSTRUCTS), len(messages))
    first, rest = list(messages[:leading]), list(messages[leading:])
    if not abilities.system_later:
        rest = [{**m, "role": "user"} if m["role"] in INSTRUCTS else m for m in rest]
        if leading > 1:
            first = [{**first[0], "content": _joined(m["content"] for m in first)}]
    if first and (way.user_instructs or not (abilities.system if rest else abilities.system_alone)):
        said = _joined(m["content"] for m in first)
        if rest and rest[0]["role"] == "user":
            return [{**rest[0], "content": _joined([said, rest[0]["content"]])}, *rest[1:]]
        return [{"role": "user", "content": said}, *rest]
    return [*first, *rest]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """The messages in turns of the user and the assistant, who begins not: neighbours become one, else an empty one
    stands between. Messages with calls, and results, are no turns."""
    found, last, is_open = list[Message](), "assistant", False
    for message in messages:
        role = message["role"]
        if role not in ("user", "assistant") or "tool_calls" in message:
            found.append(message)
            is_open = False
            continue
        if role != last:
            found.append(message)
        elif is_open:
            found[-1] = _merged(found[-1], message)
        else:
            found += [{"role": "user" if role == "assistant" else "assistant", "content": ""}, message]
        last, is_open = role, True
    return found


def _merged(one: Message, other: Message) -> Message:
    found = {**one, **other, "content": _joined([one["content"], other["content"]])}
    thoughts = [m["reasoning_content"] for m in (one, other) if "reasoning_content" in m]
    return {**found, "reasoning_content": _joined(thoughts)} if thoughts else found


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)
