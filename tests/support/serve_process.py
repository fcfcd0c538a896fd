"""`pi-serve` as a process of its own, as users run it: for what a thread beside the test would disturb or hide."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

START_S = 300.0
"""Time to load a model; kernels may have to be compiled first."""
END_S = 60.0


class ServeProcess:
    """A server that takes requests. `lines` is what it logged."""

    def __init__(self, process: subprocess.Popen[str], url: str, name: str, log: Path) -> None:
        self.process, self.url, self.name, self._log = process, url, name, log

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    @property
    def resident_bytes(self) -> int:
        """Its memory, without what it only maps from files."""
        found = psutil.Process(self.process.pid).memory_info()
        return int(found.rss - found.shared)

    def metrics(self) -> dict[str, float]:
        """Its figures, those with labels left out."""
        text = httpx.get(f"{self.url}/metrics", timeout=END_S).raise_for_status().text
        return {name: float(value) for name, value in re.findall(r"^pi_(\w+) (\S+)$", text, re.MULTILINE)}

    def wait_until_idle(self) -> dict[str, float]:
        """Wait until nothing runs or waits; its figures then."""
        ends = time.monotonic() + END_S
        while True:
            found = self.metrics()
            if not any(found[name] for name in BUSY):
                return found
            assert time.monotonic() < ends, found
            time.sleep(0.02)


BUSY = ("running_answers", "waiting_answers", "open_requests", "reading_ahead")
"""Figures that are 0 where a server has nothing to do."""


@contextmanager
def serve_process(
    artifact: Path, *options: object, log: Path, before: str = "", killed: bool = False
) -> Iterator[ServeProcess]:
    """Start `pi-serve` on a free port and wait until it takes requests; at the end SIGTERM must end it with 0.

    `killed`: it is killed instead. `before` is Python that runs first. Answers are greedy where neither a request nor
    `options` say otherwise.
    """
    name = artifact.stem
    program = f"{before}\nfrom pi_runtime.commands.serve import main; main()"
    command = [sys.executable, "-c", program, str(artifact), "--port", "0", "--temperature", "0"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, *map(str, options)], stdout=out, stderr=out, text=True)
    try:
        served = ServeProcess(process, _url(process, log), name, log)
        _wait_until_ready(served)
        yield served
        process.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
        assert process.wait(END_S) == (-signal.SIGKILL if killed else 0), log.read_text()
    finally:
        process.kill()
        process.wait()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    ends = time.monotonic() + START_S
    while (found := re.search(r"listening on (\S+)", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.02)
    return found[1]


def _wait_until_ready(served: ServeProcess) -> None:
    ends = time.monotonic() + START_S
    while httpx.get(f"{served.url}/health").status_code != 200:
        assert served.process.poll() is None, served.lines
        assert time.monotonic() < ends, served.lines
        time.sleep(0.05)


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
