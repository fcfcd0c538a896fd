"""A talk on the terminal, through the model's own chat template."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from pi_runtime import console
from pi_runtime.commands.printing import Report, print_stats, stream
from pi_runtime.errors import PromptError

if TYPE_CHECKING:
    from pi_runtime.engine.generation import Generation
    from pi_runtime.engine.model import Model


def chat(model: "Model", generate: Callable[..., "Generation"], system: str | None, report: Report | None) -> None:
    """Answer each line that is typed, until an empty one or the end of input."""
    _ = model.chat_template  # before anybody types: a model without one cannot talk
    messages = [{"role": "system", "content": system}] if system else []
    cache = model.new_cache()
    console.say("Your turn; an empty line or end of input ends the talk.")
    while line := _read_turn():
        messages.append({"role": "user", "content": line})
        answer = generate(model.chat_prompt(messages), cache=cache)
        messages.append({"role": "assistant", "content": stream(answer)})
        if answer.finish_reason == "context":
            console.say(f"(the context of {model.context} tokens is full; start again, or raise --ctx-size)")
            return
        if report is not None:
            print_stats(model, report(answer))


def _read_turn() -> str:
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return read_text(sys.stdin.readline).strip()


def read_text(read: Callable[[], str]) -> str:
    """What is read from stdin. Raises PromptError for what is no text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise PromptError("the text on stdin cannot be decoded", expected=error.encoding, found=error) from None
