"""Ask a server through the openai package: a stream with its figures, and an answer that is a typed object.

    python docs/examples/openai_client.py http://127.0.0.1:8080 [KEY]

The model needs a chat template.
"""

import sys
from typing import Annotated, Any, Literal

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field


class River(BaseModel):
    """What the answer is to hold. Bounds keep a small model from going on for ever."""

    name: Annotated[str, Field(max_length=30)]
    continent: Literal["Africa", "America", "Asia", "Australia", "Europe"]
    length_km: Annotated[int, Field(ge=1, le=10000)]


def main(url: str, key: str = "none") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    model = client.models.list().data[0].id

    question: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name a river."}]
    stream = client.chat.completions.create(
        model=model,
        messages=question,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 40},  # what OpenAI's interface does not know
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            timings: dict[str, Any] = (chunk.usage.model_extra or {})["timings"]
            print(f"\n{chunk.usage.completion_tokens} tokens, {timings['rows_read_share']:.0%} of rows read")

    typed = client.chat.completions.parse(model=model, messages=question, response_format=River, max_tokens=500)
    print(typed.choices[0].message.parsed)


if __name__ == "__main__":
    main(*sys.argv[1:])
