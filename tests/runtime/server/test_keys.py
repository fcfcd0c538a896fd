"""What each key has of its own: what is kept of its prompts, and its sessions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.serving import PATIENCE_S, Served, wait_until

Serve = Callable[..., Served]
TEXT = "abcdefgh" * 5
MESSAGES = [{"role": "user", "content": TEXT}]
WAYS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
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


def in_a_session(served: Served, key: str, **fields: Any) -> int:
    """The same of a prompt that a session begins with."""
    before = served.engine.stats.cached_tokens
    path = (
        f"/v1/sessions/{ask(served, key, 'POST', '/v1/sessions', {'prompt': [*TEXT.encode()], **fields}).json()['id']}"
    )
    assert ask(served, key, "POST", f"{path}/answer", {"max_tokens": 1}).status_code == 200
    ask(served, key, "DELETE", path)
    return served.engine.stats.cached_tokens - before


@pytest.mark.parametrize("path", WAYS)
def test_a_key_shares_what_is_kept_of_prompts_with_itself_alone(alphabet: Path, serve: Serve, path: str) -> None:
    served = serve(alphabet, api_keys=("one", "two"))
    assert cached(served, "one", path) == 0
    assert cached(served, "two", path) == 0
    assert cached(served, "two", path) == KEPT


def test_sessions_share_it_likewise(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, api_keys=("one", "two"))
    assert cached(served, "one", "/v1/completions") == 0
    assert in_a_session(served, "two") == 0
    assert in_a_session(served, "one") == KEPT
    assert cached(served, "two", "/v1/completions") == KEPT


def test_keys_share_it_if_they_are_to(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, api_keys=("one", "two"), share_prefixes=True)
    assert cached(served, "one", "/v1/completions") == 0
    assert cached(served, "two", "/v1/completions") == in_a_session(served, "two") == KEPT


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_request_may_share_it_with_fewer(alphabet: Path, serve: Serve, path: str) -> None:
    """Without keys everybody is one client; a salt is the request's own."""
    served = serve(alphabet)
    assert cached(served, "", path) == 0
    assert cached(served, "", path, cache_salt="a") == 0
    assert in_a_session(served, "", cache_salt="b") == 0
    assert cached(served, "", path, cache_salt="a") == cached(served, "", path, cache_salt="b") == KEPT


def test_the_session_of_another_key_is_not_there(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, api_keys=("one", "two"))
    made = ask(served, "one", "POST", "/v1/sessions", {"prompt": "secret"}).json()
    path = f"/v1/sessions/{made['id']}"
    calls = [("GET", "", None), ("DELETE", "", None), ("POST", "/type", {"text": "x"}), ("POST", "/answer", {})]

    def check_none() -> None:
        assert ask(served, "two", "GET", "/v1/sessions").json()["data"] == []
        for method, more, body in calls:
            answers = [ask(served, "two", method, one + more, body) for one in (path, "/v1/sessions/session_0")]
            told = [answer.text.replace(one.rpartition("/")[2], "") for answer, one in zip(answers, paths, strict=True)]
            assert {answer.status_code for answer in answers} == {404}
            assert told[0] == told[1], "it tells that there is, or was, a session"

    paths = (path, "/v1/sessions/session_0")
    check_none()
    assert ask(served, "one", "GET", path).json() == made
    assert ask(served, "one", "POST", f"{path}/answer", {"max_tokens": 1}).status_code == 200
    assert ask(served, "one", "DELETE", path).status_code == 200
    assert "was deleted" in ask(served, "one", "GET", path).text
    check_none()


def test_the_list_of_sessions_shows_no_text(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet)
    made = served.post("/v1/sessions", {"prompt": "secret"}).json()
    (listed,) = served.get("/v1/sessions").json()["data"]
    assert listed == {name: value for name, value in made.items() if name != "draft"}


def test_one_key_of_several_cannot_take_all_places_of_sessions(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, api_keys=("one", "two"), sessions=3)
    codes = [ask(served, key, "POST", "/v1/sessions", {}).status_code for key in ("one", "one", "one", "two", "two")]
    assert codes == [200, 200, 429, 200, 429]
    wait_until(served.is_idle)
