"""Talking with a model: prompts by its own chat template, and answers as text, thoughts and calls of tools."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Unpack

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Manifest
from pi_runtime.engine.events import Gathered, TextDelta
from pi_runtime.engine.generation import Generation
from pi_runtime.engine.history import one_form, unicode
from pi_runtime.engine.prompt_writer import PromptWriter, prompt_before, without_last_text
from pi_runtime.engine.tools.output import OutputFormat, OutputParser
from pi_runtime.errors import ArtifactError, PromptError, Setting, TemplateError, UsageError
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sequence.settings import AnswerSettings, names_settings
from pi_runtime.sequence.stats import Stats
from pi_runtime.text.chat_template import ChatTemplate
from pi_runtime.text.quotation import Quotation, new_key
from pi_runtime.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class ChatAnswer(Gathered):
    """The assistant's next message. Iterating yields its text as it comes; what is not asked for is not computed.

    `text`, `reasoning` and `calls` are what has come, and `message` is all of it as the next entry of `messages`.
    """

    def __init__(self, answer: Generation, parser: OutputParser) -> None:
        super().__init__()
        self._answer, self._parts = answer, self._read(parser)

    def __iter__(self) -> Iterator[str]:
        return self._parts

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<ChatAnswer {json.dumps(self.message, ensure_ascii=False)}, {self.finish_reason}>"

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, as `Generation` has it; None until then."""
        return self._answer.finish_reason

    @property
    def stats(self) -> Stats:
        """The figures of the answer up to now."""
        return self._answer.stats

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message that templates know."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls and not self.is_cut:
            named = [(call.id, {"name": call.name, "arguments": json.loads(call.arguments)}) for call in self.calls]
            found["tool_calls"] = [{"id": call_id, "type": "function", "function": f} for call_id, f in named]
        return found

    def _read(self, parser: OutputParser) -> Iterator[str]:
        for part in self._answer:
            yield from self._texts(parser.push(part))
        yield from self._texts(parser.finish())

    def _texts(self, deltas: Sequence[Any]) -> Iterator[str]:
        for delta in deltas:
            self.events.append(delta)
            if isinstance(delta, TextDelta):
                yield delta.text


def _check_tools(tools: Sequence[Message], choice: str | Message) -> None:
    """Raise UsageError for what are no functions, and for a choice that there is none of."""
    form = '{"type": "function", "function": {"name": …, "parameters": …}}'
    for tool in (*tools, *(() if isinstance(choice, str) else (choice,))):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError("not a function", setting=Setting("tools"), expected=form, found=repr(tool)[:80])
    words = ("auto", "none", "required")
    if choice in words[:2]:
        return
    names = [tool["function"]["name"] for tool in tools]
    if choice != "required" if isinstance(choice, str) else choice["function"]["name"] not in names:
        expected = f"{', '.join(words)}, or one of the tools"
        raise UsageError(setting=Setting("tool_choice", choice), expected=expected)
    if not tools:
        raise UsageError("there are no tools", setting=Setting("tool_choice", choice))


