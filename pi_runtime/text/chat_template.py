"""A model's chat template, rendered as transformers' `apply_chat_template` does, in a process of its own.

A template is a program that came with the model. It runs sandboxed in a child (`_template_worker.py`) with no
environment, no files and bounded memory, and this side ends it when its time or its output runs out. Starting a child
takes longer than most renderings, so it stays for the next one. Where the system has no `resource` module (Windows),
memory is not bounded.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pi_runtime.errors import MissingExtraError, PromptError, TemplateError, UsageError

CHILD = Path(__file__).with_name("_template_worker.py")
START_SECONDS = 60.0  # for the child's imports, which are not the template's fault
REPLY_BYTES = 65536  # a reply beside its text
ESCAPE = 6  # most bytes of JSON for one byte of text: \u0000
# What a Python needs to start, and the zone of strftime_now; the rest, secrets included, is no template's business.
KEPT_VARIABLES = ("SYSTEMROOT", "LD_LIBRARY_PATH", "TZ")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the usual one first."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one rendering."""

    seconds: float = 2.0
    """Wall time, the start of the process not counted."""
    memory_bytes: int = 256 << 20
    """Address space of the child, Python included (about 25 MiB)."""
    output_bytes: int = 1 << 20
    """The rendered text in UTF-8."""


class ChatTemplate:
    """One template and the process that renders it, which starts with the first rendering.

    Threads take turns. A context manager; closing it, or dropping the last reference, ends the process.

    >>> with ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}") as template:
    ...     template.render([{"role": "user", "content": "hi"}], variables={"bos_token": "<s>"})
    '<s>hi'
    """

    def __init__(self, source: str, limits: Limits = Limits()) -> None:
        self.source, self._limits = source, limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_told = False
        """Whether the child has the template."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the prompt for `messages`, each {"role": …, "content": …} and what else the template knows.

        Content is text; a message with `tool_calls` may have none. `tools` are the JSON of functions, as OpenAI's API
        has them. `variables` are the template's further names (bos_token, enable_thinking, …), JSON values; one that is
        None is left undefined. Raises PromptError for malformed messages, UsageError for a variable that has a name of
        these arguments, TemplateError for a template that fails, with the line, or exceeds a limit, with the limit.
        """
        names = {name: value for name, value in variables.items() if value is not None}
        # A template sees `tools` and `documents` as transformers shows them where there are none.
        given = {
            "messages": [_with_reasoning(_checked(n, m)) for n, m in enumerate(messages)],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if not messages:
            raise PromptError("a chat without messages", expected='at least one {"role": …, "content": …}')
        if taken := given.keys() & names:
            raise UsageError(f"the template's variable {min(taken)} is given otherwise")
        try:
            request = json.dumps({"variables": names | given}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError("messages, tools and variables of a chat must be JSON", found=str(error)[:200]) from None
        with self._lock:
            reply = self._exchange(request)
        if "error" in reply:
            where = "" if reply["line"] is None else f" at line {reply['line']}"
            raise TemplateError(f"the chat template failed{where}", found=_printable(reply["error"]))
        text: str = reply["text"]
        return text

    def start(self) -> None:
        """Start the process now, so that the first rendering does not wait for it."""
        with self._lock:
            self._ready_child()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, request: bytes) -> dict[str, Any]:
        """Hand the child a request and return its reply. A child without one, or without memory, ends."""
        child = self._ready_child()
        if not self._is_told:
            self._is_told = True
            request = json.dumps({"template": self.source}).encode() + b"\n" + request
        assert child.stdin
        assert child.stdout
        longest = ESCAPE * self._limits.output_bytes + REPLY_BYTES
        reply = None
        try:
            with _alarm(child, self._limits.seconds) as late:
                with suppress(OSError):  # the child is gone: its missing reply says so
                    child.stdin.write(request + b"\n")
                    child.stdin.flush()
                line = child.stdout.readline(longest + 1)
            if len(line) <= longest and not late.is_set():
                reply = _parse(line)
        finally:
            if reply is None or reply.get("limit") == "memory":
                self._end()
        if late.is_set() or child.returncode == -getattr(signal, "SIGXCPU", 0):
            raise _exceeded("time", self._limits)
        if len(line) > longest:
            raise _exceeded("output", self._limits)
        if reply is None:
            raise TemplateError(
                "the process rendering the chat template ended without an answer, most likely out of memory",
                found=f"exit status {child.returncode}",
            )
        if "limit" in reply:
            raise _exceeded(reply["limit"], self._limits)
        return reply

    def _ready_child(self) -> "subprocess.Popen[bytes]":
        if self._child is not None and _has_ended(self._child):
            self._end()  # somebody else has ended it
        if self._child is None:
            self._child, self._is_told = _start(self._limits), False
            self._finalizer = weakref.finalize(self, _end, self._child)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child = None
            self._finalizer()


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
    limits: Limits = Limits(),
) -> str:
    """Render one prompt by a template that is not kept."""
    with ChatTemplate(template, limits) as kept:
        return kept.render(messages, variables=variables, add_generation_prompt=add_generation_prompt)


