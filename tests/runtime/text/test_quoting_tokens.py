"""Ids of prompts with quotations, by tokenizers of all kinds: what is quoted is text, all else is as it was."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers.pre_tokenizers import ByteLevel

from pi_runtime.artifact.schema import Text
from pi_runtime.text.quotation import RenderedPrompt
from pi_runtime.text.quoting_tokens import QuotingTokens
from pi_runtime.text.tokenizer import Tokenizer

QUOTED = "<|q|>"
BYTES = [f"<0x{n:02X}>" for n in range(256)]
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACE]}
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": True}
LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PIECES = [*"▁ab<|q>xé☃", "▁a", "ab", "▁ab", "<|", "|>", "▁▁", "q|", "a<", ">b"]
MERGES = [["▁", "a"], ["a", "b"], ["▁a", "b"], ["<", "|"], ["|", ">"], ["▁", "▁"], ["q", "|"], ["a", "<"], [">", "b"]]
BYTE_PIECES = [*sorted(ByteLevel.alphabet()), "Ġa", "ab", "Ġab", "<|", "|>", "q|", "a<", ">b", "ĠĠ"]
BYTE_MERGES = [[{"▁": "Ġ"}.get(letter, letter.replace("▁", "Ġ")) for letter in merge] for merge in MERGES]


def added(token_id: int, content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    usual = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), **flags}
    return {"id": token_id, "content": content, "special": special, **usual}


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}


def kind(
    model: dict[str, Any],
    words: list[str],
    *,
    in_model: bool = True,
    flags: dict[str, bool] | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """A tokenizer.json; its special tokens are the first three words and, at the end, some of all sorts."""
    more = ["[X]", "<t>", "  ", "ax", QUOTED]
    vocabulary = [*words, *(more if in_model else ())]
    tokens = [added(n, word, **(flags or {})) for n, word in enumerate(words[:3])]
    for n, word in enumerate(more, len(words)):
        own = {"[X]": {"lstrip": True, "rstrip": True}, "<t>": {"special": False}, "ax": {"special": False}}
        tokens.append(added(n, word, **{**(flags or {}), **own.get(word, {"special": word == QUOTED})}))
    given = [[word, -float(n)] for n, word in enumerate(vocabulary)]
    vocab: Any = given if model["type"] == "Unigram" else {word: n for n, word in enumerate(vocabulary)}
    return {"version": "1.0", "added_tokens": tokens, "model": {**model, "vocab": vocab}, **parts}


BPE = {"type": "BPE", "merges": MERGES, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
BYTE_BPE = {"type": "BPE", "merges": BYTE_MERGES}
MARKERS = ["<unk>", "<s>", "</s>"]
SP_WORDS = [*MARKERS, *BYTES, *PIECES]
BYTE_WORDS = [*MARKERS, *BYTE_PIECES]
KINDS = {
    "llama 2": kind(BPE, SP_WORDS, normalizer=PREPEND),
    "llama 2, normalized": kind(BPE, SP_WORDS, normalizer=PREPEND, flags={"normalized": True}),
    "mistral": kind(BPE, SP_WORDS, pre_tokenizer=metaspace("first")),
    "metaspace": kind(BPE, SP_WORDS, pre_tokenizer=metaspace("always"), in_model=False),
    "gemma": kind({**BPE, "merges": [*MERGES, ["<|", "q|"], ["<|q|", ">"]]}, [*SP_WORDS, "<|q|"], normalizer=SPACE),
    "no bytes": kind({**BPE, "byte_fallback": False}, [*MARKERS, *PIECES], normalizer=SPACE),
    "unigram": kind(
        {"type": "Unigram", "unk_id": 0},
        [*MARKERS, *PIECES],
        pre_tokenizer=metaspace("always"),
        normalizer={"type": "NFKC"},
    ),
    "byte-level": kind(BYTE_BPE, BYTE_WORDS, pre_tokenizer=LETTERS, post_processor=LETTERS),
    "llama 3": kind({**BYTE_BPE, "ignore_merges": True}, BYTE_WORDS, pre_tokenizer=LETTERS, in_model=False),
    "gguf": kind({**BYTE_BPE, "ignore_merges": True}, BYTE_WORDS, pre_tokenizer={**LETTERS, "use_regex": False}),
    "opt": kind(BYTE_BPE, BYTE_WORDS, pre_tokenizer={**LETTERS, "add_prefix_space": True}, flags={"normalized": True}),
    "single words": kind(BYTE_BPE, BYTE_WORDS, pre_tokenizer=LETTERS, flags={"single_word": True}),
    "bert": kind(
        {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9},
        [*MARKERS, *"ab<|q>x", "##b", "##a", "##x", "##q"],
        normalizer={**BERT, "lowercase": True},
        pre_tokenizer={"type": "BertPreTokenizer"},
    ),
    "words": kind(
        {"type": "WordLevel", "unk_token": "<unk>"}, [*MARKERS, "a", "ab"], pre_tokenizer={"type": "WhitespaceSplit"}
    ),
}
HOLES = {word: n + 7 * (n > 2) for word, n in KINDS["llama 3"]["model"]["vocab"].items()}
KINDS["ids with holes"] = {
    **KINDS["llama 3"],
    "model": {**KINDS["llama 3"]["model"], "vocab": HOLES},
    "added_tokens": [token for token in KINDS["llama 3"]["added_tokens"] if token["content"] in (*MARKERS, QUOTED)],
}
HOLES[QUOTED] = 3
TEXTS = st.lists(
    st.sampled_from(
        [*MARKERS, QUOTED, "[X]", "<t>", "ax", "a", "b", " ", "  ", "\n", "<", "|", ">", "q", "é", "☃", "ab", " a"]
    ),
    max_size=12,
).map("".join)


def library(state: dict[str, Any]) -> Library:
    return Library.from_str(json.dumps(state))


def without_quoted(state: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer without the token that is quoted, which is its last one."""
    vocab, model = state["model"]["vocab"], state["model"]
    words = [one for one in vocab if one[0] != QUOTED] if isinstance(vocab, list) else None
    fewer = words if words is not None else {word: n for word, n in vocab.items() if word != QUOTED}
    merges = [pair for pair in model.get("merges", ()) if "".join(pair) != QUOTED]
    tokens = [token for token in state["added_tokens"] if token["content"] != QUOTED]
    return {
        **state,
        "added_tokens": tokens,
        "model": {**model, "vocab": fewer, **({"merges": merges} if merges else {})},
    }


