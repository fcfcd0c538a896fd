"""The log: what a line says, what it never says, and how often."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from support.serving import Served, serving, wait_until

from pi_runtime.server.errors import ApiError
from pi_runtime.server.metrics import FULL_EVERY_S, Metrics, RequestLog, plain, request_id

Serve = Callable[..., Served]
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
FULL = ApiError(429, "busy", code="queue_full")


def scope(**fields: Any) -> dict[str, Any]:
    return {"client": ("192.0.2.1", 5), "request_id": "abc", "method": "POST", **fields}


@pytest.mark.parametrize("given", ["a", "A-1_b.c", "x" * 64])
def test_a_client_may_choose_an_id(given: str) -> None:
    assert request_id(Headers({"x-request-id": given})) == given


@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "a\n", "é", "<a>", "a;b"])
def test_an_id_that_is_not_short_and_plain_is_replaced(given: str) -> None:
    first, second = (request_id(Headers({"x-request-id": given})) for _ in range(2))
    assert re.fullmatch(r"req_[0-9a-f]{24}", first)
    assert first != second
    assert re.fullmatch(r"req_[0-9a-f]{24}", request_id(Headers({})))


def test_names_are_short_and_cannot_end_a_line() -> None:
    assert plain("a\r\nb c\x00é") == "a??b?c??"
    assert plain("x" * 80) == "x" * 80
    assert plain("x" * 10**6) == "x" * 80 + "..."


def test_a_line_says_who_what_and_what_was_wrong() -> None:
    lines: list[str] = []
    metrics = Metrics()
    log = RequestLog(lines.append, metrics, every_request=True)
    log.paths |= {1: "/v1/models", 2: "/v1/completions"}
    log.count(scope(endpoint=1), 200, 0.01)
    wrong = ApiError(400, "private", param="messages[0].a b", code="unknown_parameter")
    log.count(scope(endpoint=2, error=wrong, client=None), 400, 0.0)
    assert re.fullmatch(TIME + r" 192\.0\.2\.1 abc POST /v1/models 200 0\.010 s", lines[0])
    expected = r" - abc POST /v1/completions 400 code=unknown_parameter param=messages\[0\]\.a\?b 0\.000 s"
    assert re.fullmatch(TIME + expected, lines[1])
    assert metrics.requests == {("/v1/models", 200): 1, ("/v1/completions", 400): 1}


def test_lines_as_json_have_the_same_fields(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, log_requests=True, log_format="json")
    served.get("/health", headers={"X-Request-Id": "mine"})
    served.complete("a", max_tokens=1, n=-5, **{"odd\n": 1})
    wait_until(lambda: len(served.lines) == 2)
    served.service.on_event("something")
    wait_until(lambda: len(served.lines) == 3)
    lines = [json.loads(line) for line in served.lines]
    assert all(re.fullmatch(TIME, line.pop("time")) for line in lines)
    assert all(line.pop("client") == "127.0.0.1" and line.pop("seconds") >= 0 for line in lines[:2])
    wrong = {"status": 400, "code": "invalid_value", "param": "n"}
    assert lines[0] == {"id": "mine", "method": "GET", "route": "/health", "status": 200}
    assert lines[1] == {"id": lines[1]["id"], "method": "POST", "route": "/v1/completions"} | wrong
    assert lines[2] == {"event": "something"}


def test_a_full_queue_is_said_now_and_then() -> None:
    lines: list[str] = []
    now = [5.0]
    log = RequestLog(lines.append, Metrics(), every_request=False, clock=lambda: now[0])
    for _ in range(100):
        log.count(scope(error=FULL), 429, 0.0)
    now[0] += FULL_EVERY_S
    for _ in range(100):
        log.count(scope(error=FULL), 429, 0.0)
    log.count(scope(error=ApiError(429, "", code="too_many_requests")), 429, 0.0)
    assert [line.split(" ", 1)[1] for line in lines] == [
        "the queue is full: a request was refused",
        "the queue is full: a request was refused, and 99 more since this was last said",
    ]


def test_each_answer_has_the_id_of_its_line(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, api_keys=("secret",), log_requests=True)
    key = {"Authorization": "Bearer secret"}
    body = {"model": served.name, "prompt": "a", "max_tokens": 1}
    responses = [
        served.get("/health", headers={"X-Request-Id": "mine"}),
        served.get("/v1/models"),
        served.post("/v1/completions", body, headers=key),
        served.post("/v1/completions", body | {"n": -5}, headers=key),
        served.post("/v1/completions", body | {"stream": True}, headers=key),
        served.get("/none", headers=key | {"Host": "evil.example"}),
    ]
    wait_until(lambda: len(served.lines) == 6)
    ids = [response.headers["x-request-id"] for response in responses]
    assert ids[0] == "mine"
    assert len(set(ids)) == 6
    assert [line.split()[2] for line in served.lines] == ids
    assert {line.split()[1] for line in served.lines} == {"127.0.0.1"}
    said = [" ".join(line.split()[3:-2]) for line in served.lines]
    assert said == [
        "GET /health 200",
        "GET other 401 code=invalid_api_key",
        "POST /v1/completions 200",
        "POST /v1/completions 400 code=invalid_value param=n",
        "POST /v1/completions 200",
        "GET other 403 code=wrong_host",
    ]
    assert "secret" not in "".join(served.lines)


def test_the_server_says_that_it_stops_and_which_streams_that_ended(endless: Path) -> None:
    with serving(endless, log_requests=True) as served, served.streaming("a", max_tokens=10**5) as response:
        chunks = response.iter_bytes()
        assert next(chunks)
        assert served.server._loop is not None
        served.server._loop.call_soon_threadsafe(served.server.drain)
        for _ in chunks:
            pass
    said = [re.sub(r" req_\w+| [\d.]+ s$", "", line.split(" ", 1)[1]) for line in served.lines]
    assert said == [
        "stopping within 0.2 s; open requests: 1",
        "127.0.0.1 POST /v1/completions 200 code=draining",
        "the server has stopped",
    ]


def test_unknown_fields_are_named_in_answer_and_log(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, log_requests=True)
    odd = {"odd": "secret", "bad\r\nname: é,": 1, "x" * 200: 1}
    responses = [
        served.complete("a", max_tokens=1, **odd),
        served.complete("a", max_tokens=1, stream=True, **odd),
        served.post("/tokenize", {"content": "a", **odd}),
        served.post("/detokenize", {"tokens": [1], **odd}),
        served.post("/api/show", {"model": "alphabet", **odd}),
        served.complete("a", max_tokens=1),
    ]
    wait_until(lambda: len(served.lines) == 6)
    expected = f"odd,bad??name????,{'x' * 80}..."
    assert {response.status_code for response in responses} == {200}
    assert [response.headers.get("x-unknown-fields") for response in responses] == [expected] * 5 + [None]
    assert [f" unknown={expected} " in line for line in served.lines] == [True] * 5 + [False]
    assert "secret" not in "".join(served.lines)


@pytest.mark.parametrize("policy", ["refuse", "ignore"])
def test_unknown_fields_are_refused_or_not_named(alphabet: Path, serve: Serve, policy: str) -> None:
    served = serve(alphabet, unknown_fields=policy)
    response = served.complete("a", max_tokens=1, odd=1)
    assert response.status_code == {"refuse": 400, "ignore": 200}[policy]
    assert "x-unknown-fields" not in response.headers
    described = served.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    assert described["additionalProperties"] is (policy == "ignore")
    assert described["properties"]["model"]["anyOf"][0]["enum"] == ["alphabet"]


def test_nobody_chooses_an_address(serve: Serve, alphabet: Path) -> None:
    served = serve(alphabet, log_requests=True)
    served.get("/v1/models", headers={"X-Forwarded-For": "192.0.2.9 forged", "X-Forwarded-Proto": "https"})
    wait_until(lambda: any("/v1/models" in line for line in served.lines))
    line = next(line for line in served.lines if "/v1/models" in line)
    assert line.split()[1] == "127.0.0.1"
