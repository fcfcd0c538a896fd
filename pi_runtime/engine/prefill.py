"""An assistant's message that the answer goes on from: the prompt ends with its text, whatever that is.

The message is rendered with a text that nobody has in place of its own, so that the prompt up to there is known: what
the template does with a text (many trim it, some leave its thoughts out) does not matter then. Where the template
begins thoughts for the message, and the text has thoughts of its own, the template's empty ones are left out.
"""

import re
from collections.abc import Sequence

from pi_runtime.engine.history import Message
from pi_runtime.engine.tools.reasoning import ReasoningFormat
from pi_runtime.errors import Setting, UsageError

CONTINUE = Setting("continue_final_message")


def taken_out(messages: Sequence[Message], place: str) -> tuple[list[Message], str]:
    """Messages in one form (see `history`), with `place` for the text of the last one, and that text.

    Raises UsageError where the last one is no assistant's.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        found = repr(last.get("role"))[:80]
        raise UsageError("the last message must be an assistant's", setting=CONTINUE, found=found)
    return [*messages[:-1], {**last, "content": place}], last["content"]


def before(place: str, rendered: str, text: str, reasoning: ReasoningFormat | None) -> str:
    """The rendered prompt before the text that `place` stands for. Raises UsageError where it stands nowhere."""
    begin, found, _ = rendered.rpartition(place)
    if not found:
        raise UsageError("the model's chat template does not show the last message's text", setting=CONTINUE)
    begin = begin.replace(place, text)  # a template may show it before, too
    if reasoning is None or reasoning.answer:
        return begin
    empty = re.search(rf"{re.escape(reasoning.begin)}(\s*){re.escape(reasoning.end)}\s*\Z", begin[-1000:])
    if empty is None:
        return begin
    kept = len(begin) - len(empty[0])
    if text.lstrip().startswith(reasoning.begin):
        return begin[:kept]
    if reasoning.end in text:  # its thoughts have begun where the template begins them
        return begin[: kept + len(reasoning.begin) + len(empty[1]) // 2]
    return begin
