"""One engine in a child process: a line of JSON in, a line of JSON out.

The child runs `serve` with its handlers, {name: function}; the parent's `Worker.ask` calls one by name.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_FOLDERS = [str(p) for p in (Path(__file__).parents[1], Path(__file__).parents[2])]


def threads() -> int:
    """Threads that each engine gets: all processors this process may use."""
    return len(os.sched_getaffinity(0))


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests until stdin ends. An exception ends the process: its traceback is on stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    for line in sys.stdin:
        request = json.loads(line)
        result = handlers[request.pop("do")](**request)
        answers.write(json.dumps(result) + "\n")
        answers.flush()


class Worker:
    """A child process that runs the module `side_by_side.MODULE`; a context manager that ends it."""

    def __init__(self, module: str, **environment: str) -> None:
        path = os.pathsep.join([*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"side_by_side.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """The handler's result. Raises RuntimeError where the child has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"{self._module}: ended with code {self._process.wait()} at {do} {arguments}")
        return json.loads(answer)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
