"""Tools for models whose chat templates know none: messages tell of them, in the words that Hermes and Qwen have.

Calls of earlier turns and their results become text too. What the model then writes is the format `GENERIC`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pi_runtime.errors import PromptError

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
Message = Mapping[str, Any]


def told(messages: Sequence[Message], tools: Sequence[Message], *, has_system: bool) -> list[dict[str, Any]]:
    """The messages with the tools in the first one, the system's where the template has such messages.

    Raises PromptError for what are no messages.
    """
    preface = PREFACE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    try:
        found = [*_as_text(messages)]
    except (AttributeError, KeyError, TypeError):
        raise PromptError(
            "the messages of the chat", expected='{"role": …, "content": …}, with calls as OpenAI has them'
        ) from None
    role = "system" if has_system else "user"
    if found and found[0]["role"] == role:
        first = found.pop(0)["content"]
        preface = f"{first}\n\n{preface}" if has_system else f"{preface}\n\n{first}"
    return [{"role": role, "content": preface}, *found]


def _as_text(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The messages with calls and results as text; results that follow one another are one message of the user."""
    results: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{content}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        written = [json.dumps({k: call[k] for k in ("name", "arguments")}, ensure_ascii=False) for call in calls]
        text = "\n".join([content] * bool(content) + [f"<tool_call>\n{one}\n</tool_call>" for one in written])
        yield {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}
    if results:
        yield {"role": "user", "content": "\n".join(results)}
