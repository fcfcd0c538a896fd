"""One engine in a child process: a line of JSON in, a line of JSON out.

The child imports the engine's module and calls its `HANDLERS`, {name: function}; the parent's `Worker.ask` names one.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

_FOLDERS = ["tests/benchmarks", "tests", "recipes/demo"]
_STAGES = {"describe": "start", "open_model": "load"}
_CLOSING_S = 30.0


class EngineError(RuntimeError):
    """The child gives no more answers. The message names the engine, what happened, and at which stage."""


def threads() -> int:
    """Threads that each engine gets: all processors this process may use."""
    return len(os.sched_getaffinity(0))


def serve(module: str) -> None:
    """Answer requests until stdin ends. An exception is the last answer; its traceback is on stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer

    def answer(**told: Any) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    try:
        handlers = importlib.import_module(module).HANDLERS
        for line in sys.stdin:
            request = json.loads(line)
            answer(result=handlers[request.pop("do")](**request))
    except Exception as error:
        first, _, _ = str(error).partition("\n")
        answer(error=f"{type(error).__name__}: {first}")
        raise


def _checkout(python: str) -> Path:
    """The folder of the checkout that an interpreter has the project from."""
    code = "import pathlib, pi_runtime; print(pathlib.Path(pi_runtime.__file__).parents[1])"
    found = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    return Path(found.strip())


class Worker:
    """A child process that runs an engine's module; a context manager that ends it."""

    def __init__(
        self, name: str, module: str, *, limit_s: float | None = None, python: str | None = None, **environment: str
    ) -> None:
        """`limit_s`: seconds that a request may take before the child is ended; None: any time.

        `python`: the interpreter of another checkout, whose engines and whose project then run.
        """
        home = None if python is None else _checkout(python)
        folders = [str((home or Path(__file__).parents[3]) / folder) for folder in _FOLDERS]
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._name, self._limit_s = name, limit_s
        self._failure: str | None = None
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", "side_by_side.process", module],
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    @property
    def pid(self) -> int:
        """The child's id."""
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> Any:
        """The handler's result. Raises EngineError where there is none, and from then on at every request."""
        if self._failure is None:
            line, in_time = self._exchange(json.dumps({"do": do, **arguments}))
            # A line without its end was cut off by the child's death.
            told = json.loads(line) if line.endswith("\n") else {}
            if "result" in told:
                return told["result"]
            self._failure = f"{self._name} {self._ending(told, in_time)} at {_STAGES.get(do, do)}"
            if "error" in told:
                self._failure += f": {told['error']}"
        raise EngineError(self._failure)

    def _exchange(self, request: str) -> tuple[str, bool]:
        """The child's answer, empty where it died; and whether it came within the limit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late: list[bool] = []

        def end() -> None:
            late.append(True)
            self._process.kill()

        timer = Timer(self._limit_s, end) if self._limit_s is not None else None
        if timer:
            timer.start()
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.write(request + "\n")
                self._process.stdin.flush()
            # A child that failed before it was asked has left its last answer.
            line = self._process.stdout.readline()
        finally:
            if timer:
                timer.cancel()
        return line, not late

    def _ending(self, told: dict[str, Any], in_time: bool) -> str:
        if "error" in told:
            return "failed"
        code = self._process.wait()
        if not in_time:
            return f"was ended: no answer within {self._limit_s:g} s"
        if code < 0:
            return f"died: {signal.Signals(-code).name} ({(signal.strsignal(-code) or '').lower()})"
        return f"ended with code {code}"

    def close(self) -> None:
        """End the child; one that does not end by itself is killed."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # of a request that a dead child never read
                stream.close()
        try:
            self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


if __name__ == "__main__":
    serve(sys.argv[1])
