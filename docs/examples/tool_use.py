"""Let a model call functions, over plain HTTP: ask, run what it calls, tell it the results, until it answers.

    python docs/examples/tool_use.py http://127.0.0.1:8080 [KEY]

The model needs a chat template.
"""

import json
import operator
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

NUMBER = {"type": "integer", "minimum": -999, "maximum": 999}
FUNCTIONS: dict[str, Callable[[int, int], int]] = {"add": operator.add, "multiply": operator.mul}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The result of: {name} two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": NUMBER, "b": NUMBER},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
    for name in FUNCTIONS
]
MOST_TURNS = 5


def ask(url: str, key: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON with which the server answers."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as response:  # noqa: S310
            return json.load(response)
    except urllib.error.HTTPError as refused:
        raise SystemExit(json.load(refused)["error"]["message"]) from None


def main(url: str, key: str = "none") -> None:
    model = ask(url, key, "/v1/models")["data"][0]["id"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 times 23?"}]
    for turn in range(MOST_TURNS):
        # The first turn has to be a call; then the model may answer.
        choice = "required" if turn == 0 else "auto"
        body = {"model": model, "messages": messages, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
        body["parallel_tool_calls"] = False  # one after the other
        message = ask(url, key, "/v1/chat/completions", body)["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls", ()):
            name, values = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = FUNCTIONS[name](values["a"], values["b"])
            print(f"{name}({values['a']}, {values['b']}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
        if not message.get("tool_calls"):
            print(message["content"])
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
