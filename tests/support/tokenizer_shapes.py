"""Tokenizers of every published kind of decoder, small enough to see: `KINDS` has the tokenizer.json of each."""

import json
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
STRIPPING = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def special(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def tokenizer_json(decoder: Any, tokens: list[str], **parts: Any) -> bytes:
    """A tokenizer.json whose first three tokens are special; it encodes letter by letter."""
    tokens = ["<unk>", "<s>", "</s>", *tokens]
    model = {"type": "BPE", "vocab": {token: n for n, token in enumerate(tokens)}, "merges": [], "unk_token": "<unk>"}
    model["byte_fallback"] = "<0x0A>" in tokens
    whole = {"version": "1.0", "added_tokens": [special(n, tokens[n]) for n in range(3)], "decoder": decoder}
    return json.dumps({**whole, "model": model, **parts}).encode()


BYTES = [f"<0x{n:02X}>" for n in (0x41, 0x20, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0xFF)]
PIECES = ["▁", "▁▁", "▁a", "a", "b", "é", "�", "▁hello", "."]
KINDS = {
    "byte-level": tokenizer_json(
        LETTERS,
        [*sorted(ByteLevel.alphabet()), "Ġhe", "llo", "Ã©", "ðŁĺ", "Ģ"],
        pre_tokenizer=LETTERS,
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<unk>",
            "pad_to_multiple_of": None,
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
    ),
    "byte-fallback": tokenizer_json({"type": "Sequence", "decoders": STRIPPING}, PIECES + BYTES),
    "metaspace": tokenizer_json(METASPACE, PIECES),
    "wordpiece": tokenizer_json({"type": "WordPiece", "prefix": "##", "cleanup": True}, ["a", "##b", ".", "'", "s"]),
    "word-end": tokenizer_json({"type": "BPEDecoder", "suffix": "</w>"}, ["a", "a</w>", "b</w>"]),
    "none": tokenizer_json(None, ["a", "b"]),
}
ALL_BYTES = [f"<0x{n:02X}>" for n in range(256)]
PREPEND = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
FIRST = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
KINDS |= {
    # Llama 2's and ReLULLaMA's tokenizer.json, and that of `legacy: false`.
    "llama-2": tokenizer_json(
        {"type": "Sequence", "decoders": STRIPPING},
        PIECES + ALL_BYTES,
        normalizer={"type": "Sequence", "normalizers": PREPEND},
    ),
    "mistral": tokenizer_json({"type": "Sequence", "decoders": STRIPPING}, PIECES + ALL_BYTES, pre_tokenizer=FIRST),
    # Phi-3 prepends as Llama 2; a text after its markers loses the white space there.
    "phi-3": tokenizer_json(
        {"type": "Sequence", "decoders": STRIPPING},
        PIECES + ALL_BYTES,
        normalizer={"type": "Sequence", "normalizers": PREPEND},
        added_tokens=[{**special(n, token), "rstrip": n > 0} for n, token in enumerate(["<unk>", "<s>", "</s>"])],
    ),
    # Gemma strips nothing.
    "gemma": tokenizer_json({"type": "Sequence", "decoders": STRIPPING[:3]}, PIECES + ALL_BYTES),
    "metaspace-never": tokenizer_json({**METASPACE, "prepend_scheme": "never"}, PIECES),
    "metaspace-first": tokenizer_json(FIRST, PIECES),
}
SHAPES = list(KINDS)
SIZES = {kind: len(json.loads(data)["model"]["vocab"]) for kind, data in KINDS.items()}
