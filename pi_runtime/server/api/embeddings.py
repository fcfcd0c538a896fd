"""`/v1/embeddings` and Ollama's `/api/embed`: texts as vectors, where the server was started for that."""

import base64
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import Embedded
from pi_runtime.server.api.answer import GatheredAnswer, SseWriter
from pi_runtime.server.api.body import Body, Known, ModelName, accepted, invalid
from pi_runtime.server.api.completions import Ids, Mixed, Several, TextObject, prompts_of
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError

MOST_TEXTS = 2048
"""Texts of a request: OpenAI's bound."""


class OllamaEmbedRequest(Body):
    """Texts, whose vectors are wanted."""

    known: ClassVar[Known] = accepted("keep_alive", "options", "user")
    model: ModelName = None
    input: str | Ids | Mixed | TextObject | Several = Field(
        description="A text, token ids, both in one list, or a list of these."
    )
    truncate: bool | None = Field(default=None, description="Nothing is cut: a text that is too long is a 400.")
    dimensions: int | None = Field(default=None, description="Vectors are not cut: only the model's own width.")


class EmbeddingsRequest(OllamaEmbedRequest):
    """Texts, whose vectors are wanted in OpenAI's form."""

    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="`base64`: the bytes of float32 numbers, little end first."
    )


class Embedding(TypedDict):
    """A text's vector, of length 1."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens of all texts of a request."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The vectors of a request's texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class OllamaEmbeddings(TypedDict):
    """The vectors of a request's texts, in Ollama's form."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


def embeddings_request(body: EmbeddingsRequest, served: Served) -> Prompt:
    """Make the engine's prompt of texts to embed. Raises ApiError as `embed_request` does."""
    return embed_request(body, served)


def embed_request(body: OllamaEmbedRequest, served: Served) -> Prompt:
    """Make the engine's prompt of texts to embed. Raises ApiError 501 where the server was not started for that."""
    served.check_name(body.model)
    if served.settings.embeddings is None:
        said = f"{served.name!r} is served as a model that writes text; its inner states were not trained to compare "
        said += "texts. Serve a model made for embeddings, and start the server with --embeddings mean, or last"
        raise ApiError(501, said, code="unsupported_endpoint")
    width = served.model.manifest.decoder.d_model
    if body.dimensions not in (None, width):
        raise invalid("dimensions", f"only {width}, the model's own: vectors are not cut")
    texts = prompts_of(body.input, "input")
    if len(texts) > MOST_TEXTS:
        raise invalid("input", f"at most {MOST_TEXTS} texts; found {len(texts)}")
    ids = [served.tokens(text, place, beside=0) for place, text in texts.items()]
    return Prompt(texts=ids, goal="texts", pooling=served.settings.embeddings)


class EmbeddingsWriter(SseWriter):
    """Writes the vectors of a request. They come all at once: nothing is streamed."""

    answer_type: Any = Embeddings
    chunk_type = None

    def __init__(self, body: OllamaEmbedRequest, prompt: Prompt, served: Served) -> None:
        self._body, self._served, self._tokens = body, served, sum(map(len, prompt.texts))

    def response(self, answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """All vectors, in the order of the texts."""
        in_base64 = isinstance(self._body, EmbeddingsRequest) and self._body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": n, "embedding": _encoded(vector) if in_base64 else vector}
            for n, vector in enumerate(_vectors(answers))
        ]
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        return {"object": "list", "data": data, "model": self._served.name, "usage": usage}


class OllamaEmbeddingsWriter(EmbeddingsWriter):
    """Writes the vectors of a request in Ollama's form."""

    answer_type = OllamaEmbeddings

    def response(self, answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """All vectors, in the order of the texts."""
        return {"model": self._served.name, "embeddings": _vectors(answers), "prompt_eval_count": self._tokens}


def _vectors(answers: Sequence[GatheredAnswer]) -> list[list[float]]:
    return [event.vector for answer in answers for event in answer.events if isinstance(event, Embedded)]


def _encoded(vector: list[float]) -> str:
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
