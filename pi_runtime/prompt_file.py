"""Answering a file of prompts: a JSON object a line in, one a line out, in the same order; an output can be continued.

in    {"prompt": "Once upon"}  or  {"messages": [{"role": "user", "content": "Hello"}]}
      and for this line alone: id, max_tokens, stop, temperature, top_k, top_p, min_p, repetition_penalty, seed
out   {"index": 0, "id": …, "text": …, "finish_reason": …, "prompt_tokens": …, "generated_tokens": …, "digest": …}
      with the seed where tokens were drawn
      or, for a line that cannot be answered, {"index": 0, "id": …, "error": …, "digest": …}
"""

import hashlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pi_runtime.artifact.decoding import canonical_json
from pi_runtime.engine.engine import Engine
from pi_runtime.engine.stream import Stream
from pi_runtime.errors import InputError, PiError, PromptError, UsageError
from pi_runtime.model import Model
from pi_runtime.sampling import Sampling

SAMPLING_KEYS = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"})
KEYS = SAMPLING_KEYS | {"id", "prompt", "messages", "max_tokens", "stop"}
AHEAD = 256
"""Prompts handed to the engine before the oldest of them is answered."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings for every line that has no value of its own."""

    max_tokens: int
    stop: tuple[str, ...]
    sampling: Mapping[str, Any]
    """Values by the names of `Sampling`; None is the checkpoint's own default."""


@dataclass(frozen=True)
class _Line:
    """A line of the input that has been handed to the engine, or has failed."""

    head: dict[str, Any]
    digest: str
    found: Stream | PiError

    def result(self) -> dict[str, Any]:
        """The line of the output; waits for the answer."""
        found = self.found
        if isinstance(found, Stream):
            try:
                text = "".join(found)
            except PiError as error:
                found = error
            else:
                seed = {} if found.seed is None else {"seed": found.seed}
                return {
                    **self.head,
                    "text": text,
                    "finish_reason": found.finish_reason,
                    "prompt_tokens": found.stats.prompt_tokens,
                    "generated_tokens": found.stats.generated_tokens,
                    **seed,
                    "digest": self.digest,
                }
        return {**self.head, "error": str(found), "digest": self.digest}


class PromptFile:
    """A file of prompts, and how one model answers them."""

    def __init__(self, path: Path, model: Model, settings: Settings) -> None:
        self._path, self._model, self._settings = path, model, settings
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot be read", found=error.strerror) from None
        lines = data.splitlines()
        self._lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        # What an answer depends on, beside its line: an output is continued only if all of it is the same.
        manifest = hashlib.sha256(canonical_json(model.manifest)).hexdigest()
        run = [manifest, model.mode, model.context, model.executor.new_pool().format]
        self._common = json.dumps([*run, settings.max_tokens, settings.stop, dict(settings.sampling)]).encode()

    def answer(self, engine: Engine, output: Path | None, progress: Callable[[int, int], None]) -> None:
        """Answer every line that `output` does not hold yet; None writes all to stdout.

        Raises UsageError for an output that another input or other settings made, and InputError at the end if lines
        could not be answered: their errors stand in the output.
        """
        with _opened(output) as file:
            done, failed = self._answered(file, output) if output is not None else (0, 0)
            total = len(self._lines)
            progress(done, total)
            for n, result in enumerate(self._results(engine, done), done + 1):
                file.write(json.dumps(result, ensure_ascii=False).encode(errors="replace") + b"\n")
                file.flush()
                failed += "error" in result
                progress(n, total)
        if failed:
            raise InputError(
                f"{self._path}: {failed} of {total} prompts could not be answered",
                remedy='see "error" in the output' if output is None else f'see "error" in {output}',
            )

    def _results(self, engine: Engine, done: int) -> Iterator[dict[str, Any]]:
        begun: deque[_Line] = deque()
        for index in range(done, len(self._lines)):
            begun.append(self._begin(engine, index))
            if len(begun) == AHEAD:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()

    def _begin(self, engine: Engine, index: int) -> _Line:
        """Hand a line to the engine. A line that is wrong is its own error, not the file's."""
        number, line = self._lines[index]
        head: dict[str, Any] = {"index": index}
        found: Stream | PiError
        try:
            request = _parsed(line, f"{self._path}, line {number}")
            if "id" in request:
                head["id"] = request["id"]
            found = self._stream(engine, request)
        except PiError as error:
            found = error
        return _Line(head, self._digest(line), found)

    def _stream(self, engine: Engine, request: dict[str, Any]) -> Stream:
        own = {key: request[key] for key in SAMPLING_KEYS & request.keys()}
        sampling = Sampling.from_generation_config(
            self._model.manifest.generation, **{**self._settings.sampling, **own}
        )
        prompt = request["prompt"] if "prompt" in request else self._model.chat_prompt(request["messages"])
        stop = request.get("stop", self._settings.stop)
        return engine.generate(
            prompt,
            max_tokens=request.get("max_tokens", self._settings.max_tokens),
            sampling=sampling,
            stop=[stop] if isinstance(stop, str) else stop,
        )

    def _digest(self, line: bytes) -> str:
        """Identifies a line with everything else that its answer depends on."""
        return hashlib.sha256(self._common + b"\n" + line.strip()).hexdigest()[:16]

    def _answered(self, file: BinaryIO, output: Path) -> tuple[int, int]:
        """Count the answers and the errors that an output holds, and cut off a last line that was not finished."""
        data = file.read()
        whole = data.rfind(b"\n") + 1
        failed = 0
        for index, line in enumerate(lines := data[:whole].splitlines()):
            found = _json_object(line)
            if index >= len(self._lines) or found.get("digest") != self._digest(self._lines[index][1]):
                raise UsageError(
                    f"{output}: its line {index + 1} is no answer to this prompt with these settings",
                    expected=f"what the same command wrote, up to where it was interrupted, or an empty {output.name}",
                    remedy="name another output with -o, or remove this one",
                )
            failed += "error" in found
        file.seek(whole)
        file.truncate()
        return len(lines), failed


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    """The request that a line holds."""
    request = _json_object(line)
    if not request:
        raise PromptError(f"{where}: not a JSON object", expected='{"prompt": "…"} or {"messages": […]}')
    if unknown := sorted(request.keys() - KEYS):
        raise PromptError(f"{where}: unknown key {', '.join(unknown)}", expected=", ".join(sorted(KEYS)))
    if ("prompt" in request) == ("messages" in request):
        raise PromptError(f"{where}: give either prompt or messages")
    for key, expected, ok in (
        ("prompt", "text", isinstance(request.get("prompt", ""), str)),
        ("messages", "a list of objects with role and content, both text", _are_messages(request.get("messages", []))),
        ("max_tokens", "an integer", type(request.get("max_tokens", 1)) is int),
        ("stop", "text, or a list of texts", isinstance(request.get("stop", []), str | list)),
    ):
        if not ok:
            raise PromptError(f"{where}: {key}", expected=expected, found=repr(request[key])[:80])
    return request


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict)
        and message.keys() >= {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in value
    )


def _json_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; an empty one where it is something else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def _opened(output: Path | None) -> Iterator[BinaryIO]:
    """The output, with what it holds already."""
    if output is None:
        yield sys.stdout.buffer
        return
    try:
        file = output.open("r+b" if output.exists() else "w+b")
    except OSError as error:
        raise UsageError(f"{output}: cannot be written", found=error.strerror) from None
    with file:
        yield file