class ChatModel:
    """The part of a model that talks, by its chat template. `Model` is the rest."""

    _artifact: Artifact
    _template: str | None = None
    tokenizer: Tokenizer
    generate: Callable[..., Generation]

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest."""
        return self._artifact.manifest

    @names_settings
    def chat(
        self,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, Any] | bool | None = None,
        tools: Sequence[Message] = (),
        tool_choice: str | Message = "auto",
        stream: bool = False,
        variables: Mapping[str, Any] | None = None,
        cache: KVCache | None = None,
        speculate: str | int = "auto",
        **settings: Unpack[AnswerSettings],
    ) -> ChatAnswer:
        """Answer a conversation, written by the model's own template.

        `messages`: {"role": …, "content": …} each. `schema`: a JSON schema that the answer follows. `tools`: functions
        in OpenAI's form that the model may call; `tool_choice` is `auto`, `none`, `required`, or the one to be called.
        `stream`: return before anything is computed; iterate for the text as it comes. `variables`: the template's
        further names, such as `enable_thinking`. `cache`: one of an earlier turn, whose part of the prompt is not
        computed again. Other settings are those of `generate`; `grammar` does not go with `schema` or `tools`.

        Raises what `chat_prompt` and `generate` raise, and UsageError for a form that cannot be.
        """
        _check_tools(tools, tool_choice)
        tools = () if tool_choice == "none" else tools
        if (schema is not None or tools) and settings.get("grammar") is not None:
            raise UsageError("it does not go with a schema or tools", setting=Setting("grammar"))
        prompt = self.chat_prompt(messages, tools=tools, variables=variables)
        if schema is not None or tools:
            settings["grammar"] = self.output.grammar(prompt, tools=tools, choice=tool_choice, schema=schema)
        settings["shown_tokens"] = [*settings.get("shown_tokens", ()), *self.output.shown_tokens(tools)]
        try:
            answer = self.generate(prompt, cache=cache, speculate=speculate, **settings)
        except UsageError as error:  # the grammar is ours, and its name means nothing to the caller
            if error.setting is None or error.setting.name != "lark":
                raise
            name = "tools" if schema is None else "schema"
            raise UsageError("cannot be used", setting=Setting(name), found=error.found) from None
        found = ChatAnswer(answer, self.output.parser(prompt, tools))
        if not stream:
            for _ in found:
                pass
        return found

    def use_template(self, source: str) -> None:
        """Take a chat template (Jinja) in place of the model's own, from the first chat on."""
        self._template = source

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's own template (Jinja), or the one to use. Raises TemplateError where there is none."""
        if self._template is not None:
            return ChatTemplate(self._template)
        if "chat_template.jinja" not in self.manifest.files:
            raise TemplateError(
                f"{self._artifact.path}: the model has no chat template",
                remedy=("give the text with ", Setting("prompt")),
            )
        try:
            return ChatTemplate(self._artifact.file("chat_template.jinja").decode())
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self._artifact.path}: the chat template is not UTF-8", found=error) from None

    @cached_property
    def output(self) -> OutputFormat:
        """How the model writes calls and thoughts: as plain text where it has no chat template."""
        has_template = self._template is not None or "chat_template.jinja" in self.manifest.files
        return OutputFormat.of(self.chat_template if has_template else "", self.tokenizer)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation written by the model's own template, ready for the assistant's turn.

        Messages, `tools` and the template's further `variables`, such as `enable_thinking`, are those of
        `ChatTemplate.render`, which says what it raises. What the template does not know, such as tools, a message
        tells. Without `add_generation_prompt` the assistant's turn does not begin. With `continue_final_message` the
        prompt ends with the text of the last message, an assistant's, from which the answer goes on.

        Only the template writes markers: those in what it is given are text (`RenderedPrompt`), but for what an
        assistant's message has of thoughts and calls. Raises UsageError for a message that cannot be continued, and
        PromptError where a part of the conversation would be lost.
        """
        text, quotation, key, said = self.manifest.text, self._quotation, new_key(), ""
        names = {"bos_token": text.bos_token, "eos_token": text.eos_token, **text.special_tokens}
        messages = quotation.messages(one_form(messages), key)
        if continue_final_message:
            messages, said = without_last_text(messages, place := new_key())
        writer = PromptWriter(
            self.chat_template,
            tools=quotation.value(unicode(tools or ()), key),
            tools_as_text=self.output.tools is not None and self.output.tools.is_generic,
            variables=names | quotation.value(dict(variables or {}), key),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
        )
        try:
            rendered = writer.write(messages)
        except (PromptError, TemplateError) as error:
            what, found = (str(said_of).replace(key, "") if said_of else None for said_of in (error.what, error.found))
            raise type(error)(what or "", expected=error.expected, found=found, remedy=error.remedy) from None
        if continue_final_message:
            rendered = prompt_before(place, rendered, said, self.output.reasoning)
        return quotation.read(rendered, key, said)

    @cached_property
    def _quotation(self) -> Quotation:
        """What keeps markers to the template."""
        source = self.chat_template.source
        written = "\n".join((source, *self.output.tokens))
        return Quotation(self.tokenizer.markers(written), source, self.output.own_markers)
