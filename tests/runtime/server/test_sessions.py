"""Sessions over HTTP: a text in turns is the text that the model gives at once; one turn at a time; none is leaked."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from support.scripted import saying, scripted_artifact
from support.serving import PATIENCE_S, Served, events, serving, slowed, wait_until

from pi_runtime import load
from pi_runtime.server.api.sessions import SessionAnswer, SessionChunk
from pi_runtime.server.settings import Limits


@pytest.fixture(scope="module")
def served(random_path: Path) -> Iterator[Served]:
    """The random model, with selection in two layers."""
    with serving(random_path, sessions=4) as served:
        yield served


@pytest.fixture(scope="module")
def slow(endless: Path) -> Iterator[Served]:
    """Says abab… for a long time."""
    with serving(endless, slots=2, queue=4, changed=slowed(0.002)) as served:
        yield served


@pytest.fixture(autouse=True)
def no_session_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"served", "slow"} & set(request.fixturenames):
        server = request.getfixturevalue(name)
        for found in server.get("/v1/sessions").json()["data"]:
            assert server.delete(f"/v1/sessions/{found['id']}").json()["deleted"]
        wait_until(server.is_idle)
        wait_until(lambda server=server: server.engine.stats.paused_sessions == 0)


def create(served: Served, **body: Any) -> str:
    response = served.post("/v1/sessions", body)
    assert response.status_code == 200, response.text
    return f"/v1/sessions/{response.json()['id']}"


def answer(served: Served, session: str, **body: Any) -> dict[str, Any]:
    response = served.post(f"{session}/answer", body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_typing_changes_nothing(served: Served, random_path: Path) -> None:
    """A draft that was typed and edited is answered as the same prompt in one piece."""
    session = create(served, prompt="Once ", temperature=1.0, seed=3, max_tokens=8)
    for text, at, draft in (
        ("upan", None, "Once upan"),
        ("on a t", 7, "Once upon a t"),
        ("time", 12, "Once upon a time"),
    ):
        body = {"text": text} if at is None else {"text": text, "at": at}
        assert served.post(f"{session}/type", body).json()["draft"] == draft
    found = answer(served, session)
    with load(random_path, device="cpu") as model:
        whole = served.complete("Once upon a time", temperature=1.0, seed=3, max_tokens=8).json()
        assert found["text"] == whole["choices"][0]["text"]
        assert len(found["tokens"]) == 8
        state = served.get(session).json()
        assert (state["state"], state["draft"]) == ("idle", "")
        assert state["tokens"] == len(model.tokenizer.encode("Once upon a time")) + 8


def test_a_pause_on_a_tool_and_its_result(served: Served) -> None:
    """Ending with a stop token, and going on, gives the text of one answer."""
    whole = served.complete([1, 2, 3], max_tokens=30, temperature=0).json()
    session = create(served, prompt=[1, 2, 3], temperature=0)
    first = answer(served, session, max_tokens=30)
    stop = next(t for n, t in enumerate(first["tokens"]) if n > 3)
    session = create(served, prompt=[1, 2, 3], temperature=0, stop_tokens=[stop])
    tokens: list[int] = []
    while len(tokens) < 30:
        part = answer(served, session, max_tokens=30 - len(tokens))
        tokens += part["tokens"]
        is_paused = part["stop_token"] == stop == tokens[-1]
        assert is_paused or len(tokens) == 30
        assert served.get(session).json()["state"] == ("paused" if is_paused else "idle")
    assert first["text"] == whole["choices"][0]["text"]
    assert tokens == first["tokens"]
    assert stop in tokens[:-1]
    result = answer(served, session, append=[7, 8], max_tokens=2)
    assert result["usage"]["prompt_tokens"] == 35
    # All that was there is still there, but for the token that no step has run.
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_an_answer_streams(served: Served) -> None:
    session = create(served, prompt=[5, 6], seed=1, temperature=1.0)
    whole = answer(served, create(served, prompt=[5, 6], seed=1, temperature=1.0), max_tokens=9)
    body = {"stream": True, "max_tokens": 9, "timings_per_token": True}
    with httpx.stream("POST", served.url + f"{session}/answer", json=body, timeout=PATIENCE_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(events(response))
    for chunk in chunks:
        TypeAdapter(SessionChunk).validate_python(chunk, extra="forbid")
    TypeAdapter(SessionAnswer).validate_python(whole, extra="forbid")
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert all("timings" in chunk for chunk in chunks)


def test_a_chat_begins_a_session(tmp_path: Path) -> None:
    files = {"chat_template.jinja": b"{{ messages[-1].content }}"}
    path = scripted_artifact(tmp_path / "a.pi", saying("abcdefgh"), files=files)
    with serving(path) as served:
        session = create(served, chat={"messages": [{"role": "user", "content": "a"}]})
        assert served.get(session).json()["draft"] == "a"
        found = answer(served, session, stop=["f"])
        assert (found["text"], found["finish_reason"], found["stop_token"]) == ("bcde", "stop", None)
        found = answer(served, session, stop_tokens=["h"])
        assert (found["text"], found["stop_token"]) == ("gh", ord("h"))
        assert served.get(session).json()["state"] == "paused"
        # A special token stops where it is asked to, and shows where it is asked to.
        found = answer(served, session, append="g", stop_tokens=["<|end|>"], shown_tokens=["<|end|>"])
        assert (found["text"], found["stop_token"]) == ("h", None)


def test_one_turn_at_a_time(slow: Served) -> None:
    session = create(slow, prompt="a")
    body = {"stream": True}
    with httpx.stream("POST", slow.url + f"{session}/answer", json=body, timeout=PATIENCE_S) as response:
        found, told = events(response), 0
        while told < 4:
            told += len(next(found)["tokens"])
        assert slow.get(session).json()["state"] == "answering"
        for path, more in (("type", {"text": "x"}), ("answer", {"max_tokens": 1})):
            refused = slow.post(f"{session}/{path}", more)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_busy")
    # The client has left: its turn ends, and the session goes on.
    wait_until(lambda: slow.get(session).json()["state"] == "idle")
    tokens = slow.get(session).json()["tokens"]
    assert tokens > 4
    assert answer(slow, session, append="a", max_tokens=3)["tokens"] == [ord(c) for c in "bab"]
    assert slow.get(session).json()["tokens"] == tokens + 4


def test_deleting_ends_the_turn(slow: Served) -> None:
    session = create(slow, prompt="a")
    with httpx.stream("POST", slow.url + f"{session}/answer", json={"stream": True}, timeout=PATIENCE_S) as response:
        found = events(response)
        assert next(found)["text"]
        assert slow.delete(session).status_code == 200
        last = list(found)[-1]
    assert last["error"]["code"] == "session_deleted"
    for call in (slow.get(session), slow.delete(session), slow.post(f"{session}/type", {"text": "x"})):
        assert (call.status_code, call.json()["error"]["message"]) == (404, "the session was deleted")
    wait_until(slow.is_idle)


def test_what_is_typed_at_once_arrives(served: Served) -> None:
    session = create(served)
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(served.post, f"{session}/type", {"text": c}) for c in "abcdef"]
    assert {call.result().status_code for call in calls} == {200}
    assert sorted(served.get(session).json()["draft"]) == list("abcdef")


def test_only_so_many_sessions(served: Served) -> None:
    for _ in range(4):
        create(served)
    refused = served.post("/v1/sessions", {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")
    assert len(served.get("/v1/sessions").json()["data"]) == 4


def test_an_idle_session_is_dropped(random_path: Path) -> None:
    with serving(random_path, session_idle_s=0.3) as served:
        session = create(served, prompt="abc")
        wait_until(lambda: not served.get("/v1/sessions").json()["data"])
        gone = served.get(session)
        assert gone.status_code == 404
        assert gone.json()["error"]["message"] == "the session was dropped: nobody used it for 0.3 s"
        wait_until(lambda: served.engine.stats.paused_sessions == 0)


def test_a_session_in_use_stays(endless: Path) -> None:
    """The time of a turn does not count."""
    with serving(endless, session_idle_s=3.0, changed=slowed(0.01)) as served:
        session, began = create(served, prompt="a"), time.monotonic()
        answer(served, session, max_tokens=400)
        assert time.monotonic() - began > 3.0
        assert served.post(f"{session}/type", {"text": "b"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"prompt": "a", "chat": {"messages": [{"role": "user", "content": "a"}]}}, "chat"),
        ("", {"prompt": [300]}, "prompt[0]"),
        ("", {"chat": {"messages": [{"role": "user", "content": "a"}]}}, "messages"),
        ("", {"temperature": 9}, "temperature"),
        ("", {"stop_tokens": ["abc"]}, "stop_tokens[0]"),
        ("/type", {"text": "x", "at": 4}, "at"),
        ("/type", {"text": 1}, "text"),
        ("/type", {}, "text"),
        ("/answer", {"n": 2}, "n"),
        ("/answer", {"append": [1]}, "append"),
        ("/answer", {"append": [300]}, "append"),
        ("/answer", {"stop_tokens": [300]}, "stop_tokens[0]"),
        ("/answer", {"max_tokens": 0}, "max_tokens"),
        ("/answer", [1], None),
        ("/answer", {"append": "x" * 500}, None),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: Any, param: str | None) -> None:
    session = "/v1/sessions" + (create(served, prompt="abc").removeprefix("/v1/sessions") if path else "")
    response = served.post(session + path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_refused_turn_leaves_the_session_as_it_was(served: Served) -> None:
    session = create(served, prompt="abc")
    before = served.get(session).json()
    assert served.post(f"{session}/answer", {"append": "x" * 500}).status_code == 400
    assert served.get(session).json() == before
    assert answer(served, session, max_tokens=2)["usage"]["prompt_tokens"] == 3


def test_a_draft_has_a_limit(random_path: Path) -> None:
    with serving(random_path, limits=Limits(body_bytes=100)) as served:
        session = create(served, prompt="a" * 50)
        assert served.post(f"{session}/type", {"text": "b" * 50}).status_code == 200
        refused = served.post(f"{session}/type", {"text": "b"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text")
        assert served.post(f"{session}/type", {"text": "b", "at": 0}).json()["draft"] == "b"


def test_no_such_session(served: Served) -> None:
    response = served.get("/v1/sessions/none")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
    assert json.loads(response.text)["error"]["message"] == "there is no session 'none'"


def test_many_who_leave(slow: Served) -> None:
    """Turns that are left at any time leave sessions that can go on."""
    sessions = [create(slow, prompt="a") for _ in range(4)]
    for n in range(24):
        with suppress(httpx.TimeoutException):
            httpx.post(slow.url + f"{sessions[n % 4]}/answer", json={"append": "a"}, timeout=0.01 * (1 + n % 7))
        wait_until(lambda n=n: slow.get(sessions[n % 4]).json()["state"] != "answering")
    wait_until(slow.is_idle)
    for session in sessions:
        assert answer(slow, session, append="a", max_tokens=3)["text"] == "bab"
