"""Addresses that clients try: what `/` is to each, the aliases, and what a 404 says."""

from pathlib import Path

import httpx
import pytest
from support.serving import PATIENCE_S, Served

from pi_runtime.server.routes import ALIASES, ROUTES, beside

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [(BROWSER, True), ("Text/HTML", True), ("application/xhtml+xml", True)]
    + [(accept, False) for accept in ("*/*", "", "application/json", "application/json, text/plain, */*", "image/png")],
)
def test_the_root_is_a_page_for_browsers_alone(talker: Served, accept: str, is_page: bool) -> None:
    got = talker.get("/", headers={"accept": accept})
    head = httpx.head(talker.url + "/", headers={"accept": accept}, timeout=PATIENCE_S)
    assert got.status_code == head.status_code == 200
    assert got.headers["content-type"] == head.headers["content-type"]
    assert got.headers["content-type"].startswith("text/html" if is_page else "text/plain")
    assert got.headers["vary"] == "accept"
    assert (got.text == "Ollama is running") is not is_page
    assert head.content == b""


def test_a_client_that_says_nothing_of_types_learns_that_ollama_runs(talker: Served) -> None:
    with httpx.Client(timeout=PATIENCE_S) as client:
        client.headers.pop("accept")
        assert client.get(talker.url + "/").text == "Ollama is running"


def test_aliases(talker: Served) -> None:
    assert talker.get("/v1/health").json() == talker.get("/health").json() == {"status": "ok"}
    asked = {"model": talker.name, "prompt": "a", "max_tokens": 3}
    text = talker.post("/completions", asked).json()["choices"][0]["text"]
    assert text == talker.post("/v1/completions", asked).json()["choices"][0]["text"] == "bab"
    asked = {"model": talker.name, "messages": []}
    refused = [talker.post(path, asked).json()["error"] for path in ("/chat/completions", "/v1/chat/completions")]
    assert refused[0] == refused[1]


def test_an_alias_needs_a_key_where_its_path_does() -> None:
    keys = {(route.method, route.path): (route.needs_key, route.body, route.answer) for route in ROUTES}
    for path, own in ALIASES.items():
        found = [(method, keys[method, path]) for method, one in keys if one == path]
        assert found
        assert all(keys[method, own] == needs for method, needs in found)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/messages", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/infill", "/infill"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/models", "/v1/models"),
        ("/api/v1/completions", "/v1/completions"),
        ("/v1/api/chat", "/api/chat"),
        ("/tags", "/api/tags"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/props", "/props"),
        ("/nowhere", None),
        ("/v1", None),
        ("/" + "a/" * 10_000, None),
    ],
)
def test_what_is_not_there_names_what_is_meant(talker: Served, path: str, meant: str | None) -> None:
    assert beside(path) == meant
    if len(path) < 100:
        answer = talker.get(path)
        assert answer.status_code == 404
        error = answer.json()["error"]
        said = error if isinstance(error, str) else error["message"]
        assert said == "there is no such path" + (f"; there is {meant}" if meant else "")


def test_paths_are_unique() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


def test_a_key_is_not_asked_for_at_open_addresses(alphabet: Path, serve: object) -> None:
    served = serve(alphabet, api_keys=("secret",))  # type: ignore[operator]
    assert served.get("/").text == "Ollama is running"
    assert served.get("/v1/health").status_code == 200
    assert served.post("/completions", {}).status_code == 401
