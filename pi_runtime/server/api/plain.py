"""Answers that take no engine: tokens of texts, texts of tokens, prompts of chats, the model, and what is refused."""

from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.errors import PromptError
from pi_runtime.server.api.anthropic import AnthropicConversation
from pi_runtime.server.api.body import TOKENS, Body, Known, ModelName, accepted, invalid
from pi_runtime.server.api.conversation import ConversationFields
from pi_runtime.server.api.prompt import chat_text
from pi_runtime.server.api.responses import ResponseRequest, read_input
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

    model: ModelName = None


class TemplatePrompt(TypedDict):
    """The prompt that the model's template makes of a chat."""

    prompt: str


class InputTokens(TypedDict):
    """How many tokens a prompt has."""

    object: NotRequired[Literal["response.input_tokens"]]
    input_tokens: int


class RerankRequest(Body):
    """Texts that are to be ranked, whatever else is asked of them."""

    known: ClassVar[Known] = accepted("model", "query", "documents", "texts", "top_n", "return_documents", "user")


class ModelFigures(TypedDict):
    """The model in figures, in the words of llama-server."""

    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    n_vocab: int
    size: int


class ModelObject(TypedDict):
    """The model that is served, in the words of OpenAI, Anthropic and vLLM."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    aliases: list[str]
    created: int
    created_at: str
    owned_by: str
    context_length: int
    max_model_len: int
    max_input_tokens: int
    meta: ModelFigures
    system_fingerprint: str


class ModelList(TypedDict):
    """All models: one."""

    object: Literal["list"]
    data: list[ModelObject]
    has_more: bool
    first_id: str
    last_id: str


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
    served.check_name(body.model)
    return {"prompt": chat_text(body, served)}


def count_chat_tokens(body: TemplateRequest, served: Served) -> InputTokens:
    """The answer to `/v1/chat/completions/input_tokens`: how many tokens the prompt of a chat has."""
    return {"input_tokens": served.count(apply_template(body, served)["prompt"], "messages")}


def count_message_tokens(body: AnthropicConversation, served: Served) -> InputTokens:
    """The answer to `/v1/messages/count_tokens`."""
    return {"input_tokens": served.count(body.read(served)[0], "messages")}


def count_response_tokens(body: ResponseRequest, served: Served) -> InputTokens:
    """The answer to `/v1/responses/input_tokens`."""
    return {"object": "response.input_tokens", "input_tokens": served.count(read_input(body, served)[0], "input")}


def list_models(served: Served) -> ModelList:
    """The answer to `/v1/models`: the list of models."""
    only, name = [model_object(served)], served.name
    return {"object": "list", "data": only, "has_more": False, "first_id": name, "last_id": name}


def retrieve_model(name: str, served: Served) -> ModelObject:
    """The answer to `/v1/models/{name}`. Raises ApiError 404 for another name."""
    served.check_name(name)
    return model_object(served)


def model_object(served: Served) -> ModelObject:
    """The model as `/v1/models` lists it."""
    model, decoder = served.model, served.model.manifest.decoder
    return {
        "id": served.name,
        "object": "model",
        "type": "model",
        "display_name": served.name,
        "aliases": [served.name, *served.settings.aliases],
        "created": served.created,
        "created_at": served.created_at,
        "owned_by": "pi-serve",
        "context_length": model.context,
        "max_model_len": model.context,
        "max_input_tokens": model.context,
        "meta": {
            "n_ctx": model.context,
            "n_ctx_train": decoder.context_length,
            "n_embd": decoder.d_model,
            "n_params": model.parameters,
            "n_vocab": decoder.vocab_size,
            "size": model.nbytes,
        },
        "system_fingerprint": served.fingerprint,
    }


def refuse(_: RerankRequest, served: Served) -> dict[str, Any]:
    """Refuse a request to `/v1/rerank`."""
    said = f"texts are not ranked: {served.name!r} is a model that writes text. Use one that was trained for ranking"
    raise ApiError(501, said, code="unsupported_endpoint")


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
