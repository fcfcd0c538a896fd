"""Small vocabularies as a GGUF file holds them, without weights and without a file."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pi_compile.checkpoint.gguf.file import GgufFile

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def letters_of_bytes() -> dict[int, str]:
    """The letter that stands for each byte, as GPT-2 has it: itself where it can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return {b: chr(b) for b in seen} | {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in seen)}


LETTERS = [letter for _, letter in sorted(letters_of_bytes().items())]
"""The tokens 0 to 255 of a byte-level vocabulary: each byte's letter."""


def byte_level(extra: Iterable[tuple[str, int]] = (), merges: Iterable[str] = (), **metadata: Any) -> GgufFile:
    """A byte's letter for each id below 256, then `extra` tokens with their types, then what `merges` make."""
    extra, merges = list(extra), list(merges)
    known = {*LETTERS, *(token for token, _ in extra)}
    made = [token for token in dict.fromkeys(merge.replace(" ", "") for merge in merges) if token not in known]
    tokens = [*((letter, NORMAL) for letter in LETTERS), *extra, *((token, NORMAL) for token in made)]
    return vocabulary(tokens, {KEY + "merges": merges}, **{"model": "gpt2", "pre": "gpt-2", **metadata})


def sentencepiece(pieces: Iterable[tuple[str, int]], **metadata: Any) -> GgufFile:
    """<unk>, <s>, </s>, a token for each byte from id 3, then pieces with their types; earlier ones merge first."""
    first = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((f"<0x{b:02X}>", BYTE) for b in range(256))]
    tokens = [*first, *pieces]
    scores = [0.0 if kind != NORMAL else -float(n) for n, (_, kind) in enumerate(tokens)]
    return vocabulary(tokens, {}, **{"model": "llama", "pre": "default", "scores": scores, **metadata})


def vocabulary(tokens: Iterable[tuple[str, int]], lists: Mapping[str, Iterable[str]], **metadata: Any) -> GgufFile:
    """A file with these tokens, lists of strings, and keys of `tokenizer.ggml.`; those that are None are left out."""
    tokens = list(tokens)
    strings = {KEY + "tokens": [token for token, _ in tokens], **lists}
    keys = {"token_type": [kind for _, kind in tokens], **metadata}
    return GgufFile(
        path=Path("model.gguf"),
        metadata={"general.architecture": "llama"} | {KEY + k: value for k, value in keys.items() if value is not None},
        string_lists={key: _stored(values) for key, values in strings.items()},
        tensors={},
        path_of={},
        paths=(),
        of_powerinfer=False,
    )


def _stored(strings: Iterable[str]) -> np.ndarray:
    data = b"".join(struct.pack("<Q", len(s.encode())) + s.encode() for s in strings)
    return np.frombuffer(data, np.uint8)
