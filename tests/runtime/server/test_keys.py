"""What each key has of its own: what is kept of its prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.serving import PATIENCE_S, Served

Serve = Callable[..., Served]
TEXT = "abcdefgh" * 5
MESSAGES = [{"role": "user", "content": TEXT}]
WAYS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": TEXT, "stream": False, "options": {"num_predict": 1}},
}
KEPT = len(TEXT) - 1
"""Tokens of a prompt that need not run a second time: the last one's logits are wanted."""


def ask(served: Served, key: str, method: str, path: str, body: Any = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, served.url + path, json=body, headers=headers, timeout=PATIENCE_S)


def cached(served: Served, key: str, path: str, **fields: Any) -> int:
    """How many tokens of the prompt were stored already, by the engine's count."""
    before = served.engine.stats.cached_tokens
    response = ask(served, key, "POST", path, {"model": served.name, **WAYS[path], **fields})
    assert response.status_code == 200, response.text
    return served.engine.stats.cached_tokens - before


@pytest.mark.parametrize("path", WAYS)
def test_a_key_shares_what_is_kept_of_prompts_with_itself_alone(alphabet: Path, serve: Serve, path: str) -> None:
    served = serve(alphabet, api_keys=("one", "two"))
    assert cached(served, "one", path) == 0
    assert cached(served, "two", path) == 0
    assert cached(served, "two", path) == KEPT


def test_keys_share_it_if_they_are_to(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, api_keys=("one", "two"), share_prefixes=True)
    assert cached(served, "one", "/v1/completions") == 0
    assert cached(served, "two", "/v1/completions") == KEPT


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_request_may_share_it_with_fewer(alphabet: Path, serve: Serve, path: str) -> None:
    """Without keys everybody is one client; a salt is the request's own."""
    served = serve(alphabet)
    assert cached(served, "", path) == 0
    assert cached(served, "", path, cache_salt="a") == 0
    assert cached(served, "", path, cache_salt="b") == 0
    assert cached(served, "", path, cache_salt="a") == cached(served, "", path, cache_salt="b") == KEPT
