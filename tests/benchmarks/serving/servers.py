"""The servers that are compared. One that is missing or dies becomes a row that says so."""

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from side_by_side.process import EngineError
from support.serve_process import serve_process

OURS, PEER = "pi-serve", "llama-server"
START_S = 600.0


@dataclass
class Server:
    """One that listens, or what became of it."""

    name: str
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    """What its requests carry beside prompt and length: the same greedy answer, whose end nothing but its length is."""
    process: "subprocess.Popen[Any] | None" = None
    failure: str | None = None

    def check(self) -> None:
        """Raise EngineError if it is not there."""
        if self.failure is None and self.process is not None and (code := self.process.poll()) is not None:
            died = code < 0
            self.failure = f"{self.name} " + (f"died: {signal.Signals(-code).name}" if died else f"ended with {code}")
        if self.failure is not None:
            raise EngineError(self.failure)


@contextmanager
def our_server(
    artifact: Path, slots: int, context: int, kv_bytes: int, mode: str, threads: int, log: Path
) -> Iterator[Server]:
    """pi-serve. It guesses nothing: plain speed is compared. `kv_bytes`: for keys and values, soon in use."""
    options = ["--slots", slots, "--queue", 64, "--ctx-size", context, "--kv-budget", kv_bytes, "--mode", mode]
    rest = ["--threads", threads, "--speculate", "off", "--device", "cpu"]
    with serve_process(artifact, *options, *rest, log=log) as served:
        yield Server(OURS, served.url, {"model": served.name}, served.process)


@contextmanager
def llama_server(program: Path, gguf: Path, slots: int, context: int, threads: int, log: Path) -> Iterator[Server]:
    """llama-server with as many slots, each with its own `context` positions."""
    server = Server(PEER, body={"ignore_eos": True, "cache_prompt": False})
    if not program.is_file():
        server.failure = f"{PEER} is not there: {program}"
        yield server
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--model", gguf, "--host", "127.0.0.1", "--port", port, "--ctx-size", slots * context, "--parallel", slots]
    rest = ["--threads", threads, "--threads-batch", threads, "--cache-ram", 0, "--fit", "off"]
    server.url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        server.process = subprocess.Popen([str(program), *map(str, [*where, *rest])], stdout=out, stderr=out)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


def _wait_until_ready(server: Server) -> None:
    ends = time.monotonic() + START_S
    while server.failure is None and time.monotonic() < ends:
        try:
            server.check()
            if httpx.get(f"{server.url}/health").status_code == 200:
                return
        except EngineError as failure:
            print(f"{failure} at its start", flush=True)
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    server.failure = server.failure or f"{server.name} was not ready within {START_S:g} s"
