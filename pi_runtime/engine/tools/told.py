"""Tools for models whose chat templates know none: messages tell of them, in the words that Hermes and Qwen have.

Calls of earlier turns and their results become text too. What the model then writes is the format `GENERIC`.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

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


def told(messages: Sequence[Message], tools: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with the tools in the first one, which instructs."""
    preface = PREFACE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    found = [*map(dict, messages)]
    if not found or found[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": preface}, *found]
    first = found[0]["content"]
    return [{**found[0], "content": f"{first}\n\n{preface}" if first else preface}, *found[1:]]


def with_calls_as_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with calls and results as text; results that follow one another are one message of the user."""
    found = list[dict[str, Any]]()
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
