"""Errors of a request, as OpenAI's clients read them."""

import re
import traceback
from collections.abc import Mapping
from typing import Any

from pi_runtime import console
from pi_runtime.errors import ArtifactError, InputError, MissingExtraError, PiError, UsageError

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
FLAG = re.compile("--([a-z-]+)")
FIELDS = {
    "prompt_logprobs": "echo",
    "json_schema": "response_format",
    "regex": "response_format",
    "lark": "response_format",
}
"""Fields of a request whose setting of the engine has another name."""


OLLAMA = "/api/"
"""Paths whose errors have Ollama's form."""


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

    def body_at(self, path: str) -> dict[str, Any]:
        """The JSON of the answer to a request of this path."""
        return {"error": self.message} if path.startswith(OLLAMA) else self.body()


def refused(error: Exception) -> ApiError:
    """The answer to a request that cannot be run: 400 where the request is at fault, else 500.

    Errors of the engine begin with the flag of the setting that is wrong, from which the field follows.
    """
    if not isinstance(error, UsageError | InputError) or isinstance(error, MissingExtraError | ArtifactError):
        return failed(error)
    what, param = error.what, None
    if flag := FLAG.match(what):
        name = flag[1].replace("-", "_")
        param = FIELDS.get(name, name)
        what = param + what[flag.end() :]
    # The remedy is left out: it speaks of the command line.
    fields = (("expected", error.expected), ("found", error.found))
    message = "; ".join([what, *(f"{name}: {value}" for name, value in fields if value is not None)])
    code = "context_length_exceeded" if "the context of" in str(error.expected) else None
    return ApiError(400, message, param=param, code=code)


def failed(error: BaseException) -> ApiError:
    """The answer to a request that broke while it ran. Of a fault of this program it tells no more than its type.

    Where the fault is stands on stderr. Its message is left out there too: it may quote a request.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PiError):
        return ApiError(500, str(error))
    name, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    console.say(f"error: internal error: {name}{where}")
    return ApiError(500, f"internal error: {name}")
