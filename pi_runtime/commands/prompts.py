"""Answering a file of prompts: a JSON object a line in, one a line out, in the same order; an output can be continued.

in    {"prompt": "Once upon"}  or  {"messages": [{"role": "user", "content": "Hello"}]}
      and for this line alone an id, and settings by the names of the flags (`KEYS`)
out   {"index": 0, "id": …, "prompt_tokens": …, "text": …, "finish_reason": …, "generated_tokens": …, "digest": …}
      with seed where tokens were drawn, logprobs and prompt_logprobs where they are asked for; of several answers each
      has its own in the list answers; a line that cannot be answered is {"index": 0, "id": …, "error": …, "digest": …}
"""

import hashlib
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from pi_runtime.artifact.decoding import canonical_json
from pi_runtime.engine.engine import Engine
from pi_runtime.engine.model import Model
from pi_runtime.engine.stream import Scores, Stream
from pi_runtime.errors import InputError, PiError, PromptError, Setting, UsageError, read_error, write_error
from pi_runtime.sequence.sampling import Sampling, TokenLogprobs, parse_logit_bias
from pi_runtime.text.grammar import Grammar

if sys.platform != "win32":
    import fcntl

SAMPLING_KEYS = frozenset(field.name for field in fields(Sampling)) - {"number"}
ANSWER_KEYS = frozenset({"max_tokens", "min_tokens", "stop", "logprobs"})
GRAMMAR_KEYS = frozenset({"json_schema", "regex", "lark"})
SPACING = "fixed_separators"
KEYS = SAMPLING_KEYS | ANSWER_KEYS | GRAMMAR_KEYS | {SPACING, "id", "prompt", "messages", "prompt_logprobs", "answers"}
INTEGERS = ("max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "answers")
AHEAD = 256
"""Prompts handed to the engine before the oldest of them is answered."""


@dataclass(frozen=True)
class _Pending:
    """The answers and log-probabilities that a line of prompts waits for."""

    model: Model
    streams: Sequence[Stream]
    scores: Scores | None
    logprobs: bool

    def result(self) -> dict[str, Any]:
        """The fields of the output for this line; waits for its answers."""
        answers = [self._answer(stream) for stream in self.streams]
        found: dict[str, Any] = {"prompt_tokens": self.streams[0].stats.prompt_tokens}
        found |= answers[0] if len(answers) == 1 else {"answers": answers}
        if self.streams[0].seed is not None:
            found["seed"] = self.streams[0].seed
        if self.scores is not None:
            found["prompt_logprobs"] = logprobs_json(self.model, self.scores.result())
        return found

    def _answer(self, stream: Stream) -> dict[str, Any]:
        found: dict[str, Any] = {
            "text": "".join(stream),
            "finish_reason": stream.finish_reason,
            "generated_tokens": stream.stats.generated_tokens,
        }
        if self.logprobs:
            found["logprobs"] = logprobs_json(self.model, stream.logprobs)
        return found


@dataclass(frozen=True)
class _Line:
    """A line of the input that has been handed to the engine, or has failed."""

    head: dict[str, Any]
    digest: str
    found: _Pending | PiError

    def result(self) -> dict[str, Any]:
        """The line of the output; waits for the answers."""
        found = self.found
        if isinstance(found, _Pending):
            try:
                return {**self.head, **found.result(), "digest": self.digest}
            except PiError as error:
                found = error
        return {**self.head, "error": str(found), "digest": self.digest}


class PromptFile:
    """A file of prompts, and how one model answers them.

    `settings`: values by the names of `KEYS`, for every line that has none of its own; None is the default.
    """

    def __init__(self, path: Path, model: Model, settings: Mapping[str, Any]) -> None:
        self._path, self._model, self._settings = path, model, settings
        try:
            data = path.read_bytes()
        except OSError as error:
            raise read_error(
                Setting("prompts", path), error, 'name a file of lines like {"prompt": "Once upon a time"}'
            ) from None
        lines = data.splitlines()
        self._lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        # What an answer depends on, beside its line: an output is continued only if all of it is the same.
        manifest = hashlib.sha256(canonical_json(model.manifest)).hexdigest()
        run = [manifest, model.mode, model.context, model.executor.new_pool().format]
        self._common = json.dumps([*run, dict(settings)]).encode()

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
        found: _Pending | PiError
        try:
            request = _parsed(line, f"{self._path}, line {number}")
            if "id" in request:
                head["id"] = request["id"]
            common = dict(self._settings)
            if GRAMMAR_KEYS & request.keys():
                common |= dict.fromkeys(GRAMMAR_KEYS)
            found = self._submitted(engine, {**common, **request})
        except PiError as error:
            found = error
        return _Line(head, self._digest(line), found)

    def _submitted(self, engine: Engine, request: dict[str, Any]) -> _Pending:
        chosen = {key: request[key] for key in SAMPLING_KEYS & request.keys()}
        settings: Any = {key: request[key] for key in ANSWER_KEYS & request.keys()}
        settings["grammar"] = Grammar.of(**{key: request[key] for key in {*GRAMMAR_KEYS, SPACING} & request.keys()})
        settings["sampling"] = Sampling.from_generation_config(self._model.manifest.generation, **chosen)
        prompt = request["prompt"] if "prompt" in request else self._model.chat_prompt(request["messages"])
        top, scores = request.get("prompt_logprobs"), None
        streams = engine.generate_many(prompt, request.get("answers", 1), **settings)
        if top is not None:
            scores = engine.score(prompt, top=top)
        return _Pending(self._model, streams, scores, settings.get("logprobs") is not None)

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
    if isinstance(request.get("stop"), str):
        request["stop"] = [request["stop"]]
    if isinstance(bias := request.get("logit_bias"), dict):
        request["logit_bias"] = parse_logit_bias(bias.items())
    for key, expected, ok in (
        ("prompt", "text", isinstance(request.get("prompt", ""), str)),
        ("messages", "a list of objects with role and content, both text", _are_messages(request.get("messages", []))),
        ("stop", "text, or a list of texts", isinstance(request.get("stop", []), list)),
        *((key, "an integer", type(request.get(key, 1)) is int) for key in INTEGERS),
    ):
        if not ok:
            raise PromptError(f"{where}: {key}", expected=expected, found=repr(request[key])[:80])
    return request


def logprobs_json(model: Model, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Log-probabilities as JSON has them: a token's id and text, its log-probability, and the likeliest in its place.

    A token of probability 0 has null.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token,
            "token": model.tokenizer.token_bytes(token).decode(errors="backslashreplace"),
            "logprob": logprob if math.isfinite(logprob) else None,
        }

    return [{**entry(x.token, x.logprob), "top": [entry(*likely) for likely in x.top]} for x in logprobs]


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
    if output.exists() and not (output.is_file() or output.is_dir()):
        raise UsageError(
            f"{output}: not a file, and an output is read before it is continued",
            remedy="name a file; without one the answers go to stdout",
        )
    try:
        file = output.open("r+b" if output.exists() else "w+b")
    except OSError as error:
        raise write_error(output, error) from None
    with file:
        _hold(file, output)
        yield file


def _hold(file: BinaryIO, output: Path) -> None:
    """Keep others from continuing the same output. Raises UsageError where another does."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{output}: another process writes answers to it", remedy="wait until it ends, or name another output"
        ) from None
    except OSError:
        pass  # a file system without locks