def quoting(text: str) -> RenderedPrompt:
    """All that is spelled as the quoted token is cut."""
    return RenderedPrompt(text, [at + 1 for at in range(len(text)) if text.startswith(QUOTED, at)])


@pytest.mark.parametrize("name", KINDS)
def test_without_a_quotation_nothing_changes(name: str) -> None:
    """Markers that the template wrote are tokens, and what stands between them is encoded as in one piece."""
    plain = library(KINDS[name])
    quoted = QuotingTokens(plain)

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    @example("<s> a<t>b[X] a</s>\n<s>ab")
    def check(text: str) -> None:
        assert quoted.ids(RenderedPrompt(text)) == plain.encode(text, add_special_tokens=False).ids

    check()


@pytest.mark.parametrize("name", KINDS)
def test_what_is_quoted_is_what_it_is_without_that_token(name: str) -> None:
    quoted, without = QuotingTokens(library(KINDS[name])), library(without_quoted(KINDS[name]))

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    @example(f"<s> a{QUOTED}b</s>{QUOTED}{QUOTED} <s>a {QUOTED} b")
    @example(f"{QUOTED} a")
    def check(text: str) -> None:
        assert quoted.ids(quoting(text)) == without.encode(text, add_special_tokens=False).ids

    check()


def test_one_text_has_a_marker_and_quotes_it() -> None:
    tokenizer = Tokenizer(json.dumps(KINDS["llama 2"]).encode(), Text(prefix_ids=(1,), end_ids=(2,)), vocab_size=999)
    text = "<s>a</s>b</s>"
    ids = tokenizer.encode(RenderedPrompt(text, [text.index("</s>") + 1]))
    assert (ids[0], ids[-1], ids.count(1), ids.count(2)) == (1, 2, 1, 1)
    names = [tokenizer._library.id_to_token(n) for n in ids]
    assert names == ["<s>", "▁a", "<", "<0x2F>", "<0x73>", ">b", "</s>"]
    assert tokenizer.encode(text).count(2) == 2  # a raw prompt keeps its markers


def test_a_marker_that_a_quotation_completes_is_text() -> None:
    plain = library(KINDS["byte-level"])
    quoted = QuotingTokens(plain)
    end = plain.token_to_id("</s>")
    assert end in plain.encode("</s>", add_special_tokens=False).ids
    for cut in range(1, 5):
        assert end not in quoted.ids(RenderedPrompt("</s>", [cut]))
    assert end in quoted.ids(RenderedPrompt("a</s>b", [1, 6]))
