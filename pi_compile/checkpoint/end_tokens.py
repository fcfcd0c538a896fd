"""Control tokens that end a text by their name, whether or not the checkpoint's settings list them.

Source: llama.cpp's list of end-of-generation tokens (`llama-vocab.cpp`), with its exceptions. Unlike there only control
tokens count: `</s>` in Qwen's vocabulary is a word like any other. Markers of the next turn are not in the list.
"""

from collections.abc import Collection

_ENDS = frozenset(
    """
    <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|>
    <|end_of_text|> </s> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    <｜end▁of▁sentence｜>
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
    """.split()  # noqa: RUF001 (as it is published)
)
"""The last line: between files that are filled in, or behind the last one."""
_NO_END_BESIDE = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
    ("</s>", {"<|plamo:eos|>"}),
)
"""A token that is no end in a vocabulary that has all these: gpt-oss ends messages by `<|end|>`, and Gemma 4 nothing."""


def named_ends(control: Collection[str]) -> set[str]:
    """Those of the control tokens that end a text."""
    found = set(control)
    return {token for token in found & _ENDS if not any(token == t and those <= found for t, those in _NO_END_BESIDE)}
