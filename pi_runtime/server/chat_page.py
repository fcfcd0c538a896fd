"""The chat page as it is sent: one file, which may load nothing and speak to nobody but its own server."""

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

FIXED_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
}


class ChatPage(NamedTuple):
    """The bytes of the chat page, and the headers to send them with."""

    body: bytes
    headers: Mapping[str, str]


@cache
def chat_page() -> ChatPage:
    """Read the chat page, and compute its Content-Security-Policy.

    The policy names the page's own style and script by their hashes: nothing that a model writes can become script, and
    `trusted-types 'none'` makes browsers refuse every assignment of HTML.
    """
    body = files("pi_runtime.server").joinpath("page.html").read_bytes()
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(body, "script"),
        "style-src": _hashes(body, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    text = "; ".join(f"{name} {value}" for name, value in policy.items())
    return ChatPage(body, FIXED_HEADERS | {"content-security-policy": text})


def _hashes(body: bytes, tag: str) -> str:
    """Hashes of what stands in the page's elements of this name, as a policy spells them."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)
