"""Errors of a request, as OpenAI's clients read them."""

import re
import traceback
from collections.abc import Mapping
from typing import Any

from pi_runtime import console
from pi_runtime.errors import (
    ArtifactError,
    ClosedError,
    ContextError,
    DeviceError,
    InputError,
    MissingExtraError,
    PiError,
    Setting,
    Text,
    UsageError,
    spelled,
)

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
PATH = re.compile(r"(?<!\w)/[^\s/]+/|\b[A-Za-z]:\\")
"""The beginning of an absolute path."""
NOT_THE_REQUEST = MissingExtraError | ArtifactError | DeviceError
"""Errors of a command's user that a request cannot cause."""
FIELDS = {"prompt_logprobs": "echo"}
"""Fields of a request whose setting of the engine has another name."""

OLLAMA, ANTHROPIC = "/api/", "/v1/messages"
"""Beginnings of paths whose errors have Ollama's and Anthropic's form."""
ANTHROPIC_TYPES = {408: "timeout_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
"""Anthropic's types of errors, where OpenAI has another."""


def field(setting: Setting) -> str:
    """A setting as a request has it: `max_tokens 0`."""
    name = FIELDS.get(setting.name, setting.name)
    return name if setting.value is None else f"{name} {setting.value}"


class ApiError(Exception):
    """An answer that is an error: its status, and what OpenAI's form says of it.

    `param` names the field that is wrong, as in `messages[0].content`.

    >>> ApiError(400, "temperature is 3", param="temperature").body()["error"]["type"]
    'invalid_request_error'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,  # noqa: A002  OpenAI's name
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = _unicode(message), None if param is None else _unicode(param)
        self.type = type or TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})
        self.figures: Mapping[str, int] = {}
        """Further fields of OpenAI's form, by llama-server's names."""

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        known = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**known, **self.figures}}

    def body_at(self, path: str) -> dict[str, Any]:
        """The JSON of the answer to a request of this path."""
        if path.startswith(ANTHROPIC):
            return anthropic_body(self)
        return {"error": self.message} if path.startswith(OLLAMA) else self.body()


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error in Anthropic's form."""
    kind = ANTHROPIC_TYPES.get(error.status, TYPES.get(error.status, "invalid_request_error"))
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _unicode(text: str) -> str:
    """The text; what it quotes of a request may be no Unicode, and could not be sent."""
    return text.encode(errors="backslashreplace").decode()


def described(error: PiError, what: Text) -> str:
    """`what`, and what was expected and found. The remedy is left out: it speaks to whoever runs the server."""
    fields = (("expected", error.expected), ("found", error.found))
    parts = [f"{name}: {spelled(text, field)}" for name, text in fields if text is not None]
    return "; ".join([spelled(what, field), *parts])


def unavailable(said: str, code: str) -> ApiError:
    """The error of a server that takes no requests now."""
    return ApiError(503, said, type="unavailable_error", code=code, headers={"Retry-After": "5"})


def refused(error: Exception) -> ApiError:
    """The answer to a request that cannot be run: 400 where the request is at fault, 503 where the engine has ended,
    else 500."""
    if isinstance(error, ClosedError):
        why = "" if error.__cause__ is None else f": {told(error.__cause__)}"
        return unavailable(f"{spelled(error.what)}{why}", "failed")
    if not isinstance(error, UsageError | InputError) or isinstance(error, NOT_THE_REQUEST):
        return failed(error)
    return ApiError(
        400,
        described(error, error.what),
        param=None if error.setting is None else field(Setting(error.setting.name)),
        code="context_length_exceeded" if isinstance(error, ContextError) else None,
    )


def failed(error: BaseException) -> ApiError:
    """The answer to a request that broke while it ran. Of a fault of this program it says no more than its type.

    Where the fault is stands on stderr. Its message is left out there too: it may quote a request. An error of this
    machine's files names them on stderr alone.
    """
    if isinstance(error, ApiError):
        return error
    said = told(error)
    if not isinstance(error, PiError):
        frames = traceback.extract_tb(error.__traceback__)
        where = f" in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        console.say_now(f"error: {said}{where}")
    elif (message := error.message(field)) != said:
        console.say_now(f"error: {message}")
    return ApiError(500, said)


def told(error: BaseException) -> str:
    """What a client is told of a fault: no more than its type, unless it is an error of ours that names no file."""
    if isinstance(error, PiError) and PATH.search(message := error.message(field)) is None:
        return message
    return f"internal error: {type(error).__name__}"
