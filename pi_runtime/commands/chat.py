"""A talk on the terminal, through the model's own chat template."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_runtime import console
from pi_runtime.commands.printing import Report, print_stats, stream
from pi_runtime.errors import PiError, PromptError
from pi_runtime.text.chat_template import dates

if TYPE_CHECKING:
    from pi_runtime.engine.generation import Generation
    from pi_runtime.engine.model import Model
    from pi_runtime.engine.tools.output import OutputFormat, OutputParser
    from pi_runtime.sequence.settings import AnswerSettings

_SAMPLING = {**dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float), "top_k": int, "seed": int}
"""Settings of how tokens are drawn that a talk may change, and how they are read."""
HELP = """\
/clear           begin anew; the system message stays
/system TEXT     set the system message, and begin anew
/save FILE       write the talk as JSON
/load FILE       go on with a saved talk
/set NAME VALUE  a setting of the answers to come: max_tokens, temperature, top_k, top_p, min_p, seed, …
/stats           figures of the last answer
/bye             end, as an empty line does
\"\"\"              begins and ends a message of several lines; Ctrl-C stops an answer"""


def chat(
    model: "Model",
    generate: Callable[..., "Generation"],
    settings: "AnswerSettings",
    system: str | None,
    report: Report,
    stats: bool,
) -> None:
    """Answer each message that is typed, until an empty line, /bye or the end of input."""
    model.chat_template.start()  # before anybody types: a model without one cannot talk
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401 (lines can be edited, and called back)
    talk = _Talk(model, generate, settings, report, stats, model.output)
    talk.begin(system)
    console.say("Your turn; an empty line or end of input ends the talk, /help shows more.")
    while (text := _read_message()) and text != "/bye":
        if text.startswith("/"):
            talk.command(*text.partition(" ")[::2])
        elif not talk.answer(text):
            return


@dataclass
class _Talk:
    """The messages so far, and what answers them."""

    model: "Model"
    generate: Callable[..., "Generation"]
    settings: "AnswerSettings"
    report: Report
    shows_stats: bool
    output: "OutputFormat"
    """How the template's answers are told apart: thoughts and text."""
    messages: list[dict[str, str]] = field(default_factory=list)
    last: "Generation | None" = None

    def begin(self, system: str | None, messages: list[dict[str, str]] | None = None) -> None:
        self.messages = messages or ([{"role": "system", "content": system}] if system else [])
        self.cache = self.model.new_cache()

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else {}
        return first.get("content") if first.get("role") == "system" else None

    def answer(self, text: str) -> bool:
        """Answer a message. False where the context is full."""
        self.messages.append({"role": "user", "content": text})
        prompt = self.model.chat_prompt(self.messages, variables=dates())
        shown = self.output.shown_tokens()
        self.last = answer = self.generate(prompt, cache=self.cache, shown_tokens=shown, **self.settings)
        parts: list[str] = []
        try:
            stream(_text(self.output.parser(prompt), answer), parts)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            self.cache = self.model.new_cache()  # a step may have been cut in two
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        if answer.finish_reason == "context":
            console.say(f"(the context of {self.model.context} tokens is full; start again, or raise --ctx-size)")
            return False
        if self.shows_stats:
            print_stats(self.model, self.report(answer))
        return True

    def command(self, name: str, rest: str) -> None:
        """Carry out a line that begins with a slash."""
        rest = rest.strip()
        try:
            if name == "/clear":
                self.begin(self.system)
            elif name == "/system":
                self.begin(rest or None)
            elif name == "/save" and rest:
                Path(rest).write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
            elif name == "/load" and rest:
                self.begin(None, _messages(json.loads(Path(rest).read_text("utf-8"))))
            elif name == "/set" and rest:
                self.set(*rest.replace("=", " ").split())
            elif name == "/stats" and self.last is None:
                console.say("no answer yet")
            elif name == "/stats" and self.last is not None:
                print_stats(self.model, self.report(self.last))
            else:
                console.say(HELP)
        except (OSError, ValueError, PiError) as error:  # the talk goes on
            console.say(f"{name} {rest}: {error}")

    def set(self, name: str, value: str = "", *_: str) -> None:
        """Give the answers to come another setting. Raises ValueError or UsageError for one that cannot be."""
        known = {"max_tokens": int, **_SAMPLING}
        if name not in known:
            raise ValueError(f"no setting of a talk; those are {', '.join(known)}")
        number, sampling = known[name](value), self.settings["sampling"]
        if name == "max_tokens":
            self.settings = {**self.settings, "max_tokens": number}
        elif sampling is not None:
            self.settings = {**self.settings, "sampling": replace(sampling, **{name: number})}


def _messages(loaded: Any) -> list[dict[str, str]]:
    """The messages of a saved talk. Raises ValueError for anything else."""
    if not isinstance(loaded, list) or not all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and all(isinstance(v, str) for v in m.values())
        for m in loaded
    ):
        raise ValueError("not a saved talk: a list of messages, each with role and content")
    return loaded


def _text(parser: "OutputParser", answer: Iterable[str]) -> Iterator[str]:
    """The text of an answer; what the model thinks before it goes to stderr as it comes."""
    from pi_runtime.engine.events import ReasoningDelta, TextDelta

    thinks = False
    for delta in chain.from_iterable(chain(map(parser.push, answer), (parser.finish() for _ in range(1)))):
        if isinstance(delta, ReasoningDelta):
            console.say_softly(delta.text)
        elif thinks:
            console.say("")
        thinks = isinstance(delta, ReasoningDelta)
        if isinstance(delta, TextDelta):
            yield delta.text
    if thinks:
        console.say("")


def _read_message() -> str:
    """A line; or lines between two of three quotation marks."""
    text = _read_line("> ")
    if not text.startswith('"""'):
        return text.strip()
    lines = [text[3:].rstrip("\n")]
    while not lines[-1].rstrip().endswith('"""'):
        line = _read_line("… ")
        if not line:  # the end of input
            return "\n".join(lines).strip()
        lines.append(line.rstrip("\n"))
    return "\n".join(lines).strip().removesuffix('"""').strip()


def _read_line(prompt: str) -> str:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):  # a prompt must not go where the answers go
        if sys.stdin.isatty():
            sys.stderr.write(prompt)
            sys.stderr.flush()
        return read_text(sys.stdin.readline)
    try:
        return read_text(lambda: input(prompt)) + "\n"
    except EOFError:
        return ""


def read_text(read: Callable[[], str]) -> str:
    """What is read from stdin. Raises PromptError for what is no text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise PromptError(
            "the text on stdin cannot be decoded",
            expected=error.encoding,
            found=error,
            remedy=f"convert it to {error.encoding}, as iconv does",
        ) from None
