"""A model's chat template, rendered as transformers' `apply_chat_template` does, in a process of its own.

A template is a program that came with the model. It runs sandboxed by jinja2 in a child (`_template_worker.py`) that is
confined itself (`sandbox.py`).
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from queue import LifoQueue
from typing import Any, Self

from pi_runtime.errors import MissingExtraError, PromptError, TemplateError, UsageError
from pi_runtime.text.sandbox import Sandbox, SandboxEndedError, SandboxLimitError, SandboxLimits, SandboxStartError
from pi_runtime.text.template_abilities import UNKNOWN, Abilities, abilities_of

CHILD = Path(__file__).with_name("_template_worker.py")
CHILDREN = 2
"""Processes that render one template: a chat that takes long leaves one to others' chats."""
PROBES = 3
"""All renderings that find out what a template can show may take as long together as so many may."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the usual one first."""
PLACEHOLDERS = {"bos_token": "", "eos_token": ""}
"""Names that templates count on."""


def dates() -> dict[str, str]:
    """Today, by the names that templates of Llama 3 and Firefunction know; without these they name a day of 2024."""
    return {"date_string": time.strftime("%d %b %Y"), "datetime": time.strftime("%b %d %Y")}


class ChatTemplate:
    """One template and the processes that render it: one that starts with the first rendering, and another where that
    one is busy.

    Further threads take turns. A context manager; closing it, or dropping the last reference, ends the processes.

    >>> with ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}") as template:
    ...     template.render([{"role": "user", "content": "hi"}], variables={"bos_token": "<s>"})
    '<s>hi'
    """

    def __init__(self, source: str, limits: SandboxLimits = SandboxLimits()) -> None:
        self.source, self.limits = source, limits
        libraries, first = ("jinja2", "markupsafe"), {"template": source}
        self._sandboxes = [Sandbox(CHILD, libraries, limits, first=first) for _ in range(CHILDREN)]
        self._free = LifoQueue[Sandbox]()
        for sandbox in reversed(self._sandboxes):
            self._free.put(sandbox)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        seconds: float = math.inf,
    ) -> str:
        """Render the prompt for `messages`, each {"role": …, "content": …} and what else the template knows.

        Content is text, or a list of parts with `text`; an assistant's message may have none. `tools` are the JSON of
        functions, as OpenAI's API has them. `variables` are the template's further names (bos_token, enable_thinking,
        …), JSON values; one that is None is left undefined. `seconds`: time for it, if that is less than usual. Raises
        PromptError for malformed messages, UsageError for a variable that has a name of these arguments, TemplateError
        for a template that fails, with the line, or exceeds a limit, with the limit.
        """
        for n, message in enumerate(messages):
            check_message(n, message)
        names = {name: value for name, value in variables.items() if value is not None}
        given = _given(messages, tools, add_generation_prompt)
        if not messages:
            raise PromptError("a chat without messages", expected='at least one {"role": …, "content": …}')
        if taken := given.keys() & names:
            raise UsageError(f"the template's variable {min(taken)} is given otherwise")
        reply = self._reply(names | given, seconds)
        if "error" in reply:
            where = "" if reply["line"] is None else f" at line {reply['line']}"
            raise TemplateError(f"the chat template failed{where}", found=_printable(reply["error"]))
        text: str = reply["text"]
        return text

    def attempt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        seconds: float = math.inf,
    ) -> str | None:
        """Render a prompt as `render` does; None where the template fails by itself, and not by a limit."""
        given = _given(messages, tools, add_generation_prompt)
        text: str | None = self._reply({**PLACEHOLDERS, **variables, **given}, seconds).get("text")
        return text

    @cached_property
    def abilities(self) -> Abilities:
        """What the template can show, found once, by rendering; one that takes too long is not probed further."""
        until = time.monotonic() + PROBES * self.limits.seconds
        try:
            return abilities_of(lambda *what, **given: self.attempt(*what, **given, seconds=until - time.monotonic()))
        except TemplateError:
            return UNKNOWN

    def _reply(self, variables: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        sandbox = self._free.get()
        try:
            with _errors_of_processes():
                return sandbox.ask({"variables": variables}, seconds)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError("messages, tools and variables of a chat must be JSON", found=str(error)[:200]) from None
        except SandboxLimitError as error:
            message = f"the chat template exceeds its {error.limit} limit"
            raise TemplateError(message, expected=self.limits.allowed(error.limit)) from None
        finally:
            self._free.put(sandbox)

    def start(self) -> None:
        """Start the process now, so that the first rendering does not wait for it."""
        with _errors_of_processes():
            self._sandboxes[0].start()

    def close(self) -> None:
        """End the processes."""
        for sandbox in self._sandboxes:
            sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _given(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
) -> dict[str, Any]:
    """What a template gets besides variables; without tools and documents it is what transformers shows."""
    return {
        "messages": [*map(_with_reasoning, messages)],
        "tools": None if tools is None else list(tools),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }


def check_message(n: int, message: Any) -> None:
    """Raise PromptError for what is no message: an assistant's, and one with calls, may have no content."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise PromptError(f"message {n} of the chat", expected='{"role": …, "content": …}', found=repr(message)[:80])
    role, content = message["role"], message.get("content")
    if not isinstance(role, str):
        raise PromptError(f"message {n} of the chat: role", expected="text", found=type(role).__name__)
    may_miss = role == "assistant" or message.get("tool_calls")
    if not isinstance(content, str) and not _are_parts(content) and not (content is None and may_miss):
        raise PromptError(f"message {n} of the chat: content", expected="text", found=type(content).__name__)


def _are_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    )


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under each name by which templates know it, as transformers gives it."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return dict(message) if found is None else {"thinking": found, **message, "reasoning_content": found}


@contextmanager
def _errors_of_processes() -> Iterator[None]:
    """What may go wrong with a process that renders templates, as errors say it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"chat templates need {error.name}", remedy=f"pip install {error.name}") from None
    except SandboxStartError as error:
        raise TemplateError(
            "the process that renders chat templates did not start",
            found=str(error),
            remedy="`pi-compile doctor`; reinstall jinja2",
        ) from None
    except SandboxEndedError as error:
        raise TemplateError(
            "the process rendering the chat template ended without an answer, most likely out of memory",
            found=str(error),
        ) from None


def _printable(message: str) -> str:
    """The message without control characters: a template must not write to the terminal through its error."""
    return "".join(c if c.isprintable() else " " for c in message)
