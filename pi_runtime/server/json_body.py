"""The JSON of a body, read within limits."""

import codecs
import json
import math
from typing import Any

from pi_runtime.server.errors import ApiError
from pi_runtime.server.settings import Limits

QUOTE = ord('"')
OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
"""All bytes but quotes and brackets."""


def parsed(body: bytes, limits: Limits) -> Any:
    """Parse the JSON of a body. Raises ApiError where it is no JSON, or too complex to be read quickly."""
    _check_values(body, limits)
    _check_brackets(body, limits)
    try:
        # In UTF-8 alone, where a byte below 128 is that character: what was counted is what is read.
        text = body.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass")
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    """A number. One beyond the range would come back as `Infinity`, which JSON has not. Raises ValueError."""
    if math.isinf(found := float(digits)):
        raise ValueError(f"the number {digits[:40]} is too large")
    return found


def _check_values(body: bytes, limits: Limits) -> None:
    """Refuse a body with too many commas: each value but the first of its list or object comes after one."""
    if (found := body.count(b",")) > limits.commas:
        raise ApiError(400, f"the body has {found} commas; at most {limits.commas}", code="too_complex")


def _check_brackets(body: bytes, limits: Limits) -> None:
    most, found = limits.nesting, body.count(b"[") + body.count(b"{")
    if found <= most:
        return
    if found > limits.brackets:
        raise ApiError(400, f"the body has {found} opening brackets; at most {limits.brackets}", code="too_complex")
    depth, in_string = 0, False
    for byte in _brackets_and_quotes(body):
        if byte == QUOTE:
            in_string = not in_string
        elif not in_string:
            depth += 1 if byte in b"[{" else -1
            if depth > most:
                raise ApiError(400, f"the JSON is nested deeper than {most} levels", code="nested_too_deep")


def _brackets_and_quotes(body: bytes) -> bytes:
    """The brackets, and the quotes that begin and end strings. What is left out says nothing of depth, a pair of
    quotes with nothing between them neither."""
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return without_escapes.translate(None, OTHERS).replace(b'""', b"")
