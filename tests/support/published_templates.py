"""Renders conversations by all chat templates of a folder, beside transformers: `python published_templates.py FOLDER`.

FOLDER holds them, or the source of llama.cpp. PYTHONPATH names the folder `tests`.

Prints, for each template and each conversation, which words are lost here and there, and where a prompt in which
transformers loses nothing is another one here. Exit code 1 where a word is lost without an error, or a request that
transformers renders whole is refused.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_runtime.engine.history import one_form
from pi_runtime.engine.prompt_writer import PromptWriter
from pi_runtime.engine.tools.output import tools_of
from pi_runtime.errors import InputError
from pi_runtime.text.chat_template import ChatTemplate
from pi_runtime.text.sandbox import SandboxLimits
from support.conversations import CONVERSATIONS, HOURS, lost

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
LIMITS = SandboxLimits(seconds=60.0)


@dataclass(frozen=True)
class Rendered:
    """A prompt or an error, and the words that it lacks."""

    text: str | None
    lost: tuple[str, ...]
    error: str = ""

    def __str__(self) -> str:
        return f"error: {self.error}" if self.text is None else f"loses {' '.join(self.lost)}" if self.lost else "whole"


@dataclass(frozen=True)
class Comparison:
    """One conversation by one template, here and there."""

    template: str
    conversation: str
    has_tools: bool
    ours: Rendered
    theirs: Rendered
    tools_as_text: bool
    """Whether messages tell of the tools: then the two prompts differ."""

    @property
    def is_lost(self) -> bool:
        """Whether words are lost here, without an error or where the other renders the whole."""
        return bool(self.ours.lost) or (
            self.ours.text is None and self.theirs.text is not None and not self.theirs.lost
        )

    @property
    def differs(self) -> bool:
        """Whether the prompts differ though nothing needed help."""
        is_whole = self.theirs.text is not None and not self.theirs.lost
        return is_whole and not self.tools_as_text and self.ours.text != self.theirs.text


def ours(template: ChatTemplate, messages: list[Any], tools: list[Any], words: str, *, tools_as_text: bool) -> Rendered:
    """A conversation as this project renders it."""
    writer = PromptWriter(
        template, tools=tools, tools_as_text=tools_as_text, variables=VARIABLES, add_generation_prompt=True
    )
    try:
        text = writer.write(one_form(messages))
    except InputError as error:
        return Rendered(None, (), " ".join(str(error).split())[:120])
    return Rendered(text, tuple(lost(text, words)))


def theirs(source: str, messages: list[Any], tools: list[Any], words: str) -> Rendered:
    """The same by transformers, which drops keys that are None before it renders. Arguments are objects there."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in given:
        if "tool_calls" in message:
            message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    try:
        (text,), _ = render_jinja_template(
            [given], tools or None, chat_template=source, add_generation_prompt=True, **VARIABLES
        )
    except Exception as error:  # templates raise what they like
        return Rendered(None, (), str(error)[:120])
    return Rendered(text, tuple(lost(text, words)))


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def compare(file: Path) -> list[Comparison]:
    """All conversations by one template, with tools and without."""
    source, found = file.read_bytes().decode(), []
    with ChatTemplate(source, LIMITS) as template:
        form = tools_of(template)
        for name, (messages, words) in CONVERSATIONS.items():
            for tools in ([], [HOURS]):
                tools_as_text = form is not None and form.is_generic
                here = ours(template, messages, tools, words, tools_as_text=tools_as_text)
                there = theirs(source, messages, tools, words)
                found.append(Comparison(file.stem, name, bool(tools), here, there, bool(tools) and tools_as_text))
    return found


def main(folder: Path) -> int:
    """Compare, print, and return the exit code."""
    bad, counts = 0, Counter[str]()
    files = [*folder.glob("*.jinja")] or [*folder.rglob("models/templates/*.jinja")]
    for file in sorted(files):
        for one in compare(file):
            bad += one.is_lost
            counts["whole here"] += not one.ours.lost and one.ours.text is not None
            counts["refused here"] += one.ours.text is None
            counts["whole in transformers"] += not one.theirs.lost and one.theirs.text is not None
            counts["all"] += 1
            if one.is_lost or one.differs or one.ours.text is None:
                kind = "LOST" if one.is_lost else "REFUSED" if one.ours.text is None else "DIFFERS"
                tools = "with tools" if one.has_tools else "without tools"
                print(f"{kind} {one.template}: {one.conversation}, {tools}: {one.ours}; transformers: {one.theirs}")
    print(
        ", ".join(f"{name} {counts[name]}" for name in ("all", "whole here", "refused here", "whole in transformers"))
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
