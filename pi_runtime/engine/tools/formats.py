"""How models write calls of tools, by what their chat templates write."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pi_runtime.engine.tools.harmony import CHANNEL

KEY, VALUE = "<arg_key>", "<arg_value>"
"""The tags before a key and a value, where arguments are pairs of them."""


def ends_of(tag: str) -> str:
    """The tag that ends what a tag begins."""
    return f"</{tag[1:]}"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way to write calls: a trigger, then calls one after the other.

    A call is JSON with the name and the arguments, or a head that ends with `[ARGS]`, and the arguments; or a name and
    pairs of tags (see `pairs`).
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
    has_pairs: bool = False
    """Whether arguments are pairs of keys and values, with `gap` between tags."""
    has_channels: bool = False
    """Whether an answer is messages in channels, of which a call is one (see `harmony`)."""
    is_told: bool = False
    """Whether the template knows no tools: messages tell of them (see `told`), and a grammar shapes calls."""

    @classmethod
    def of(cls, template: str) -> "ToolFormat | None":
        """The format of what a chat template writes: `GENERIC` for none of those known here. None for nothing."""
        if CHANNEL in template:
            return HARMONY if "functions." in template else None
        if "[TOOL_CALLS]" in template:
            if "[ARGS]" in template:
                return MISTRAL_CALL_ID if "[CALL_ID]" in template else MISTRAL
            return MISTRAL_LIST
        if "<tool_call>" in template:
            return _tagged(template) or GENERIC
        if "<|start_header_id|>" in template and _has_any(template, ('"parameters"', '\\"parameters\\"')):
            return LLAMA_3
        return GENERIC if template else None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the tokenizer."""
        more = ("[ARGS]", "[CALL_ID]") if self.has_head else ()
        return (self.trigger, self.end, *more, *((KEY, ends_of(KEY), VALUE, ends_of(VALUE)) if self.has_pairs else ()))


HERMES = ToolFormat(name="hermes", trigger="<tool_call>", end="</tool_call>", gap="\n")
GENERIC = replace(HERMES, name="generic", is_told=True)
GLM_4_5 = ToolFormat(name="glm-4.5", trigger="<tool_call>", end="</tool_call>", gap="\n", has_pairs=True)
GLM_4_7 = replace(GLM_4_5, name="glm-4.7", gap="")
LLAMA_3 = ToolFormat(name="llama-3", trigger="<|python_tag|>", separator=";", arguments="parameters", is_bare=True)
MISTRAL_LIST = ToolFormat(name="mistral-list", trigger="[TOOL_CALLS]", begin="[", separator=",", end="]")
MISTRAL = ToolFormat(name="mistral", trigger="[TOOL_CALLS]", has_head=True)
MISTRAL_CALL_ID = ToolFormat(name="mistral-call-id", trigger="[TOOL_CALLS]", has_head=True, has_call_id=True)
HARMONY = ToolFormat(name="harmony", trigger=f"{CHANNEL}commentary to=functions.", has_channels=True)


def _tagged(template: str) -> ToolFormat | None:
    """The form of calls between tags `<tool_call>`; none where XML stands between them."""
    if KEY in template:
        return GLM_4_7 if f"{ends_of(KEY)}{VALUE}" in template else GLM_4_5
    return HERMES if "arguments" in template and "<function=" not in template else None


def _has_any(template: str, texts: Iterable[str]) -> bool:
    return any(text in template for text in texts)
