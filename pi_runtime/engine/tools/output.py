"""All that a model's answers hold beside plain text: what grammars ask of it, and how it is split."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

from pi_runtime.engine.events import CallArguments, CallBegan, Delta, ReasoningDelta, TextDelta, joined
from pi_runtime.engine.tools.calls import CallParser, new_id
from pi_runtime.engine.tools.formats import GENERIC, ReasoningFormat, ToolFormat
from pi_runtime.engine.tools.grammars import GrammarWriter
from pi_runtime.engine.tools.harmony import HarmonyParser
from pi_runtime.engine.tools.pairs import PairParser
from pi_runtime.engine.tools.scanners import MarkerWatch
from pi_runtime.errors import Setting, UsageError, spelled
from pi_runtime.text.chat_template import ChatTemplate
from pi_runtime.text.grammar import Grammar
from pi_runtime.text.schemas import Growth, Schema, closed, followed
from pi_runtime.text.template_abilities import KEY, LOOKUP, VALUE
from pi_runtime.text.tokenizer import Tokenizer

Tool = Mapping[str, Any]
"""A function as OpenAI's chat API has it: {"type": "function", "function": {"name": …, "parameters": …}}."""
TOOLS = Setting("tools")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT = {"type": "object"}
BEYOND_PAIRS = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "minProperties", "maxProperties"}
"""Keys of a schema that pairs of keys and values, each by its own schema, do not follow."""


class ReasoningParser:
    """Splits thoughts from an answer that begins with them; white space around both is dropped.

    A call within thoughts that were not closed is a part of them: the model may only speak of it. It is a call, and
    ends the thoughts, where the template has Qwen3-Coder's form of calls (`ToolFormat.ends_thoughts`): these templates
    allow a model to reason before a call and to write nothing behind it, and llama.cpp reads their models so. `call` is
    what begins such a call.
    """

    def __init__(self, reasoning: ReasoningFormat, prompt: str, call: str | None = None) -> None:
        self._format, self._call = reasoning, call
        self._ends = (reasoning.end,) if call is None else (reasoning.end, call)
        self.thinks = reasoning.is_open(prompt)
        """Whether the text that comes next is part of the thoughts."""
        self._may_begin = not self.thinks and not reasoning.is_closed(prompt)
        self._watch = MarkerWatch(*(self._ends if self.thinks else (reasoning.begin,)))
        self._is_blank = self.thinks and prompt.rstrip().endswith(reasoning.begin)
        """Whether nothing but white space has come of the present part, which is then dropped."""

    def push(self, text: str) -> list[Delta]:
        """Take more of the answer's text; returns thoughts and text that it shows."""
        found: list[Delta | None] = []
        at = 0
        while at < len(text):
            if not self.thinks and not self._may_begin:
                found.append(self._shown(text[at:]))
                break
            shown, end = self._watch.push_plain(text, at) if self.thinks else ("", at)
            found.append(self._shown(shown) if end > at else self._push(text[at]))
            at = max(end, at + 1)
        return [delta for delta in found if delta is not None]

    def _push(self, char: str) -> Delta | None:
        shown, found = self._watch.push(char)
        if found:
            marker = self._watch.drain()
            self.thinks, self._may_begin = self._may_begin, False
            self._watch, self._is_blank = MarkerWatch(*self._ends), True
            return self._shown(marker) if marker.lstrip() == self._call else None
        if self._may_begin and shown:
            # It begins with something else: all of it is text, and stays as it is.
            self._may_begin = False
            return TextDelta(shown + self._watch.drain())
        return self._shown(shown)

    def finish(self) -> list[Delta]:
        """Return what was held, when the answer ends."""
        held = self._shown(self._watch.drain().rstrip() if self.thinks else self._watch.drain())
        return [] if held is None else [held]

    def _shown(self, text: str) -> Delta | None:
        if self._is_blank:
            text = text.lstrip()
        if not text:
            return None
        self._is_blank = False
        return ReasoningDelta(text) if self.thinks else TextDelta(text)


