"""Errors of a request, as OpenAI's clients read them."""

from collections.abc import Mapping
from typing import Any

from pi_runtime.errors import InputError, PiError, UsageError

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
FIELDS = {"number": "n", "answers": "n", "grammar": "response_format", "prompt_logprobs": "echo"}
"""Fields of a request whose setting of the engine has another name."""


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
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type = type or TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def refused(error: Exception) -> ApiError:
    """The answer to a request that cannot be run: 400 where the request is at fault, else 500.

    Errors of the engine begin with the flag of the setting that is wrong, from which the field follows.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError | InputError):
        param = _field(error.what)
        # A flag is a word of the command line, and a remedy there is none here.
        what = error.what.replace(f"--{param.replace('_', '-')}", param, 1) if param else error.what
        fields = (("expected", error.expected), ("found", error.found))
        message = "; ".join([what, *(f"{name}: {value}" for name, value in fields if value is not None)])
        code = "context_length_exceeded" if "the context of" in str(error.expected) else None
        return ApiError(400, message, param=FIELDS.get(param or "", param), code=code)
    return failed(error)


def failed(error: BaseException) -> ApiError:
    """The answer to a request that broke while it ran. What is no error of ours is not shown to a client."""
    message = str(error) if isinstance(error, PiError) else f"internal error: {type(error).__name__}"
    return error if isinstance(error, ApiError) else ApiError(500, message)


def _field(what: str) -> str | None:
    """The field that a message names by its flag, if it does."""
    if what.startswith("--"):
        return what[2:].split(maxsplit=1)[0].rstrip(":").replace("-", "_")
    return "n" if what.startswith("number ") else None
