"""A server in a thread, on a free port of this machine, and what its tests ask of it."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from pi_runtime import Engine, Model, load
from pi_runtime.errors import PiError
from pi_runtime.execution.executor import SequenceResult, SequenceStep
from pi_runtime.server.app import build_app
from pi_runtime.server.edge import Server, config
from pi_runtime.server.service import Service
from pi_runtime.server.settings import Limits, ServerSettings

PATIENCE_S = 150.0
"""Time for what is sure to come, however busy the machine is: kernels may have to be compiled first."""


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait for something that is sure to come."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.002)


@dataclass
class Served:
    """A server that listens, and its parts."""

    url: str
    server: Server
    service: Service
    lines: list[str] = field(default_factory=list)
    """What it logged."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine(self) -> Engine:
        engine = self.service.opened
        assert engine is not None
        return engine

    @property
    def name(self) -> str:
        return self.service.settings.model_name

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, **options)

    def delete(self, path: str) -> httpx.Response:
        return httpx.delete(self.url + path, timeout=PATIENCE_S)

    def complete(self, prompt: Any = "a", **settings: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": self.name, "prompt": prompt, **settings})

    @contextmanager
    def streaming(self, prompt: Any = "a", **settings: Any) -> Iterator[httpx.Response]:
        """A completion that streams. Leaving the block leaves the server."""
        body = {"model": self.name, "prompt": prompt, "stream": True, **settings}
        with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=PATIENCE_S) as response:
            yield response

    def is_idle(self) -> bool:
        """Whether nothing runs, waits, or is being prepared, and every page that is used is only kept."""
        stats = self.engine.stats
        is_quiet = stats.running == stats.waiting == stats.reading_ahead == 0
        return is_quiet and self.service.open_requests == self.service.admission.answers == 0


def events(response: httpx.Response) -> Iterator[Any]:
    """The events of a stream as JSON, without the mark of its end."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def slowed(seconds: float) -> Callable[[Model], None]:
    """Makes each step of a model take so much longer."""

    def change(model: Model) -> None:
        step = model.executor.step

        def slow(sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
            time.sleep(seconds)
            return step(sequences)

        model.executor.step = slow  # type: ignore[method-assign]

    return change


@contextmanager
def serving(
    path: Path,
    *,
    slots: int = 4,
    speculate: str | int = "off",
    context: int | None = None,
    changed: Callable[[Model], object] = lambda _: None,
    gate: threading.Event | None = None,
    limits: Limits | None = None,
    tls: Mapping[str, Path] = MappingProxyType({}),
    told: PiError | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """A server. `changed` may change the model before it is used; with a gate loading waits until it is set.

    `told` is a failure from before it runs.
    """

    def opened() -> Engine:
        if gate is not None:
            gate.wait()
        model = load(path, context=context)
        model.warm_up()
        changed(model)
        return Engine(model, slots=slots, speculate=speculate)

    given: dict[str, Any] = {"port": 0, "model_name": path.stem, "drain_s": 0.2, "limits": limits or Limits()}
    given["sampling"] = {"temperature": 0}  # most tests know what a model says
    chosen = ServerSettings(**{**given, "slots": slots, **settings})
    lines: list[str] = []
    built = build_app(chosen, opened, lines.append)
    urls: list[str] = []
    server = Server(config(built, chosen, **tls), built.state.service, urls.append)
    if told is not None:
        built.state.service.fail(told)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    served: Served | None = None
    try:
        wait_until(lambda: bool(urls))
        served = Served(urls[0], server, built.state.service, lines)
        if gate is None:
            wait_until(lambda: served.service.phase != "loading")
        yield served
    finally:
        if gate is not None:
            gate.set()
        if server._loop is not None:
            server._loop.call_soon_threadsafe(server.drain)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
