"""How models write calls of tools, by what their chat templates say."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pi_runtime.engine.tools.harmony import CHANNEL


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way to write calls: a trigger, then calls one after the other.

    A call is JSON with the name and the arguments, or a head that ends with `[ARGS]`, and the arguments.
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
    has_channels: bool = False
    """Whether an answer is messages in channels, of which a call is one (see `harmony`)."""
    is_told: bool = False
    """Whether the template knows no tools: messages tell of them (see `told`), and a grammar shapes calls."""

    @classmethod
    def of(cls, template: str) -> "ToolFormat | None":
        """The format of a chat template: `GENERIC` where it has none of those known here. None without a template."""
        if CHANNEL in template:
            return HARMONY if "functions." in template else None
        if "[TOOL_CALLS]" in template:
            if "[ARGS]" in template:
                return MISTRAL_CALL_ID if "[CALL_ID]" in template else MISTRAL
            return MISTRAL_LIST
        # Others have the same tags around XML or lists of keys.
        if (
            "<tool_call>" in template
            and "arguments" in template
            and not _has_any(template, ("<function=", "<arg_key>"))
        ):
            return HERMES
        if "<|start_header_id|>" in template and _has_any(template, ('"parameters"', '\\"parameters\\"')):
            return LLAMA_3
        return GENERIC if template else None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the tokenizer."""
        return (self.trigger, self.end, *(("[ARGS]", "[CALL_ID]") if self.has_head else ()))


HERMES = ToolFormat(name="hermes", trigger="<tool_call>", end="</tool_call>", gap="\n")
GENERIC = replace(HERMES, name="generic", is_told=True)
LLAMA_3 = ToolFormat(name="llama-3", trigger="<|python_tag|>", separator=";", arguments="parameters", is_bare=True)
MISTRAL_LIST = ToolFormat(name="mistral-list", trigger="[TOOL_CALLS]", begin="[", separator=",", end="]")
MISTRAL = ToolFormat(name="mistral", trigger="[TOOL_CALLS]", has_head=True)
MISTRAL_CALL_ID = ToolFormat(name="mistral-call-id", trigger="[TOOL_CALLS]", has_head=True, has_call_id=True)
HARMONY = ToolFormat(name="harmony", trigger=f"{CHANNEL}commentary to=functions.", has_channels=True)


def _has_any(template: str, texts: Iterable[str]) -> bool:
    return any(text in template for text in texts)
