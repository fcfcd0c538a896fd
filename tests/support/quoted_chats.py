"""A model of bytes and markers, whose template writes markers as ChatML does."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.synthetic import random_artifact, small_decoder

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MARKERS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<b>"]
START = 256
"""The first marker's id."""
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}\
{{ '<tool_call>{"name", "arguments"}</tool_call><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (who or '') }}
{%- if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def byte_tokenizer() -> bytes:
    found = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(BYTES)}, merges=[]))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.add_special_tokens(MARKERS[:3])
    found.add_tokens(MARKERS[3:])
    return found.to_str().encode()


def quoting_artifact(path: Path, template: str = TEMPLATE) -> Path:
    """A random model with these tokens."""
    decoder = small_decoder(context_length=4096, vocab_size=256 + len(MARKERS))
    files = {"chat_template.jinja": template.encode(), "tokenizer.json": byte_tokenizer()}
    return random_artifact(path, decoder, scale=2.0, files=files)
