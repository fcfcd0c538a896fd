"""`pi-run flood` counts the texts of each prompt, is bounded, and keeps to this machine."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.commands import USAGE
from support.synthetic import random_artifact, small_decoder

from pi_runtime import console
from pi_runtime.commands.flood import PROMPTS, app


class Fickle(BaseHTTPRequestHandler):
    """Says something else each time that a greedy prompt with `there` comes, and the same to all others."""

    asked: ClassVar[list[dict[str, Any]]] = []
    status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        changes = "there" in body["prompt"] and body["temperature"] == 0
        text = f"{len(self.asked)}" if changes else "same"
        data = json.dumps({"choices": [{"text": text}]}).encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fickle(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    handler = type("Handler", (Fickle,), {"asked": [], "status": status})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def flooded(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = console.run(app, [str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_texts_that_change_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    requests = 4 * len(PROMPTS)
    with fickle() as (url, asked):
        code, out, _ = flooded(capsys, url, "--requests", requests, "--parallel", "1,5", "--max-tokens", 3, "--json")
    assert code == 0
    assert len(asked) == 2 * requests
    assert {body["max_tokens"] for body in asked} == {3}
    rounds = json.loads(out)["rounds"]
    ways = ("greedy", "seeded")
    assert [(one["at_once"], one["way"]) for one in rounds] == [(n, way) for n in (1, 5) for way in ways]
    changing = sum("there" in prompt for prompt in PROMPTS)
    assert [one["changed"] for one in rounds] == [changing, 0, changing, 0]
    assert [one["most_texts"] for one in rounds] == [2, 1, 4, 1]
    assert {one["prompts"] for one in rounds} == {len(PROMPTS)}
    first, second = ([body["prompt"] for body in part] for part in (asked[:requests], asked[requests:]))
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with fickle() as (url, _):
        code, out, _ = flooded(capsys, url + "/v1/", "--requests", 80, "--parallel", "2")
    assert code == 0
    assert out.splitlines()[2:] == ["| 2 | greedy | 20 | 4 | 2 |", "| 2 | seeded | 20 | 0 | 1 |"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["http://192.0.2.1:80"], "--anywhere"),
        (["http://example.org"], "--anywhere"),
        (["http://localhost.example.org"], "--anywhere"),
        (["ftp://127.0.0.1"], "http://HOST"),
        (["127.0.0.1:80"], "http://HOST"),
        (["http://127.0.0.1:1", "--parallel", "0"], "--parallel"),
        (["http://127.0.0.1:1", "--parallel", "a"], "--parallel"),
        (["http://127.0.0.1:1", "--parallel", "1,513"], "--parallel"),
        (["http://127.0.0.1:1", "--requests", "1000000"], "100000"),
    ],
)
def test_what_is_not_meant_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    code, out, err = flooded(capsys, *arguments)
    assert (code, out) == (USAGE, "")
    assert says in err


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_gives_no_text(capsys: pytest.CaptureFixture[str], status: int) -> None:
    with fickle(status) as (url, _):
        code, out, err = flooded(capsys, url, "--requests", 40, "--parallel", 4)
    assert code not in (0, USAGE)
    assert (out, str(status) in err) == ("", True)


def test_this_server_says_the_same_in_any_company(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "random.pi", small_decoder(context_length=512))
    serving = pytest.importorskip("support.serving").serving
    with serving(path, slots=4) as served:
        code, out, _ = flooded(capsys, served.url, "--requests", 80, "--parallel", "1,6", "--max-tokens", 8, "--json")
    assert code == 0
    assert all(one["changed"] == 0 for one in json.loads(out)["rounds"])
