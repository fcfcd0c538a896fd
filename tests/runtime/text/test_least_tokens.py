"""A text never has fewer tokens than its length tells, and where that cannot be known nothing is said."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support.paths import ROOT
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pi_runtime.text.least_tokens import LeastTokens

UNKNOWN = "<unk>"
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
LETTERS = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def byte_level(**parts: Any) -> tokenizers.Tokenizer:
    merges = [("a", "b"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ab", "ab")]
    vocabulary = LETTERS | {"".join(pair): 256 + n for n, pair in enumerate(merges)}
    return made(models.BPE(vocabulary, merges), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), **parts)


def byte_fallback(**parts: Any) -> tokenizers.Tokenizer:
    vocabulary = BYTES | {UNKNOWN: 256, "▁": 257, "a": 258, "▁a": 259}
    model = models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token=UNKNOWN, fuse_unk=True)
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made(model, normalizer=spaces, decoder=decoders.ByteFallback(), **parts)


def made(model: Any, *, added: AddedToken | None = None, **parts: Any) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(found, name, part)
    if added is not None:
        found.add_special_tokens([added])
    return found


BOUNDED = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "composed": byte_level(normalizer=normalizers.NFC()),
    "stripped": byte_level(added=AddedToken("<end>", lstrip=True, rstrip=True)),
    "demo": tokenizers.Tokenizer.from_file(str(ROOT / "recipes" / "demo" / "tokenizer.json")),
}
COMPOSING = ["\u212b\u0301", "\u0399", "\u1fbe\u0308\u0341", "\u2126\u0313\u0340\u0345"]
PIECES = [*COMPOSING, "ab", " ", "<end>", "\u3000", "é", "\n", "漢"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=40).map("".join)


@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXTS, times=st.sampled_from([1, 50]))
def test_no_text_has_fewer_tokens(name: str, text: str, times: int) -> None:
    library = BOUNDED[name]
    tokens = len(library.encode(text * times, add_special_tokens=False).ids)
    assert LeastTokens(library)(text * times) <= tokens


@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_text_has_many(name: str) -> None:
    least = LeastTokens(BOUNDED[name])
    assert least("é" * 10_000 * least.longest) >= 5_000
    assert least("") == 0


UNBOUNDED = {
    "white space is one": byte_level(normalizer=normalizers.Replace(tokenizers.Regex(r"\s+"), " ")),
    "stripped at its ends": byte_level(normalizer=normalizers.Strip()),
    "spaces left out": byte_fallback(pre_tokenizer=pre_tokenizers.Whitespace()),
    "parts removed": byte_fallback(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    "unknown texts are one token": made(models.BPE({"a": 0, UNKNOWN: 1}, [], unk_token=UNKNOWN, fuse_unk=True)),
    "unknown words are one token": made(models.WordLevel({"a": 0, UNKNOWN: 1}, unk_token=UNKNOWN)),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_a_tokenizer_may_leave_something_out_nothing_is_said(name: str) -> None:
    assert LeastTokens(UNBOUNDED[name])(" x" * 100_000) == 0
