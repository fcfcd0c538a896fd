"""A model's chat template, rendered as transformers' `apply_chat_template` does, in a process of its own.

A template is a program that came with the model. It runs sandboxed in a child (`_template_worker.py`) with no
environment, no files and bounded memory, and this side ends it when its time or its output runs out. Where the system
has no `resource` module (Windows), memory is not bounded.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_runtime.errors import MissingExtraError, PromptError, TemplateError

CHILD = Path(__file__).with_name("_template_worker.py")
START_SECONDS = 60.0  # for the child's imports, which are not the template's fault
REPLY_BYTES = 65536  # a reply beside its text
ESCAPE = 6  # most bytes of JSON for one byte of text: \u0000
# What a Python needs to start, and the zone of strftime_now; the rest, secrets included, is no template's business.
KEPT_VARIABLES = ("SYSTEMROOT", "LD_LIBRARY_PATH", "TZ")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one rendering."""

    seconds: float = 2.0
    """Wall time, the start of the process not counted."""
    memory_bytes: int = 256 << 20
    """Address space of the child, Python included (about 25 MiB)."""
    output_bytes: int = 1 << 20
    """The rendered text in UTF-8."""


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
    limits: Limits = Limits(),
) -> str:
    """Render the prompt for `messages`, each {"role": …, "content": …}.

    `variables` are the template's further names (bos_token, eos_token, …), JSON values; one that is None is left
    undefined. Raises PromptError for malformed messages, TemplateError for a template that fails, with the line, or
    exceeds a limit, with the limit.
    """
    _check_messages(messages)
    names = {name: value for name, value in variables.items() if value is not None}
    # A template sees `tools` and `documents` as transformers shows them where there are none.
    names |= {"messages": [dict(m) for m in messages], "tools": None, "documents": None}
    names["add_generation_prompt"] = add_generation_prompt
    reply = _exchange(json.dumps({"template": template, "variables": names}).encode(), limits)
    if "error" in reply:
        where = "" if reply["line"] is None else f" at line {reply['line']}"
        raise TemplateError(f"the chat template failed{where}", found=_printable(reply["error"]))
    if "limit" in reply:
        raise _exceeded(reply["limit"], limits)
    text: str = reply["text"]
    return text


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise PromptError("a chat without messages", expected='at least one {"role": …, "content": …}')
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise PromptError(
                f"message {n} of the chat", expected='{"role": …, "content": …}', found=repr(message)[:80]
            )
        for key, value in message.items():
            if not isinstance(value, str):
                raise PromptError(f"message {n} of the chat: {key}", expected="text", found=type(value).__name__)


def _exchange(request: bytes, limits: Limits) -> dict[str, Any]:
    """Start a child, hand it the request, and return its reply. Whatever happens, no child is left."""
    longest = ESCAPE * limits.output_bytes + REPLY_BYTES
    with _child(limits) as child:
        assert child.stdin
        assert child.stdout
        try:
            with _alarm(child, START_SECONDS):
                ready = child.stdout.read(1)
            with _alarm(child, limits.seconds) as late:
                with suppress(OSError):  # the child is gone: its missing reply says so
                    child.stdin.write(request)
                    child.stdin.close()
                reply = child.stdout.read(longest + 1)
        finally:
            _kill(child)
    if not ready:
        raise TemplateError(
            "the process that renders chat templates did not start",
            found=f"{sys.executable} ended with {child.returncode}",
            remedy="`pi-compile doctor`; reinstall jinja2",
        )
    if late.is_set() or child.returncode == -getattr(signal, "SIGXCPU", 0):
        raise _exceeded("time", limits)
    if len(reply) > longest:
        raise _exceeded("output", limits)
    return _parse(reply, child.returncode)


def _parse(reply: bytes, returncode: int) -> dict[str, Any]:
    """Parse the child's reply. It is checked as if the template had written it: a sandbox can have holes."""
    try:
        value = json.loads(reply)
    except (ValueError, RecursionError):
        value = None
    match value:
        case {"text": str()} | {"limit": "memory" | "output"} | {"error": str(), "line": int() | None}:
            return dict(value)
    raise TemplateError(
        "the process rendering the chat template ended without an answer, most likely out of memory",
        found=f"exit status {returncode}",
    )


@contextmanager
def _child(limits: Limits) -> Iterator[subprocess.Popen[bytes]]:
    numbers = (limits.seconds, limits.memory_bytes, limits.output_bytes)
    command = [sys.executable, "-I", "-S", "-B", str(CHILD), *map(str, numbers), *_jinja2_folders()]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
            start_new_session=True,
        )
    except OSError as error:
        raise TemplateError(f"cannot start {sys.executable} to render the chat template", found=error) from None
    with process:
        yield process


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


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group. It has not been waited for, so its number is still its own."""
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
