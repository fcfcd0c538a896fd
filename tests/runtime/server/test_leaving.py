"""Clients that leave, wherever their request is: its slot and its pages are free at once, and nobody else notices."""

import gc
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.serving import Served, slowed, wait_until

from pi_runtime.sequence.sequence import TokenSequence
from pi_runtime.server.in_flight import InFlight

SOON_S = 1.0
"""Time in which everything of a client that left must be free, on a machine that is idle."""


def send(served: Served, body: bytes, path: str = "/v1/completions") -> socket.socket:
    """A connection over which a request was sent."""
    connection = socket.create_connection(("127.0.0.1", served.port))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def body(prompt: str = '"a"', more: str = "") -> bytes:
    return f'{{"model": "endless", "prompt": {prompt}, "max_tokens": 4000{more}}}'.encode()


def assert_all_is_free(served: Served) -> None:
    """Nothing runs or waits, and what is stored is what finished requests left for later ones."""
    wait_until(served.is_idle)
    assert served.complete(max_tokens=2).status_code == 200


@pytest.mark.parametrize("streams", ["", ', "stream": true'], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("prompt", "more", "answers"),
    [('"a"', "", 1), ('"a"', ', "n": 3', 3), ('["a", "ab", "ba"]', "", 3), ('["a", "ab"]', ', "n": 2', 4)],
    ids=["one", "answers", "prompts", "both"],
)
def test_leaving_while_answers_are_written(talker: Served, prompt: str, more: str, answers: int, streams: str) -> None:
    connection = send(talker, body(prompt, more + streams))
    wait_until(lambda: talker.engine.stats.running == answers)
    began, cancelled = time.monotonic(), talker.service.metrics.cancelled
    connection.close()
    wait_until(talker.is_idle)
    assert time.monotonic() - began < 5 * SOON_S
    assert talker.service.metrics.cancelled == cancelled + 1
    assert_all_is_free(talker)


def test_leaving_the_queue(talker: Served) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(send(talker, body()))
        wait_until(lambda: talker.engine.stats.running == 4)
        connection = send(talker, body())
        wait_until(lambda: talker.engine.stats.waiting == 1)
        connection.close()
        wait_until(lambda: talker.engine.stats.waiting == 0)
        assert talker.engine.stats.running == 4
    assert_all_is_free(talker)


def test_reading_ahead_takes_no_place_and_leaving_ends_it(talker: Served) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(send(talker, body()))
        wait_until(lambda: talker.engine.stats.running == 4)
        ran = talker.engine.stats.ahead_tokens
        connection = send(talker, body(prompt='"' + "ab" * 200 + '"').replace(b"4000", b"0"))
        wait_until(lambda: talker.engine.stats.reading_ahead == 1)
        wait_until(lambda: talker.service.admission.answers == 4)
        assert (talker.engine.stats.waiting, talker.engine.stats.ahead_tokens) == (0, ran)
        connection.close()
        wait_until(lambda: talker.engine.stats.reading_ahead == 0)
        assert talker.engine.stats.running == 4
    assert_all_is_free(talker)


def test_leaving_while_the_prompt_is_read(endless: Path, serve: Callable[..., Served]) -> None:
    served = serve(endless, changed=slowed(0.05))
    connection = send(served, body(prompt='"' + "ab" * 2000 + '"').replace(b"4000", b"9"))
    wait_until(lambda: served.engine.stats.running == 1)
    connection.close()
    wait_until(served.is_idle)
    assert served.engine.stats.generated_tokens == 0


def test_leaving_while_the_request_is_prepared(endless: Path, serve: Callable[..., Served]) -> None:
    gate = threading.Event()

    def held(model: Any) -> None:
        encode = model.tokenizer.encode

        def slow(*args: Any, **options: Any) -> Any:
            gate.wait(30)
            return encode(*args, **options)

        model.tokenizer.encode = slow

    served = serve(endless, changed=held)
    connection = send(served, body())
    wait_until(lambda: served.service.open_requests == 1)
    connection.close()
    wait_until(lambda: served.service.open_requests == 0)
    gate.set()
    assert_all_is_free(served)


def test_leaving_before_the_body_has_come(talker: Served) -> None:
    connection = socket.create_connection(("127.0.0.1", talker.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    wait_until(lambda: talker.service.incoming.bodies == 1)
    connection.close()
    wait_until(lambda: talker.service.incoming.bodies == 0)
    assert_all_is_free(talker)


@pytest.mark.parametrize("protocol", ["", "Connection: Upgrade\r\nUpgrade: other\r\n"], ids=["http", "another"])
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_leaving_after_more_was_sent_than_is_answered(talker: Served, later: bool, protocol: str) -> None:
    first = body()
    fields = f"Host: localhost\r\n{protocol}Content-Length: {len(first)}\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\n{fields}".encode()
    before = talker.service.metrics.cancelled
    ahead = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", talker.port)) as connection:
        connection.sendall(head + first + (b"" if later else ahead))
        wait_until(lambda: talker.engine.stats.running == 1)
        connection.sendall(ahead * (10000 if later else 1))
    assert_all_is_free(talker)
    assert talker.service.metrics.cancelled == before + 1


def test_a_thousand_that_leave_lose_no_page(endless: Path, serve: Callable[..., Served], long: bool) -> None:
    """Pages in use afterwards are those kept for later requests, and go when the engine is closed."""
    served = serve(endless, slots=4, queue=16, changed=slowed(0.001))
    rng, pool = random.Random(1), served.engine._store.pool
    for _ in range(1000 if long else 60):
        more = rng.choice(["", ', "n": 3', ', "stream": true'])
        connection = send(served, body(prompt='"' + "ab" * rng.randrange(1, 300) + '"', more=more))
        time.sleep(rng.choice([0, 0.001, 0.01, 0.03]))
        connection.close()
    assert_all_is_free(served)
    kept = served.engine._store
    kept.tree.clear()
    assert pool.in_use == 0


def requests_in_memory() -> list[TokenSequence | InFlight]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), (TokenSequence, InFlight))]


def test_nothing_is_kept_of_a_request_that_has_been_answered(endless: Path, serve: Callable[..., Served]) -> None:
    earlier = requests_in_memory()  # of other tests' servers
    served = serve(endless)
    for settings in ({}, {"stream": True}, {"n": 2}, {"echo": True, "logprobs": 1, "max_tokens": 0}):
        assert served.complete(**{"max_tokens": 2, **settings}).status_code == 200
    wait_until(served.is_idle)
    # What ended a request may hold it for a moment longer.
    wait_until(lambda: all(any(kept is known for known in earlier) for kept in requests_in_memory()))