class OutputParser:
    """Splits one answer as it comes: thoughts, text, and calls of tools.

    However the answer is cut into parts, the deltas joined are the same. A call whose arguments break off ends with a
    `CallBroken`.
    """

    def __init__(self, reasoning: ReasoningParser | HarmonyParser | None, calls: CallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls
        self.reasoning_tokens = 0
        """Tokens of the texts that hold thoughts."""

    def push(self, text: str, tokens: int = 0) -> list[Delta]:
        """Take the next part of the answer, which so many tokens made."""
        thinks = self._thinks
        deltas = joined(self._with_calls([TextDelta(text)] if self._reasoning is None else self._reasoning.push(text)))
        if thinks or self._thinks or any(isinstance(delta, ReasoningDelta) for delta in deltas):
            self.reasoning_tokens += tokens
        return deltas

    def finish(self) -> list[Delta]:
        """Return what was held, when the answer ends, for whatever reason."""
        deltas = self._with_calls([] if self._reasoning is None else self._reasoning.finish())
        return joined(deltas + ([] if self._calls is None else self._calls.finish()))

    @property
    def _thinks(self) -> bool:
        return self._reasoning is not None and self._reasoning.thinks

    def _with_calls(self, deltas: list[Delta]) -> list[Delta]:
        """Find calls of tools in the text that is no thought."""
        if self._calls is None:
            return [delta for delta in deltas if not isinstance(delta, TextDelta) or delta.text]
        found: list[Delta] = []
        for delta in deltas:
            found += self._calls.push(delta.text) if isinstance(delta, TextDelta) else [delta]
        return found


@dataclass(frozen=True)
class OutputFormat:
    """The conventions of one chat template, with the tokens by which this model's tokenizer writes them."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    tokens: Mapping[str, int]
    """Markers that are tokens of their own."""

    @classmethod
    def of(cls, template: ChatTemplate | str, tokenizer: Tokenizer) -> Self:
        """The conventions of a template; no tools and no thoughts where it has none that are known here.

        The form of calls is the one in which a call is read from what the template writes for it.
        """
        if isinstance(template, str):
            with ChatTemplate(template) as own:
                return cls.of(own, tokenizer)
        tools, reasoning = tools_of(template), ReasoningFormat.of(template.source)
        markers = [*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ())]
        tokens = {marker: token for marker in markers if (token := tokenizer.added_token(marker)) is not None}
        return cls(tools, reasoning, tokens)

    def shown_tokens(self, tools: Sequence[Tool] = ()) -> list[int]:
        """The tokens that an answer's text must show for the parser of these tools, though they may be special."""
        markers = [*(self.tools.markers if self.tools and tools else ())]
        markers += self.reasoning.markers if self.reasoning else ()
        return [self.tokens[marker] for marker in markers if marker in self.tokens]

    @property
    def own_markers(self) -> list[str]:
        """Markers that the text of an assistant's message may have: those of thoughts and calls, not of channels."""
        if self.reasoning and self.reasoning.answer:
            return []
        return [*(self.tools.markers if self.tools else ()), *(self.reasoning.markers if self.reasoning else ())]

    def parser(self, prompt: str, tools: Sequence[Tool] = (), make_id: Callable[[], str] = new_id) -> OutputParser:
        """A parser for one answer to a rendered prompt. Calls are found of these tools only."""
        names = [tool["function"]["name"] for tool in tools]
        if self.reasoning and self.reasoning.answer:
            return OutputParser(HarmonyParser(names, make_id, thinks=self.reasoning.is_open(prompt)), None)
        calls: CallParser | None = None
        if self.tools and self.tools.pairs and names:
            schemas = {_name(tool): tool["function"].get("parameters") or NO_PARAMETERS for tool in tools}
            calls = PairParser(self.tools, schemas, make_id)
        elif self.tools and self.tools.is_python and names:
            from pi_runtime.engine.tools.python_calls import PythonParser  # noqa: PLC0415  few models write so

            calls = PythonParser(self.tools, names, make_id)
        elif self.tools and self.tools.quote and names:
            from pi_runtime.engine.tools.marked_calls import MarkedParser  # noqa: PLC0415  few models write so

            calls = MarkedParser(self.tools, names, make_id)
        elif self.tools and names:
            calls = CallParser(self.tools, names, make_id)
        call = self.tools.trigger if self.tools and self.tools.ends_thoughts and names else None
        return OutputParser(ReasoningParser(self.reasoning, prompt, call) if self.reasoning else None, calls)

    def grammar(
        self,
        prompt: str,
        *,
        tools: Sequence[Tool] = (),
        choice: str | Tool = "auto",
        parallel: bool = True,
        schema: Mapping[str, Any] | bool | None = None,
        is_good: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    ) -> Grammar | None:
        """What an answer to a rendered prompt must be; None where it is free.

        `choice` is OpenAI's `tool_choice`: `none`, `auto`, `required`, or the one of the tools that is called, once.
        Arguments follow the schemas of their functions. With `auto` those of functions that are `strict` do; where the
        template knows no tools, the schemas of others are advice: what cannot be followed is left out. Elsewhere these
        are JSON objects. The answer is free where no arguments follow a schema and calls may be parallel. `schema`:
        JSON that the answer must be, where no tool is called. Thoughts may come first, if the model thinks. `is_good`
        says of the schema of arguments whether a grammar can be made of it. Raises UsageError naming the setting for
        what is impossible.
        """
        tools = () if choice == "none" else tools
        if not tools and schema is None:
            return None
        if tools and self.tools is None:
            raise UsageError("the model's chat template has no form of calls that is known here", setting=TOOLS)
        reasoning = None if self.reasoning is None or self.reasoning.is_closed(prompt) else self.reasoning
        writer = GrammarWriter(self.tokens)
        final = self.reasoning.answer if self.reasoning else ""
        answer = None if schema is None else writer.answer(final, _strictly(schema, Setting("schema"), "", Growth()))
        if tools:
            answer = self._with_calls(writer, tools, choice, parallel, answer, is_good)
        if answer is None:
            return None
        if reasoning is not None:
            answer = f"{writer.thoughts(reasoning, are_open=reasoning.is_open(prompt))} ({answer})"
        return Grammar.lark(writer.source(answer))

    def _with_calls(
        self,
        writer: GrammarWriter,
        tools: Sequence[Tool],
        choice: str | Tool,
        parallel: bool,
        otherwise: str | None,
        is_good: Callable[[Mapping[str, Any]], bool],
    ) -> str | None:
        """The grammar rule of answers that call tools or follow the rule `otherwise`; None where any text may come."""
        assert self.tools is not None
        must_call, only = choice != "auto", None if isinstance(choice, str) else _name(choice)
        if (
            not (must_call or self.tools.is_generic)
            and otherwise is None
            and parallel
            and not any(map(_is_strict, tools))
        ):
            return None
        chosen = [(n, tool) for n, tool in enumerate(tools) if only in {None, _name(tool)}]
        growth = Growth()
        functions = [
            (_name(tool), _arguments(n, tool, self.tools, must_call=must_call, is_good=is_good, growth=growth))
            for n, tool in chosen
        ]
        calls = writer.calls(self.tools, functions, parallel=parallel and only is None)
        if must_call:
            return calls
        if otherwise is None:
            return writer.text_or_calls(self.tools, self.reasoning.answer if self.reasoning else "")
        if self.tools.is_bare:
            what = "with this model, calls and other JSON begin alike: tools do not go with a form of the answer"
            raise UsageError(what, setting=Setting("schema"))
        return f"{otherwise} | {calls}"


PLAIN = OutputFormat(None, None, {})
"""The format of answers that are nothing but text."""


def tools_of(template: ChatTemplate) -> ToolFormat | None:
    """The form of calls that a template has: `GENERIC` where messages tell of tools and of a form."""
    if not template.source:
        return None
    reasoning = ReasoningFormat.of(template.source)
    abilities, found = template.abilities, GENERIC
    if abilities.tools:
        shown = (abilities.written, abilities.preface + abilities.written)  # the call says more than what is around it
        likely = [tools for text in shown if (tools := ToolFormat.of(text)) is not None and not tools.is_generic]
        is_it = [tools for tools in likely if not abilities.written or _reads(tools, reasoning, abilities.written)]
        found = next(iter(is_it), GENERIC)
    is_without = found.is_generic and reasoning is not None and reasoning.answer
    return None if is_without else found  # in channels, no other form of calls is read


def _reads(tools: ToolFormat, reasoning: ReasoningFormat | None, written: str) -> bool:
    """Whether the probe's call is what is read from the text that a template writes for it."""
    parser = OutputFormat(tools, reasoning, {}).parser("", [LOOKUP])
    found = [*parser.push(written), *parser.finish()]
    names = [delta.name for delta in found if isinstance(delta, CallBegan)]
    arguments = "".join(delta.text for delta in found if isinstance(delta, CallArguments))
    try:
        return names == [_name(LOOKUP)] and json.loads(arguments) == {KEY: VALUE}
    except ValueError:
        return False


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def _is_strict(tool: Tool) -> bool:
    return bool(tool["function"].get("strict"))


def _arguments(
    n: int,
    tool: Tool,
    tools: ToolFormat,
    *,
    must_call: bool,
    is_good: Callable[[Mapping[str, Any]], bool],
    growth: Growth,
) -> Mapping[str, Any]:
    """The schema that the arguments of a function follow: its own, what can be followed of it, or any object."""
    given, what = tool["function"].get("parameters") or NO_PARAMETERS, f"tool {_name(tool)!r}: "
    if must_call or _is_strict(tool):
        place = Setting(f"tools[{n}].function.parameters")
        found = _strictly(given, place, what, growth)
        if not _is_object(found):
            raise UsageError(f"{what}parameters must be an object's schema", setting=place)
        if (tools.pairs or tools.quote) and (beyond := sorted(BEYOND_PAIRS & found.keys())):
            why = f"{beyond[0]} of all arguments together cannot be followed in this model's form of calls"
            raise UsageError(what + why, setting=place)
        found = {**found, "type": "object"}
        if not is_good(found):
            raise UsageError(f"{what}its parameters are too complex to be followed", setting=place)
        return found
    if not tools.is_generic:
        return ANY_OBJECT
    try:
        advice = closed(followed(given, is_advice=True).schema, growth)
    except UsageError:
        return ANY_OBJECT
    found = {**advice, "type": "object"} if _is_object(advice) else ANY_OBJECT
    return found if is_good(found) else ANY_OBJECT


def _strictly(schema: Schema, place: Setting, what: str, growth: Growth) -> Any:
    """A schema that is followed to the letter, its objects shut. Raises UsageError for one that cannot be."""
    found = followed(schema)
    if found.left_out:
        raise UsageError(f"{what}{found.left_out[0]}", setting=place)
    try:
        return closed(found.schema, growth)
    except UsageError as error:
        raise UsageError(f"{what}{spelled(error.reason)}", setting=place) from None


def _is_object(schema: Schema) -> TypeGuard[Mapping[str, Any]]:
    kinds = schema.get("type", "object") if isinstance(schema, Mapping) else ""
    return "object" in (kinds if isinstance(kinds, list) else [kinds])
