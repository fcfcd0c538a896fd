"""Runs llama.cpp's tests of its server against ours: peer_server.py FOLDER MODEL [options of pytest]

FOLDER is its `tools/server/tests`, of which nothing is copied; MODEL is what they ask for as stories260K, a checkpoint
or an artifact. The tests start a program by its flags. It is a few lines here, which have the server started in this
process, and names are translated: flags to settings, the path of llama-server's own completions, the beginning of
fingerprints, some metrics, the type of one error, and the null by which llama-server spells that nothing was said yet.
What a request asks for, and what an answer says, is not touched. A model that is not at hand is stood in for by a
server that refuses; one for embeddings by the model at hand, asked for its own.

Prints how many tests pass, and each other one with its reason; one without a reason is a fault, and the end is 1.
"""

import fnmatch
import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pi_runtime import Engine, load
from pi_runtime.commands.model_cache import artifact_of
from pi_runtime.server.app import build_app
from pi_runtime.server.edge import Server, config
from pi_runtime.server.settings import ServerSettings

ELSEWHERE = ("test_vision_api.py", "test_mcp_servers.py", "test_tools_builtin.py", "test_router.py")
"""Files whose tests need images, or programs beside a model: they are not run."""
AT_HAND = ("ggml-org/test-model-stories260K", "ggml-org/test-model-stories260K-infill")
SPELLED = {
    b"pi_prompt_tokens_total": b"llamacpp:prompt_tokens_total",
    b"pi_cached_tokens_total": b"llamacpp:prompt_tokens_cached_total",
    b"pi_generated_tokens_total": b"llamacpp:tokens_predicted_total",
    b"pi_steps_total": b"llamacpp:n_decode_total",
    b'"system_fingerprint":"fp': b'"system_fingerprint":"b-',
    b'"delta":{"role":"assistant","content":""}': b'"delta":{"role":"assistant","content":null}',
}
TOO_LONG = b'"code":"context_length_exceeded"'
OTHER_MODEL = "asks for a model that is not at hand (embeddings, ranking, images, a mixture, a draft)"
REASONS: dict[str, str] = json.loads(Path(__file__).with_name("peer_server.json").read_text("utf-8"))
"""Why tests do not pass, by patterns of their names."""
POOLING: dict[str, Literal["mean", "last"]] = {"mean": "mean", "last": "last"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What llama-server takes for a model without a template."""
PROGRAM = """#!{python}
import json, signal, socket, sys
link = socket.create_connection(("127.0.0.1", {port}))
link.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
signal.signal(signal.SIGTERM, lambda *_: link.shutdown(socket.SHUT_WR))
said = link.recv(1 << 16)
while said:
    said = link.recv(1 << 16)
"""
GENERATES = ("/completion", "/v1/completions", "/v1/chat/completions", "/chat/completions", "/v1/messages", "/infill")


def flags_of(arguments: Sequence[str]) -> dict[str, str]:
    """Flags with their values; those without one have an empty text."""
    found: dict[str, str] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("-") and not argument.lstrip("-")[:1].isdigit():
            name = argument.lstrip("-")
            found[name] = ""
        else:
            found[name] = argument
    return found


def headers_in(body: bytes) -> list[tuple[bytes, bytes]]:
    """Headers for what our metrics have in the body."""
    return [(b"Process-Start-Time-Unix", at) for at in re.findall(rb"^process_start_time_seconds (\S+)", body, re.M)]


def spelled(body: bytes) -> bytes:
    """A body with llama-server's names."""
    for ours, theirs in SPELLED.items():
        body = body.replace(ours, theirs)
    return body.replace(b"invalid_request_error", b"exceed_context_size_error") if TOO_LONG in body else body


class Names:
    """Translates names between llama-server's clients and an application."""

    def __init__(self, app: ASGIApp, flags: dict[str, str]) -> None:
        self._app, self._seed = app, int(flags["seed"]) if "seed" in flags else None
        self._thinks = flags["reasoning"] != "off" if "reasoning" in flags else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = {"/completions": "/completion"}.get(scope["path"], scope["path"])
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        body = self._request(path, body)
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        if scope["method"] == "POST":
            headers.append((b"content-length", str(len(body)).encode()))
        given, began = False, dict[str, Any]()

        async def read() -> Message:
            nonlocal given
            if given or scope["method"] != "POST":
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def write(message: Message) -> None:
            if message["type"] == "http.response.start":  # the tests look for names of headers letter by letter
                kept = path != "/metrics" and message["status"] < 400  # else the body's names change its length
                headers = [(k.title(), v) for k, v in message["headers"] if kept or k != b"content-length"]
                began.update(message, headers=headers)  # sent with the body, as a header may stand in it
                return
            if began:
                began["headers"] += headers_in(message.get("body", b""))
                await send({**began})
                began.clear()
            await send({**message, "body": spelled(message.get("body", b""))})

        await self._app({**scope, "path": path, "raw_path": path.encode(), "headers": headers}, read, write)

    def _request(self, path: str, body: bytes) -> bytes:
        """The body without a name of a model, and with the seed of the flags where it has none."""
        try:
            value = json.loads(body)
        except ValueError:
            return body
        if isinstance(value, dict):
            value.pop("model", None)
            if path in GENERATES and self._seed is not None:
                value.setdefault("seed", self._seed)
            if self._thinks is not None and "messages" in value:
                value.setdefault("chat_template_kwargs", {"enable_thinking": self._thinks})
        return json.dumps(value).encode()


async def refusing(scope: Scope, _: Receive, send: Send) -> None:
    """An application for a model that is not at hand: it is well, and refuses the rest."""
    if scope["type"] == "http":
        status, said = (
            (200, {"status": "ok"}) if scope["path"] == "/health" else (501, {"error": {"message": OTHER_MODEL}})
        )
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})


