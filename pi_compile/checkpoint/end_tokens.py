"""Control tokens that end a text by their name, whether or not the checkpoint's settings list them.

Source: llama.cpp's list of end-of-generation tokens (`llama-vocab.cpp`), with its exceptions. Unlike there only control
tokens count: `</s>` in Qwen's vocabulary is a word like any other. Markers of the next turn are not in the list.
"""

from collections.abc import Collection

_ENDS_OF_TEXT = """
    <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|>
    <|end_of_text|> </s> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    <\uff5cend\u2581of\u2581sentence\uff5c>
"""
_ENDS_OF_FILES = """
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
"""Between files of which one is filled in, and behind the last."""
_NO_END_BESIDE = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
    ("</s>", {"<|plamo:eos|>"}),
)
"""A token that is no end where all these are: gpt-oss ends a message by `<|end|>`, and Gemma 4 nothing by `</s>`."""


def named_ends(control: Collection[str]) -> set[str]:
    """Those of the control tokens that end a text."""
    found = set(control)
    no_ends = {token for token, others in _NO_END_BESIDE if others <= found}
    return found & {*_ENDS_OF_TEXT.split(), *_ENDS_OF_FILES.split()} - no_ends