def _checked(n: int, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message or not message.keys() & {"content", "tool_calls"}:
        raise PromptError(f"message {n} of the chat", expected='{"role": …, "content": …}', found=repr(message)[:80])
    for key in ("role", "content"):
        value = message.get(key)
        may_miss = key == "content" and value is None and message.get("tool_calls")
        if not isinstance(value, str) and not may_miss:
            raise PromptError(f"message {n} of the chat: {key}", expected="text", found=type(value).__name__)
    return message


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under each name by which templates know it, as transformers gives it."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return dict(message) if found is None else {"thinking": found, **message, "reasoning_content": found}


def _parse(reply: bytes) -> dict[str, Any] | None:
    """Parse the child's reply. It is checked as if the template had written it: a sandbox can have holes."""
    try:
        value = json.loads(reply)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"text": str()} | {"limit": "memory" | "output"} | {"error": str(), "line": int() | None}:
            return dict(value)
    return None


def _start(limits: Limits) -> "subprocess.Popen[bytes]":
    """A child that is ready for the template."""
    numbers = (limits.seconds, limits.memory_bytes, limits.output_bytes)
    command = [sys.executable, "-I", "-S", "-B", str(CHILD), *map(str, numbers), *_jinja2_folders()]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept_variables(),
            start_new_session=True,
        )
    except OSError as error:
        raise TemplateError(f"cannot start {sys.executable} to render the chat template", found=error) from None
    assert child.stdout
    with _alarm(child, START_SECONDS):
        ready = child.stdout.read(1)
    if not ready:
        _end(child)
        raise TemplateError(
            "the process that renders chat templates did not start",
            found=f"{sys.executable} ended with {child.returncode}",
            remedy="`pi-compile doctor`; reinstall jinja2",
        )
    return child


def kept_variables() -> dict[str, str]:
    """The environment of a child that runs what others wrote."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a child and all that it started; nothing of it is left."""
    _kill(child)
    with suppress(OSError), child:  # what could not be written to it
        pass


def _jinja2_folders() -> list[str]:
    """Folders in which the child finds jinja2, which an isolated Python does not. Nothing is imported here."""
    folders = []
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise MissingExtraError(f"chat templates need {name}", remedy=f"pip install {name}")
        folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))


@contextmanager
def _alarm(child: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Kill the child after `seconds`, which ends every read and write that waits for it; the event is set then."""
    rang = threading.Event()

    def ring() -> None:
        rang.set()
        _kill(child)

    timer = threading.Timer(seconds, ring)
    timer.start()
    try:
        yield rang
    finally:
        timer.cancel()
        timer.join()


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended. It is not waited for where the system can tell so: its number stays its own."""
    if child.returncode is None and hasattr(os, "waitid"):
        with suppress(ChildProcessError):  # this process ignores its children's ends
            return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return child.poll() is not None


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group, unless it has been waited for: its number may be another's by then."""
    if child.returncode is not None:
        return
    with suppress(OSError):  # it has ended by itself
        if sys.platform == "win32":
            child.kill()
        else:
            os.killpg(child.pid, signal.SIGKILL)


def _exceeded(limit: str, limits: Limits) -> TemplateError:
    allowed = {
        "time": f"at most {limits.seconds:g} s",
        "memory": f"at most {limits.memory_bytes} bytes",
        "output": f"at most {limits.output_bytes} bytes",
    }
    return TemplateError(f"the chat template exceeds its {limit} limit", expected=allowed[limit])


def _printable(message: str) -> str:
    """The message without control characters: a template must not write to the terminal through its error."""
    return "".join(c if c.isprintable() else " " for c in message)
