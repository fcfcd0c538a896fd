"""More requests than are taken on: refused at once with the time to come again, and nothing else suffers."""

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.serving import Served, wait_until

from pi_runtime.server.admission import Admission, Arriving
from pi_runtime.server.errors import ApiError
from pi_runtime.server.settings import ServerSettings

Serve = Callable[..., Served]


@contextmanager
def full(served: Served) -> Iterator[None]:
    """All slots and the whole queue are taken."""
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(_sent(served))
        wait_until(lambda: served.engine.stats.running + served.engine.stats.waiting == 8)
        yield
    wait_until(served.is_idle)


@contextmanager
def _sent(served: Served) -> Iterator[None]:
    body = b'{"model": "endless", "prompt": "a", "max_tokens": 4000}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head + body)
        yield


def test_one_too_many_is_told_when_to_come_again(talker: Served) -> None:
    with full(talker):
        response = talker.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(response.headers["retry-after"]) <= 60
    assert talker.complete(max_tokens=1).status_code == 200


def test_one_too_many_is_refused_before_its_body_has_come(talker: Served) -> None:
    with full(talker), socket.create_connection(("127.0.0.1", talker.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{")
        connection.settimeout(30)
        assert connection.recv(12) == b"HTTP/1.1 429"


def test_ten_times_too_many_are_answered_or_refused(talker: Served) -> None:
    statuses: Counter[int] = Counter()

    def ask() -> None:
        statuses[talker.complete(max_tokens=5).status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= 8
    wait_until(talker.is_idle)


def test_answers_are_counted_not_requests() -> None:
    admission = Admission(slots=2, queue=2)
    with admission.ticket("") as first:
        first.take(3)
        with admission.ticket("") as second:
            with pytest.raises(ApiError) as refused:
                second.take(2)
            assert refused.value.status == 429
        with pytest.raises(ApiError) as refused:
            first.take(5)
        assert refused.value.status == 400
        assert admission.taken == 3
    assert admission.taken == 0


def test_the_time_to_come_again_follows_what_answers_take() -> None:
    admission = Admission(slots=2, queue=2)
    assert admission.retry_s == 1
    for _ in range(100):
        admission.count(30.0)
    assert admission.retry_s == 15


def test_one_key_of_several_leaves_places_to_others() -> None:
    admission = Admission(slots=2, queue=2, most_each=3)
    with admission.ticket("one") as first, admission.ticket("one") as second:
        second.take(2)
        with pytest.raises(ApiError) as refused, admission.ticket("one"):
            pass
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        with pytest.raises(ApiError) as impossible:
            first.take(4)
        assert impossible.value.status == 400
        with admission.ticket("two"):
            assert admission.taken == 4
    with admission.ticket("one") as ticket:
        ticket.take(3)
    assert admission.taken == 0


@pytest.mark.parametrize(
    ("keys", "slots", "queue", "each"), [(0, 8, 64, 72), (1, 8, 64, 72), (2, 8, 64, 54), (2, 8, 0, 8), (9, 1, 1, 1)]
)
def test_what_one_key_may_have(keys: int, slots: int, queue: int, each: int) -> None:
    settings = ServerSettings(api_keys=tuple(map(str, range(keys))), slots=slots, queue=queue)
    assert settings.answers_each == each


@pytest.mark.parametrize("sent", [b"", b"{"], ids=["silent", "begun"])
def test_requests_that_do_not_come_take_no_places_of_others(endless: Path, serve: Serve, sent: bytes) -> None:
    one, two = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
    served = serve(endless, slots=1, queue=3, api_keys=("one", "two"))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\nContent-Length: 9\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port))).sendall(head + sent)
        wait_until(lambda: served.service.arriving.bodies == 12)
        body = {"model": served.name, "prompt": "a", "max_tokens": 1}
        assert served.post("/v1/completions", body, headers=one).status_code == 200
        assert served.post("/v1/completions", body, headers=two).status_code == 200
    wait_until(lambda: served.service.arriving.bodies == 0)
    wait_until(served.is_idle)


def test_bodies_that_come_slowly_have_room_for_so_many_bytes() -> None:
    arriving = Arriving(1000)
    with ExitStack() as stack:
        one, two, three = (stack.enter_context(arriving.body(name)) for name in ("one", "one", "another"))
        one(700)
        two(0)
        with pytest.raises(ApiError) as raised:
            two(51)
        assert (raised.value.status, raised.value.code) == (429, "queue_full")
        three(300)
        with pytest.raises(ApiError):
            three(1)
    assert arriving.bodies == 0
    with arriving.body("one") as again:
        again(750)
