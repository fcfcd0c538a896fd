"""How models write thoughts and calls of tools, by what their chat templates write."""

from dataclasses import dataclass, replace
from typing import Self

from pi_runtime.text.quotation import parts_of

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
"""Harmony's markers (see `harmony`)."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The texts around name, keys and values, where arguments are pairs of these; with the white space of templates.

    before_name NAME after_name (before_key KEY after_key before_value VALUE after_value)* after_all
    """

    before_name: str = ""
    after_name: str = ""
    before_key: str
    after_key: str
    before_value: str
    """A tag; or a line end, and then one line end at either side of a value is not part of it."""
    after_value: str
    after_all: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the tokenizer."""
        texts = (self.before_key, self.after_key, self.before_value, self.after_value)
        return tuple(text.strip() for text in texts if text.strip().startswith("<"))


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way to write calls: a trigger, then calls one after the other.

    A call is JSON with the name and the arguments, or a head that ends with `[ARGS]`, and the arguments; or a name and
    pairs of keys and values (see `pairs`).
    """

    name: str
    trigger: str
    begin: str = ""
    """What stands before the first call of a trigger."""
    separator: str = ""
    """Stands between calls of one trigger; without one each call has a trigger of its own."""
    end: str = ""
    arguments: str = "arguments"
    """The key of the arguments."""
    gap: str = ""
    """White space around a call."""
    is_bare: bool = False
    """Whether an answer may also begin with a call without trigger."""
    has_head: bool = False
    """Whether a call is a head and arguments."""
    has_call_id: bool = False
    """Whether the head holds an id, after `[CALL_ID]`."""
    pairs: Pairs | None = None
    """The texts around keys and values, where arguments are pairs of these."""
    is_python: bool = False
    """Whether a call is written as Python writes it (see `python_calls`)."""
    before_name: str = ""
    """Stands between trigger and name, where texts among the arguments stand between marks (see `marked_calls`)."""
    quote: str = ""
    """This mark."""
    ends_thoughts: bool = False
    """Whether a call ends thoughts that were not closed, and is a call; elsewhere it is a part of them."""
    has_channels: bool = False
    """Whether an answer is messages in channels, of which a call is one (see `harmony`)."""
    is_generic: bool = False
    """Whether the template knows no tools: messages tell of them (see `history`), and a grammar shapes calls."""

    @classmethod
    def of(cls, template: str) -> "ToolFormat | None":
        """The format of what a chat template writes: `GENERIC` for none of those known here. None for nothing."""
        if CHANNEL in template:
            return HARMONY if "functions." in template else None
        if "[TOOL_CALLS]" in template:
            if "[ARGS]" in template:
                return MISTRAL_CALL_ID if "[CALL_ID]" in template else MISTRAL
            return MISTRAL_LIST
        listed = next((own for own in (PYTHON, NEMOTRON_V2, GEMMA_4) if own.trigger in template), None)
        if listed or "<tool_call>" in template:
            return listed or _tagged(template) or GENERIC
        if "<|start_header_id|>" in template and any(key in template for key in ('"parameters"', '\\"parameters\\"')):
            return LLAMA_3
        return GENERIC if template else None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the tokenizer."""
        more: tuple[str, ...] = ("[ARGS]", "[CALL_ID]") if self.has_head else ()
        end = self.end.removeprefix("]") or self.end
        more = (self.quote,) if self.quote else more
        return (self.trigger, end, *more, *(self.pairs.tags if self.pairs else ()))

    @property
    def triggers(self) -> tuple[str, ...]:
        """Texts by which a call is found: models forget the tag around what stands before a name."""
        opening = self.pairs.before_name.strip() if self.pairs else ""
        return (self.trigger, opening) if opening else (self.trigger,)

    @property
    def is_tagged(self) -> bool:
        """Whether each call that is JSON stands between tags of its own."""
        return bool(self.end) and not self.separator and self.pairs is None


HERMES = ToolFormat(name="hermes", trigger="<tool_call>", end="</tool_call>", gap="\n")
GENERIC = replace(HERMES, name="generic", is_generic=True)
GLM_4_5 = ToolFormat(
    name="glm-4.5",
    trigger="<tool_call>",
    end="</tool_call>",
    gap="\n",
    pairs=Pairs(
        after_name="\n",
        before_key="<arg_key>",
        after_key="</arg_key>",
        before_value="\n<arg_value>",
        after_value="</arg_value>\n",
    ),
)
GLM_4_7 = replace(
    GLM_4_5,
    name="glm-4.7",
    gap="",
    pairs=Pairs(before_key="<arg_key>", after_key="</arg_key>", before_value="<arg_value>", after_value="</arg_value>"),
)
QWEN_3_CODER = ToolFormat(
    name="qwen-3-coder",
    trigger="<tool_call>",
    end="</tool_call>",
    gap="\n",
    pairs=Pairs(
        before_name="\n<function=",
        after_name=">\n",
        before_key="<parameter=",
        after_key=">",
        before_value="\n",
        after_value="\n</parameter>\n",
        after_all="</function>\n",
    ),
    ends_thoughts=True,
)
LLAMA_3 = ToolFormat(name="llama-3", trigger="<|python_tag|>", separator=";", arguments="parameters", is_bare=True)
MISTRAL_LIST = ToolFormat(name="mistral-list", trigger="[TOOL_CALLS]", begin="[", separator=",", end="]")
NEMOTRON_V2 = replace(MISTRAL_LIST, name="nemotron-v2", trigger="<TOOLCALL>", end="]</TOOLCALL>")
MISTRAL = ToolFormat(name="mistral", trigger="[TOOL_CALLS]", has_head=True)
MISTRAL_CALL_ID = ToolFormat(name="mistral-call-id", trigger="[TOOL_CALLS]", has_head=True, has_call_id=True)
PYTHON = ToolFormat(
    name="python", trigger="<|tool_call_start|>", begin="[", separator=",", end="]<|tool_call_end|>", is_python=True
)
GEMMA_4 = ToolFormat(name="gemma-4", trigger="<|tool_call>", end="<tool_call|>", before_name="call:", quote='<|"|>')
HARMONY = ToolFormat(name="harmony", trigger=f"{CHANNEL}commentary to=functions.", has_channels=True)


def _tagged(template: str) -> ToolFormat | None:
    """The form of calls between tags `<tool_call>`; none where XML of another kind stands between them."""
    if "<arg_key>" in template:
        return GLM_4_7 if "</arg_key><arg_value>" in template else GLM_4_5
    if "<function=" in template:
        return QWEN_3_CODER if "<parameter=" in template else None
    return HERMES if "arguments" in template else None


THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""Gemma 4's markers are the last; to its tokenizer `<|channel>` alone is a token."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around thoughts."""

    begin: str
    end: str
    after: str = ""
    """What follows thoughts, before the channel of the next message; white space where there are no channels."""
    answer: str = ""
    """What stands before the answer proper, where an answer is messages in channels."""
    further: tuple[str, ...] = ()
    """More markers, by which messages are told apart."""

    @classmethod
    def of(cls, template: str) -> Self | None:
        """The format of a chat template; None where its model does not think."""
        if CHANNEL in template:
            begin, answer = (f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "final"))
            return cls(begin, "<|end|>", f"{START}assistant", answer, MARKERS)
        found = next((pair for pair in THOUGHTS if pair[1] in template), None)
        return found and cls(*found, further=(found[0].removesuffix("thought"),))

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the tokenizer."""
        return self.begin, self.end, *self.further

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends within thoughts, which the template or the assistant's text up to here has begun."""
        return self._last(prompt) == self.begin

    def is_closed(self, prompt: str) -> bool:
        """Whether there will be no thoughts: they have been ended, or the assistant's text has begun without them."""
        last = self._last(prompt)
        return last == self.end or (not last and not self.answer and bool(parts_of(prompt)[1].strip()))

    def _last(self, prompt: str) -> str:
        """The last marker of thoughts in the assistant's text up to here, or the one that stands before it."""
        before, said = parts_of(prompt)
        begin, end = said.rfind(self.begin), said.rfind(self.end)
        if begin != end:
            return self.begin if begin > end else self.end
        return next((marker for marker in (self.begin, self.end) if before.rstrip().endswith(marker)), "")
