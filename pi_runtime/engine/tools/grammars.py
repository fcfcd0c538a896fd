"""Grammars of answers with tool calls and thoughts, in llguidance's form of Lark.

A marker that is a token of its own is asked for by its number, since free text never holds it. One that is not is
ordinary text: then free text is read lazily, up to the first one.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pi_runtime.engine.tools.formats import CONSTRAIN, MESSAGE, Pairs, ReasoningFormat, ToolFormat
from pi_runtime.engine.tools.pairs import text_schema, types
from pi_runtime.errors import Setting, UsageError
from pi_runtime.text.grammar import with_white_space
from pi_runtime.text.schemas import Schema

TERMINALS = r"""TEXT: /(.|\n)*/
SPACE: /[ \n]{0,4}/
PLAIN: /\s*[^{\s](.|\n)*/
CALL_ID: /[a-zA-Z0-9]{9}/
ARG_KEY: /[^<>\n]{1,64}/
MARKED_KEY: /[^<>:,{}\[\]"\n]{1,64}/
"""
ANY_MARKED = '"{" (MARKED_KEY ":" marked ("," MARKED_KEY ":" marked)*)? "}"'
"""Any object whose texts stand between marks."""
PLAIN_KEYS = {"type", "properties", "required", "additionalProperties", "items", "title", "description", "default"}
DEFINITIONS = ("$defs", "definitions")
MOST_DEFINED = 4 << 20
"""Bytes of definitions, all their copies together, in the grammar of a function's pairs."""


class GrammarWriter:
    """Writes the rules of a grammar. `tokens`: markers that are tokens of their own."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: dict[str, str] = {}

    def source(self, start: str) -> str:
        """The whole grammar of what follows from `start`."""
        rules = {"start": start, **self._rules}
        return "".join(f"{name}: {body}\n" for name, body in rules.items()) + TERMINALS

    def json(self, schema: Schema, *, fixed: bool = False) -> str:
        """JSON that a schema describes."""
        return f"%json {json.dumps(with_white_space(schema, fixed=fixed))}"

    def arguments(self, schema: Schema) -> str:
        """JSON that a schema describes, with the white space of templates."""
        return self.json(schema, fixed=True)

    def calls(self, tools: ToolFormat, functions: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool) -> str:
        """Calls of these functions, each with the schema of its arguments; one of them unless `parallel`."""
        names = []
        for n, (name, schema) in enumerate(functions):
            names.append(f"call_{n}")
            self._rules[names[-1]] = self._call(tools, name, schema)
        self._rules["call"] = " | ".join(names)
        # Llama's templates take one call a turn, and harmony's end one. Models that know no tools would go on and on.
        parallel = parallel and not (tools.is_bare or tools.has_channels or tools.is_generic)
        if tools.is_bare:
            trigger = self._marker(tools.trigger)
            body = f"{trigger}? call"
        elif tools.separator:
            more = f" ({_text(tools.separator + ' ')} call)*" if parallel else ""
            body = f"{self._marker(tools.trigger)} {_text(tools.begin)} call{more} {self._marker(tools.end)}"
        else:
            gap = f" {_text(tools.gap)} " if tools.gap else " "
            around = " " if tools.pairs else gap
            end = f"{around}{self._marker(tools.end)}" if tools.end else ""
            self._rules["rest_of_call"] = f"{around.strip()} call{end}".strip()
            one = f"{self._marker(tools.trigger)} rest_of_call"
            self._rules["more_calls"] = f"({gap}{one})*" if parallel else '""'
            body = f"{one} more_calls"
        self._rules["calls"] = body
        return "calls"

    def answer(self, before: str, schema: Schema) -> str:
        """JSON that a schema describes, after what stands before an answer proper."""
        return f"{self._marker(before)} {self.json(schema)}" if before else self.json(schema)

    def text_or_calls(self, tools: ToolFormat, before: str = "") -> str:
        """Free text, and after it the calls, if there are any. The rules of `calls` must have been written.

        In channels either is a message of its own, and `before` stands before text.
        """
        if tools.has_channels:
            return f"{self._marker(before)} TEXT | calls"
        if tools.is_bare:
            return "PLAIN | calls"
        if tools.trigger in self._tokens:
            return "TEXT calls?"
        self._rules["text_and_trigger[lazy]"] = f"TEXT {_text(tools.trigger)}"
        after = self._rules["calls"].removeprefix(self._marker(tools.trigger))
        return f"TEXT | text_and_trigger {after}"

    def thoughts(self, reasoning: ReasoningFormat, *, are_open: bool) -> str:
        """Thoughts, or the rest of those that the prompt began, up to the white space after them."""
        begin = "" if are_open else f"{self._marker(reasoning.begin)} "
        after = self._marker(reasoning.after) if reasoning.after else "SPACE"
        if reasoning.end in self._tokens:
            found = f"{begin}TEXT {self._marker(reasoning.end)} {after}"
        else:
            self._rules["rest_of_thoughts[lazy]"] = f"TEXT {_text(reasoning.end)}"
            found = f"{begin}rest_of_thoughts {after}"
        return found if are_open else f"({found})?"

    def _call(self, tools: ToolFormat, name: str, schema: Mapping[str, Any]) -> str:
        if tools.has_channels:
            return f"{_text(name + ' ')} {self._marker(f'{CONSTRAIN}json{MESSAGE}')} {self.arguments(schema)}"
        if tools.pairs is not None:
            pairs = tools.pairs
            end = [_text(pairs.after_all)] if pairs.after_all else []
            return " ".join([_text(pairs.before_name + name + pairs.after_name), *self._pairs(pairs, schema), *end])
        if tools.quote:
            self._check_definitions(schema, len(schema.get("properties") or ()))
            return f"{_text(tools.before_name + name)} {self._marked_object(tools.quote, schema, schema)}"
        if not tools.has_head:
            head = f'{{"name": {json.dumps(name)}, "{tools.arguments}": '
            return f"{_text(head)} {self.arguments(schema)} {_text('}')}"
        call_id = f"{self._marker('[CALL_ID]')} CALL_ID " if tools.has_call_id else ""
        return f"{_text(name)} {call_id}{self._marker('[ARGS]')} {self.arguments(schema)}"

    def _pairs(self, pairs: Pairs, schema: Mapping[str, Any]) -> Iterator[str]:
        """The pairs of a call's arguments, in the order of the schema's properties."""
        properties = schema.get("properties") or {}
        required = dict.fromkeys(name for name in schema.get("required") or () if isinstance(name, str))
        self._check_definitions(schema, len(properties))
        if not properties and not required and schema.get("additionalProperties", True):
            yield f"({self._marker(pairs.before_key)} ARG_KEY {self._pair(pairs, {'type': 'string'}, {})})*"
        for key in dict.fromkeys([*properties, *required]):
            begin = f"{self._marker(pairs.before_key)} {_text(key)}"
            pair = f"{begin} {self._pair(pairs, properties.get(key, True), schema)}"
            yield pair if key in required else f"({pair})?"

    def _marked(self, quote: str, schema: Any, whole: Mapping[str, Any]) -> str:
        """A value whose texts stand between marks, or in JSON where its schema says more than kinds and properties;
        `whole` is the schema with the definitions to which it refers."""
        kinds, is_plain = types(schema, whole), isinstance(schema, Mapping) and schema.keys() <= PLAIN_KEYS
        if (text := text_schema(schema, whole)) is not None:
            return self._marked_text(quote, text)
        if schema in ({}, True):
            return self._any_marked(quote)
        if is_plain and kinds == {"object"}:
            return self._marked_object(quote, schema, whole)
        if is_plain and kinds == {"array"}:
            name = self._named(self._marked(quote, schema.get("items", True), whole))
            return f'"[" ({name} ("," {name})*)? "]"'
        definitions = {key: whole[key] for key in DEFINITIONS if key in whole}
        return self.arguments({**schema, **definitions} if isinstance(schema, Mapping) else schema)

    def _any_marked(self, quote: str) -> str:
        """Any value."""
        if "marked" not in self._rules:
            self._rules["marked"] = ""
            text, scalar = self._marked_text(quote, {}), self.arguments({"type": ["number", "boolean", "null"]})
            listed = f'"[" (marked ("," marked)*)? "]" | {ANY_MARKED}'
            self._rules["marked"] = f"{text} | {self._named(scalar)} | {listed}"
        return "marked"

    def _marked_object(self, quote: str, schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
        """An object of these properties, which templates sort; of any where none are named."""
        properties = schema.get("properties") or {}
        required = [name for name in schema.get("required") or () if isinstance(name, str)]
        if not properties and not required and schema.get("additionalProperties", True) is not False:
            self._any_marked(quote)
            return ANY_MARKED
        first, later = self._named('""'), self._named('""')
        for key in sorted({*properties, *required}, key=lambda key: (key.lower(), key), reverse=True):
            pair = self._named(f"{_text(key + ':')} {self._marked(quote, properties.get(key, True), whole)}")
            others = ("", "") if key in required else (f" | {first}", f" | {later}")
            first, later = self._named(f"{pair} {later}{others[0]}"), self._named(f'"," {pair} {later}{others[1]}')
        return f'"{{" {first} "}}"'

    def _marked_text(self, quote: str, schema: Mapping[str, Any]) -> str:
        values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
        mark = self._marker(quote)
        if texts := [value for value in values if isinstance(value, str)]:
            return f"{mark} ({' | '.join(map(_text, texts))}) {mark}"
        if quote in self._tokens:
            return f"{mark} {_text_rule(schema)} {mark}"
        name = f"text_{len(self._rules)}"
        self._rules[f"{name}[lazy]"] = f"{_text_rule(schema)} {_text(quote)}"
        return f"{mark} {name}"

    def _named(self, body: str) -> str:
        """The name of a new rule."""
        name = f"part_{len(self._rules)}"
        self._rules[name] = body
        return name

    def _check_definitions(self, schema: Mapping[str, Any], pairs: int) -> None:
        """Raise UsageError where definitions, which each pair's value has with it, would make a long grammar."""
        nbytes = pairs * sum(len(json.dumps(schema[key])) for key in DEFINITIONS if key in schema)
        if nbytes > MOST_DEFINED:
            found = f"{nbytes // pairs} bytes for each of {pairs} properties"
            raise UsageError(
                f"in this model's form of calls these definitions are too long: {found}", setting=Setting("tools")
            )

    def _pair(self, pairs: Pairs, schema: Any, whole: Mapping[str, Any]) -> str:
        """A pair behind its key; `whole` is the schema with the definitions to which `schema` refers."""
        before, after = self._marker(pairs.after_key + pairs.before_value), self._marker(pairs.after_value)
        text = text_schema(schema, whole)
        if text is None:
            definitions = {key: whole[key] for key in DEFINITIONS if key in whole}
            value = self.arguments({**schema, **definitions} if isinstance(schema, Mapping) else schema)
            return f"{before} {value} {after}"
        values = [text["const"]] if "const" in text else text.get("enum") or ()
        if texts := [value for value in values if isinstance(value, str)]:
            return f"{before} ({' | '.join(map(_text, texts))}) {after}"
        if pairs.after_value.strip() in self._tokens:
            return f"{before} {_text_rule(text)} {after}"
        name = f"text_{len(self._rules)}"
        self._rules[f"{name}[lazy]"] = f"{_text_rule(text)} {_text(pairs.after_value)}"
        return f"{before} {name}"

    def _marker(self, marker: str) -> str:
        """A text, whose parts that are tokens of their own are asked for by their numbers."""
        tokens = "|".join(map(re.escape, self._tokens))
        parts = re.split(f"({tokens})", marker) if tokens else [marker]
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else _text(part) for part in parts if part)


def _text_rule(schema: Mapping[str, Any]) -> str:
    """Text that a schema of strings describes; its `format` says nothing of it."""
    pattern, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength", "")
    if pattern is None:
        return f"/(.|\\n){{{least},{most}}}/" if least or most != "" else "TEXT"
    before, after = ("" if anchored else r"(.|\n)*" for anchored in (pattern.startswith("^"), pattern.endswith("$")))
    inner = re.sub(r"(?<!\\)/", r"\/", pattern.removeprefix("^").removesuffix("$"))
    return f"/{before}({inner}){after}/"


def _text(text: str) -> str:
    return json.dumps(text)
