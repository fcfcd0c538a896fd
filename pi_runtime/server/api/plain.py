"""Answers that take no engine: tokens of texts, texts of tokens, prompts of chats, the model, and what is refused."""

from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.errors import PromptError
from pi_runtime.server.api.body import TOKENS, Body, Known, accepted, invalid
from pi_runtime.server.api.conversation import ConversationFields
from pi_runtime.server.api.prompt import chat_text
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError, refused


class TokenizeRequest(Body):
    """A text, whose tokens are wanted."""

    content: str
    add_special: bool | None = Field(default=None, description="Begin with the tokens that begin every prompt.")
    with_pieces: bool | None = Field(default=None, description="Say what each token stands for.")


class TokenPiece(TypedDict):
    """A token and what it stands for: text, or bytes where it is part of a character."""

    id: int
    piece: str | list[int]


class Tokens(TypedDict):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece]


class DetokenizeRequest(Body):
    """Tokens, whose text is wanted."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], TOKENS]


class Content(TypedDict):
    """The text of tokens; special tokens have none."""

    content: str


class TemplateRequest(ConversationFields):
    """A chat, whose prompt is wanted."""

    model: str | None = Field(default=None, description="The name that `/v1/models` gives, if any.")


class TemplatePrompt(TypedDict):
    """The prompt that the model's template makes of a chat."""

    prompt: str


class EmbeddingsRequest(Body):
    """A text whose embedding is wanted, whatever else is asked of it."""

    known: ClassVar[Known] = accepted("model", "input", "encoding_format", "dimensions", "user")


class ModelObject(TypedDict):
    """The model that is served."""

    id: str
    object: str
    created: int
    owned_by: str
    context_length: int
    system_fingerprint: str


class ModelList(TypedDict):
    """All models: one."""

    object: str
    data: list[ModelObject]


def tokenize(body: TokenizeRequest, served: Served) -> Tokens:
    """The answer to `/tokenize`: the tokens of a text."""
    tokenizer = served.model.tokenizer
    ids = served.encode(body.content, "content", prefix=bool(body.add_special), beside=0)
    if not body.with_pieces:
        return {"tokens": ids}
    served.check_length(len(ids), "content", beside=0)  # pieces take a hundred times what the text does
    pieces: list[TokenPiece] = [{"id": token, "piece": _piece(tokenizer.token_bytes(token))} for token in ids]
    return {"tokens": pieces}


def detokenize(body: DetokenizeRequest, served: Served) -> Content:
    """The answer to `/detokenize`: the text of tokens."""
    tokens = body.tokens
    served.check_length(len(tokens), "tokens", beside=-1)  # the last token of an answer takes no place
    try:
        return {"content": served.model.tokenizer.decode(tokens)}
    except PromptError as error:
        raise invalid("tokens", refused(error).message) from None


def apply_template(body: TemplateRequest, served: Served) -> TemplatePrompt:
    """The answer to `/apply-template`: the prompt that the template makes of a chat."""
    if body.model is not None:
        served.check_name(body.model)
    return {"prompt": chat_text(body, served)}


def list_models(served: Served) -> ModelList:
    """The answer to `/v1/models`: the list of models."""
    return {"object": "list", "data": [model_object(served)]}


def retrieve_model(name: str, served: Served) -> ModelObject:
    """The answer to `/v1/models/{name}`. Raises ApiError 404 for another name."""
    served.check_name(name)
    return model_object(served)


def model_object(served: Served) -> ModelObject:
    """The model as `/v1/models` lists it."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "pi-serve",
        "context_length": served.model.context,
        "system_fingerprint": served.fingerprint,
    }


def embeddings(_: EmbeddingsRequest, served: Served) -> dict[str, Any]:
    """Refuse a request to `/v1/embeddings`."""
    raise ApiError(
        400,
        f"embeddings are not supported: {served.name!r} is a model that writes text; its inner states were not trained "
        "to compare texts. Use a model made for embeddings",
        code="unsupported_endpoint",
    )


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
