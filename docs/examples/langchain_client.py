"""Ask a server through LangChain: a stream, an answer that is a typed object, and a call of a function.

    python docs/examples/langchain_client.py http://127.0.0.1:8080 [KEY]

The model needs a chat template with tools.
"""

import sys
from typing import Annotated, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

Number = Annotated[int, Field(ge=-999, le=999)]


class River(BaseModel):
    """What the answer is to hold. Bounds keep a small model from going on for ever."""

    name: Annotated[str, Field(max_length=30)]
    continent: Literal["Africa", "America", "Asia", "Australia", "Europe"]


@tool
def multiply(a: Number, b: Number) -> int:
    """Multiply two integers."""
    return a * b


def main(url: str, key: str = "none", model: str = "model") -> None:
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key=SecretStr(key), model=model, max_completion_tokens=200)
    for part in chat.stream("Name a river."):
        print(part.text, end="", flush=True)

    print(chat.with_structured_output(River, method="json_schema").invoke("Name a river."))

    caller = chat.bind_tools([multiply], tool_choice="required", strict=True, parallel_tool_calls=False)
    for call in caller.invoke("What is 17 times 23?").tool_calls:
        print(f"{call['name']}({call['args']}) = {multiply.invoke(call['args'])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
