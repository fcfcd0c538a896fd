"""All that a model's answers hold beside plain text: what grammars ask of it, and how it is split."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pi_runtime.engine.events import CallArguments, CallBegan, Delta, ReasoningDelta, TextDelta, joined
from pi_runtime.engine.tools.calls import CallParser, new_id
from pi_runtime.engine.tools.formats import GENERIC, ToolFormat
from pi_runtime.engine.tools.grammars import GrammarWriter
from pi_runtime.engine.tools.harmony import HarmonyParser
from pi_runtime.engine.tools.pairs import PairParser
from pi_runtime.engine.tools.reasoning import ReasoningFormat, ReasoningParser
from pi_runtime.errors import Setting, UsageError
from pi_runtime.text.chat_template import ChatTemplate
from pi_runtime.text.grammar import Grammar
from pi_runtime.text.template_abilities import KEY, LOOKUP, VALUE
from pi_runtime.text.tokenizer import Tokenizer

Tool = Mapping[str, Any]
"""A function as OpenAI's chat API has it: {"type": "function", "function": {"name": …, "parameters": …}}."""
TOOLS = Setting("tools")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
BEYOND_PAIRS = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "minProperties", "maxProperties"}
"""Keys of a schema that pairs of keys and values, each by its own schema, do not follow."""


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

    def parser(self, prompt: str, tools: Sequence[Tool] = (), make_id: Callable[[], str] = new_id) -> OutputParser:
        """A parser for one answer to a rendered prompt. Calls are found of these tools only."""
        names = [tool["function"]["name"] for tool in tools]
        if self.reasoning and self.reasoning.answer:
            return OutputParser(HarmonyParser(names, make_id, thinks=self.reasoning.is_open(prompt)), None)
        calls: CallParser | None = None
        if self.tools and self.tools.has_pairs and names:
            schemas = {_name(tool): tool["function"].get("parameters") or NO_PARAMETERS for tool in tools}
            calls = PairParser(self.tools, schemas, make_id)
        elif self.tools and names:
            calls = CallParser(self.tools, names, make_id)
        return OutputParser(ReasoningParser(self.reasoning, prompt) if self.reasoning else None, calls)

    def grammar(
        self,
        prompt: str,
        *,
        tools: Sequence[Tool] = (),
        choice: str | Tool = "auto",
        parallel: bool = True,
        schema: Mapping[str, Any] | bool | None = None,
    ) -> Grammar | None:
        """What an answer to a rendered prompt must be; None where it is free.

        `choice` is OpenAI's `tool_choice`: `none`, `auto`, `required`, or the one of the tools that is called, once.
        Arguments follow the schemas of their functions. With `auto` those of functions that are `strict` do, and all
        where the template knows no tools; others are JSON objects. The answer is free where no arguments follow a
        schema and calls may be parallel. `schema`: JSON that the answer must be, where no tool is called. Thoughts may
        come first, if the model thinks. Raises UsageError naming the setting for what is impossible.
        """
        tools = () if choice == "none" else tools
        if tools and self.tools is None:
            raise UsageError("the model's chat template has no form of calls that is known here", setting=TOOLS)
        reasoning = None if self.reasoning is None or self.reasoning.is_closed(prompt) else self.reasoning
        writer = GrammarWriter(self.tokens)
        final = self.reasoning.answer if self.reasoning else ""
        answer = None if schema is None else writer.answer(final, schema)
        if tools:
            answer = self._with_calls(writer, tools, choice, parallel, answer)
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
    ) -> str | None:
        """The grammar rule of answers that call tools or follow the rule `otherwise`; None where any text may come."""
        assert self.tools is not None
        must_call, only = choice != "auto", None if isinstance(choice, str) else _name(choice)
        strictly = must_call or self.tools.is_told
        if not strictly and otherwise is None and parallel and not any(map(_is_strict, tools)):
            return None
        chosen = [(n, tool) for n, tool in enumerate(tools) if only in {None, _name(tool)}]
        functions = [_function(n, tool, self.tools, strictly=strictly) for n, tool in chosen]
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
        shown = (abilities.written, abilities.told + abilities.written)  # the call says more than what is around it
        likely = [tools for text in shown if (tools := ToolFormat.of(text)) is not None and not tools.is_told]
        is_it = [tools for tools in likely if not abilities.written or _reads(tools, reasoning, abilities.written)]
        found = next(iter(is_it), GENERIC)
    is_without = found.is_told and reasoning is not None and reasoning.answer
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


def _function(n: int, tool: Tool, tools: ToolFormat, *, strictly: bool) -> tuple[str, Mapping[str, Any]]:
    """A function's name, and the schema that its arguments must follow."""
    parameters = tool["function"].get("parameters") or NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        place = Setting(f"tools[{n}].function.parameters")
        raise UsageError("parameters must be an object's schema", setting=place)
    is_followed = strictly or _is_strict(tool)
    if is_followed and tools.has_pairs and (found := sorted(BEYOND_PAIRS & parameters.keys())):
        what = f"{found[0]} of all arguments together cannot be followed in this model's form of calls"
        raise UsageError(what, setting=Setting(f"tools[{n}].function.parameters"))
    return _name(tool), {**parameters, "type": "object"} if is_followed else {"type": "object"}
