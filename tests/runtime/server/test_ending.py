"""The end of a server: signals, faults of the engine, and what those hear whose answers were being written."""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import INPUT, INTERRUPTED, USAGE
from support.serving import Served, events, slowed, wait_until

from pi_runtime import Model
from pi_runtime.errors import ArtifactError, PiError

Serve = Callable[..., Served]
PI_SERVE = [sys.executable, "-c", "from pi_runtime.commands.serve import main; main()"]
BODY = {"model": "endless", "prompt": "a", "max_tokens": 10**6, "stream": True}


@contextmanager
def process(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A pi-serve that listens, and its address."""
    command = [*PI_SERVE, *map(str, arguments), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stderr
            line = running.stderr.readline()
            found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line
            wait_until(lambda: httpx.get(f"{found[1]}/health", timeout=30).status_code == 200)
            yield running, found[1]
        finally:
            running.kill()


def streamed(url: str, **settings: Any) -> Any:
    """A completion that streams."""
    return httpx.stream("POST", f"{url}/v1/completions", json={**BODY, **settings}, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end_with_an_error_after_a_while(endless: Path, number: int) -> None:
    arguments = (endless, "--ctx-size", 1 << 20, "--drain-seconds", 1)
    with process(*arguments) as (running, url), streamed(url) as response:
        coming = events(response)
        next(coming)
        running.send_signal(number)
        assert list(coming)[-1]["error"]["code"] == "draining"
        assert running.wait(60) == 0
        assert running.stderr
        assert "Traceback" not in running.stderr.read()


@pytest.mark.slow
def test_what_was_read_is_found_again_after_a_restart(endless: Path, tmp_path: Path) -> None:
    """It is written while the server drains; a prompt of 100 tokens has three whole pages."""
    body, texts = {**BODY, "prompt": "ab" * 50, "max_tokens": 5, "stream": False, "temperature": 0}, []
    for _ in range(2):
        with process(endless, "--kv-disk", tmp_path / "pages", "--drain-seconds", 20) as (running, url):
            found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            texts.append(found["choices"][0]["text"])
            figures = httpx.get(f"{url}/metrics", timeout=30).text
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0
    assert texts[0] == texts[1]
    assert re.search(r"pi_kv_disk_tokens_total (\d+)", figures)[1] == "96"  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "full", "closed"])
def test_a_signal_ends_a_server_whose_lines_nobody_reads(alphabet: Path, how: str) -> None:
    """The reader of its pipe has gone or takes nothing, or it was started without stdout and stderr."""
    reading, writing = os.pipe()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*PI_SERVE, str(alphabet), "--port", str(port), "--log-requests"]
    if how == "closed":
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stderr=writing, stdout=subprocess.DEVNULL) as running:
        try:
            os.close(writing)
            wait_until(lambda: answers(f"{url}/health"))
            if how == "gone":
                os.close(reading)
            if how == "full":
                fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 4096)
            for _ in range(100 if how == "full" else 3):
                assert httpx.get(f"{url}/health", timeout=30).status_code == 200
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0
        finally:
            running.kill()
    if how != "gone":
        os.close(reading)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_a_signal_waits_for_answers_that_end_in_time(endless: Path) -> None:
    with process(endless, "--drain-seconds", 60) as (running, url), streamed(url, max_tokens=1000) as response:
        coming = events(response)
        next(coming)
        running.send_signal(signal.SIGTERM)
        assert list(coming)[-1]["choices"][0]["finish_reason"] == "length"
        assert running.wait(60) == 0


@pytest.mark.slow
def test_a_hangup_reads_the_keys_anew(endless: Path, tmp_path: Path) -> None:
    keys, (old, new) = tmp_path / "keys.txt", ("0123456789abcdef", "fedcba9876543210")

    def status(key: str) -> int:
        return httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=30).status_code

    keys.write_text(f"{old}\n")
    with process(endless, "--api-key-file", keys) as (running, url):
        assert (status(old), status(new)) == (200, 401)
        keys.write_text(f"{new}\n")
        running.send_signal(signal.SIGHUP)
        wait_until(lambda: (status(old), status(new)) == (401, 200))
        keys.write_text("short\n")
        running.send_signal(signal.SIGHUP)
        assert running.stderr
        told = [line.split(" ", 1)[1] for line in (running.stderr.readline() for _ in range(3)) if line[:1].isdigit()]
        assert told[0] == "keys were read anew; there are 1\n"
        assert told[1].startswith("the keys stay as they were: ")
        assert "short" not in told[1]
        assert (status(old), status(new)) == (401, 200)


@pytest.mark.slow
def test_every_line_can_be_json(endless: Path) -> None:
    command = [*PI_SERVE, str(endless), "--port", "0", "--log-format", "json", "--log-requests"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr
            url = json.loads(running.stderr.readline())["event"].removeprefix("listening on ")
            assert json.loads(running.stderr.readline())["event"].startswith("ready: ")
            httpx.get(f"{url}/health", timeout=30)
            assert json.loads(running.stderr.readline())["route"] == "/health"
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0
            assert [json.loads(line)["event"].split()[0] for line in running.stderr] == ["stopping", "the"]
        finally:
            running.kill()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(endless: Path) -> None:
    arguments = (endless, "--ctx-size", 1 << 20, "--drain-seconds", 600)
    with process(*arguments) as (running, url), streamed(url) as response:
        coming = events(response)
        next(coming)
        running.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health", timeout=30).json() == {"status": "draining"})
        refused = httpx.post(f"{url}/v1/completions", json={**BODY, "stream": False}, timeout=30)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == INTERRUPTED


def failing(after: int) -> Callable[[Model], None]:
    """Makes a model fail after so many steps."""

    def change(model: Model) -> None:
        step, left = model.executor.step, after

        def fail(sequences: Sequence[Any]) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError("the machine is on fire")
            return step(sequences)

        model.executor.step = fail  # type: ignore[method-assign]

    return change


def test_a_fault_of_the_engine_is_told_to_all_and_ends_the_server(endless: Path, serve: Serve) -> None:
    served = serve(endless, changed=failing(30))
    with served.streaming(max_tokens=4000) as response:
        last = list(events(response))[-1]
    assert last["error"]["message"]
    wait_until(lambda: served.service.phase == "failed")
    assert isinstance(served.service.failure, PiError)
    wait_until(lambda: served.server.should_exit)


MESSAGES = [{"role": "user", "content": "a"}]
FORMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/completion": {"prompt": "a"},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "a"},
    "/api/embed": {"input": "a"},
}


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_failed_engine_is_unavailable_in_every_form(
    alphabet: Path, serve: Serve, monkeypatch: Any, is_noticed: bool
) -> None:
    """Whether the server has noticed by itself, or the engine is asked first."""
    monkeypatch.setattr("pi_runtime.server.service.WATCH_S", 0.0 if is_noticed else 3600.0)
    served = serve(alphabet, changed=failing(0), embeddings="mean")
    served.service.on_failure = lambda: None  # it goes on listening
    assert served.complete("a", max_tokens=3).json()["error"]["message"] == "internal error: RuntimeError"
    wait_until(lambda: served.engine.ended is not None)
    wait_until(lambda: served.service.phase == ("failed" if is_noticed else "ready"))
    for path, body in FORMS.items():
        for streams in (False, True):
            answer = served.post(path, {"model": served.name, **body, "stream": streams})
            assert answer.status_code == 503, (path, answer.text)
            assert "the engine has failed: internal error: RuntimeError" in answer.text, path
            assert "retry-after" in answer.headers
            assert "on fire" not in answer.text  # the message may quote somebody's request


@pytest.mark.parametrize("early", [False, True])
def test_a_failure_that_another_thread_tells_ends_the_server(alphabet: Path, serve: Serve, early: bool) -> None:
    """As the check of an artifact's bytes does: while it serves, or before it listens."""
    served = serve(alphabet, told=PiError("damaged") if early else None)
    if not early:
        served.service.fail(PiError("damaged"))
    wait_until(lambda: served.server.should_exit)
    assert str(served.service.failure) == "damaged"


def test_an_artifact_that_is_changed_ends_the_server_with_what_to_do(
    alphabet: Path, serve: Serve, tmp_path: Path
) -> None:
    path = shutil.copyfile(alphabet, tmp_path / "own.pi")
    os.utime(path, (1, 1))
    served = serve(path)
    assert served.complete("a", max_tokens=3).status_code == 200
    path.touch()
    # The fault of the engine, or that of a server without one: whichever is told first.
    assert served.complete("a", max_tokens=3).status_code in (500, 503)
    wait_until(lambda: served.service.phase == "failed")
    assert isinstance(served.service.failure, ArtifactError)
    assert "was changed while it was in use" in served.service.failure.what
    assert served.service.failure.remedy


def test_a_fault_of_one_request_ends_that_one_alone(endless: Path, serve: Serve, monkeypatch: Any) -> None:
    from pi_runtime.sequence.answer import AnswerSequence

    draw = AnswerSequence.draw

    def fail(self: AnswerSequence, *args: Any) -> Any:
        if self.tokens[0] == ord("x"):
            raise ValueError("of this request alone, and a secret")
        return draw(self, *args)

    monkeypatch.setattr(AnswerSequence, "draw", fail)
    served = serve(endless, changed=slowed(0.002))
    with served.streaming(max_tokens=300) as response:
        coming = events(response)
        next(coming)
        broken = served.complete("x")
        assert broken.status_code == 500
        assert "secret" not in broken.text
        assert list(coming)[-1]["choices"][0]["finish_reason"] == "length"
    assert served.get("/health").status_code == 200


def test_an_engine_that_makes_no_progress_is_not_well(endless: Path, serve: Serve) -> None:
    served = serve(endless, stale_s=0.1, changed=slowed(1.0))
    with served.streaming(max_tokens=2):
        wait_until(lambda: served.get("/health").json() == {"status": "stuck"})
    wait_until(lambda: served.get("/health").status_code == 200)


def ended(*arguments: object, **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a pi-serve that ends by itself."""
    done = subprocess.run(
        [*PI_SERVE, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.slow
def test_an_artifact_that_is_none_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "a.pi").write_bytes(b"nothing")
    code, err = ended(tmp_path / "a.pi", "--port", 0)
    assert code == INPUT
    assert "error: " in err


@pytest.mark.slow
def test_a_port_that_is_taken(endless: Path, talker: Served) -> None:
    code, err = ended(endless, "--port", talker.port)
    assert code == USAGE
    assert "--port" in err


SCRIPT = """
import sys, time
import pi_runtime.engine.model
{change}
from pi_runtime.commands.serve import main
main()
"""
HELD = """
pi_runtime.engine.model.Model.warm_up = lambda model: time.sleep(600)
"""
BREAKING = """
from pi_runtime.execution.host_executor import HostExecutor
step, left = HostExecutor.step, 30
def fail(self, sequences):
    global left
    left -= 1
    if left < 0:
        {fault}
    return step(self, sequences)
HostExecutor.step = fail
"""


@contextmanager
def changed(change: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A pi-serve of which something was changed, as soon as it listens."""
    command = [sys.executable, "-c", SCRIPT.format(change=change), *map(str, arguments), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr
            yield running, running.stderr.readline().split()[-1]
        finally:
            running.kill()


@pytest.mark.slow
def test_a_signal_while_the_model_is_loaded(endless: Path) -> None:
    with changed(HELD, endless) as (running, url):
        assert httpx.get(f"{url}/health", timeout=30).json() == {"status": "loading"}
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0


@pytest.mark.slow
def test_a_fault_of_the_engine_ends_the_process_with_an_error(endless: Path) -> None:
    with changed(BREAKING.format(fault="raise RuntimeError('on fire')"), endless) as (running, url):
        wait_until(lambda: httpx.get(f"{url}/health", timeout=30).status_code == 200)
        with streamed(url, max_tokens=4000) as response:
            *before, last = events(response)
        assert last["error"]
        assert "".join(event["choices"][0]["text"] for event in before), "what came before the fault is lost"
        assert running.wait(60) == 1
        assert running.stderr
        assert "on fire" in running.stderr.read()


@pytest.mark.slow
def test_a_step_that_never_ends_does_not_keep_the_process(endless: Path) -> None:
    with changed(BREAKING.format(fault="time.sleep(600)"), endless, "--drain-seconds", 0.1) as (running, url):
        wait_until(lambda: httpx.get(f"{url}/health", timeout=30).status_code == 200)
        with streamed(url, max_tokens=4000) as response:
            coming = events(response)
            next(coming)
            running.send_signal(signal.SIGTERM)
            assert list(coming)[-1]["error"]["code"] == "draining"
        assert running.wait(60) == 0
