"""Ask a server through llama-index: a completion, a stream, and a chat.

    python docs/examples/llama_index_client.py http://127.0.0.1:8080 [KEY]

The chat needs a model with a chat template.
"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main(url: str, key: str = "none", model: str = "model") -> None:
    settings = {"model": model, "api_base": f"{url}/v1", "api_key": key, "context_window": 2048, "max_tokens": 60}
    texts = OpenAILike(**settings, is_chat_model=False)
    print(texts.complete("Once upon a time").text)
    for part in texts.stream_complete("Once upon a time"):
        print(part.delta, end="", flush=True)

    chat = OpenAILike(**settings, is_chat_model=True)
    print(chat.chat([ChatMessage(role="user", content="Name a river.")]).message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