class Running:
    """A server in a thread, as flags of llama-server ask for it."""

    def __init__(self, artifact: Path, flags: dict[str, str], folder: Path) -> None:
        names = sorted(flags.get("alias", "model").split(","))
        slots = int(flags.get("parallel", 1))
        keys = (flags["api-key"],) if "api-key" in flags else ()
        given = {"temperature": float(flags["temp"])} if "temp" in flags else {}
        most = int(flags.get("n-predict", -1))
        settings = ServerSettings(
            host=flags.get("host", "127.0.0.1"), port=int(flags["port"]),
            model_name=names[0], aliases=tuple(names[1:]), slots=slots, api_keys=keys,
            sampling=given, max_tokens=most if most > 0 else None, drain_s=0.2, cors=True,
            allowed_origins=tuple(flags.get("cors-origins", "*").split(",")),
            embeddings=POOLING.get(flags.get("pooling", "mean")) if "embedding" in flags else None,
        )  # fmt: skip
        total = int(flags.get("ctx-size", 512))

        def opened() -> Engine:
            model = load(artifact)
            context = total if "kv-unified" in flags else total // slots
            if context < model.context:
                model.close()
                model = load(artifact, context=context)
            model.use_template(_template(flags, folder))
            return Engine(model, slots=slots)

        self.app = build_app(settings, opened, lambda line: print(line, file=sys.stderr))
        app: ASGIApp = Names(self.app, flags)
        if "hf-repo" in flags and flags["hf-repo"] not in AT_HAND and settings.embeddings is None:
            app = refusing
        made = config(self.app, settings)
        made.app = app
        if app is refusing:
            made.lifespan = "off"
        self._listens = threading.Event()
        self._server = Server(made, self.app.state.service, lambda _: self._listens.set())
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let it end, and wait for that."""
        self._listens.wait(30)
        if (loop := self._server._loop) is not None:
            loop.call_soon_threadsafe(self._server.drain)
        self._thread.join(30)


def _template(flags: dict[str, str], folder: Path) -> str:
    """The chat template that flags name."""
    if "chat-template-file" in flags:
        return (folder / flags["chat-template-file"]).read_text("utf-8")
    named = flags.get("chat-template", "chatml")
    return CHATML if named == "chatml" else named


class Control(socketserver.ThreadingTCPServer):
    """Starts a server for each program that connects, and stops it when the program ends."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, artifact: Path, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.artifact, self.folder = artifact, folder


class Connection(socketserver.StreamRequestHandler):
    server: Control

    def handle(self) -> None:
        flags = flags_of(json.loads(self.rfile.readline()))
        try:
            running = Running(self.server.artifact, flags, self.server.folder)
        except Exception as error:
            self.wfile.write(f"cannot start: {error!r}".encode())
            return
        self.rfile.read()
        running.stop()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def outcomes(report: Path) -> Iterator[tuple[str, str, str]]:
    """Names of tests, `passed`, `skipped` or `failed`, and what was said."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314  pytest has written it
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        kind = "passed" if not bad else "skipped" if bad[0].tag == "skipped" else "failed"
        yield name, kind, "" if not bad else (bad[0].get("message") or "").replace("\n", " ")


def reason_of(name: str, said: str) -> str | None:
    """Why a test does not pass, where that is known."""
    if OTHER_MODEL in said:
        return OTHER_MODEL
    return next((why for pattern, why in REASONS.items() if fnmatch.fnmatchcase(name, pattern)), None)


def main(folder: Path, model: Path, options: Sequence[str]) -> int:
    artifact = artifact_of(model, None)
    with load(artifact) as opened:
        opened.warm_up()
    control = Control(artifact, folder)
    threading.Thread(target=control.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        program, report = Path(name, "llama-server"), Path(name, "report.xml")
        program.write_text(PROGRAM.format(python=sys.executable, port=control.server_address[1]), "utf-8")
        program.chmod(0o755)
        own = {"LLAMA_SERVER_BIN_PATH": str(program), "PORT": str(free_port()), "PYTHONDONTWRITEBYTECODE": "1"}
        python = os.environ.get("PEER_PYTHON", sys.executable)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", f"--junitxml={report}"]
        command += ["-m", "not slow", *(f"--ignore=unit/{file}" for file in ELSEWHERE), *(options or ["unit"])]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, env={**env, **own}, check=False)
        found = [*outcomes(report)]
    control.shutdown()
    failed = [(test, said, reason_of(test, said)) for test, kind, said in found if kind == "failed"]
    counts = Counter(kind for _, kind, _ in found)
    print(
        f"{counts['passed']} of {len(found)} pass, {counts['skipped']} are skipped, {time.perf_counter() - began:.0f} s"
    )
    for why, many in Counter(why for *_, why in failed).most_common():
        print(f"{many:4}  {why or 'FAULT: no reason is known'}")
        for test, said, one in failed:
            if one == why:
                print(f"        {test}" + (f": {said[:200]}" if why is None else ""))
    return int(any(why is None for *_, why in failed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), sys.argv[3:]))
