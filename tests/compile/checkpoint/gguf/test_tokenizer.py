"""Vocabulary, special tokens, begin and end of a GGUF file's text are those that llama.cpp reads from it."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.gguf_vocabularies import (
    CONTROL,
    LETTERS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_level,
    sentencepiece,
    vocabulary,
)

from pi_compile.checkpoint.gguf.file import GgufFile
from pi_compile.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, REFUSED
from pi_compile.checkpoint.tokenizer_files import TextFiles, read_text_files
from pi_compile.errors import CheckpointError
from pi_runtime.text.tokenizer import Tokenizer

END = ("<e>", CONTROL)
LLAMA_3 = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"


def names_of(file: GgufFile) -> list[str]:
    return file.strings("tokenizer.ggml.tokens")


def read(file: GgufFile, **config: Any) -> TextFiles:
    return read_text_files(file.path, len(names_of(file)), config, file)


def tokenizer(file: GgufFile) -> Tokenizer:
    text = read(file)
    return Tokenizer(text.files["tokenizer.json"], text.text, vocab_size=len(names_of(file)))


def tokens(file: GgufFile, text: str, *, prefix: bool = False) -> list[str]:
    names = names_of(file)
    return [names[i] for i in tokenizer(file).encode(text, prefix=prefix)]


def test_whose_words_are_tokens_whatever_the_merges() -> None:
    whole = {name for name, rule in PRE_TOKENIZERS.items() if rule.whole}
    assert whole == {*LLAMA_3.split(), "tekken", "minicpm5", "youtu", "glm4", "glm5", "granite-embed-multi-97m"}


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_a_word_that_no_merge_makes(name: str) -> None:
    """Where merges count alone it falls into bytes, and so does a word that only begins with it."""
    file = byte_level([("ĠViá»ĩt", NORMAL), END], pre=name)
    assert (tokens(file, " Vi\u1ec7t") == ["ĠViá»ĩt"]) == PRE_TOKENIZERS[name].whole
    assert tokens(file, " Vi\u1ec7tx") == [*"ĠViá»ĩtx"]


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("name", [*sorted(PRE_TOKENIZERS), None, "unheard-of"])
def test_what_a_text_begins_with(name: str | None, said: bool | None) -> None:
    """By default BOS with Llama 3's kin, Mistral's and Chameleon's; what the file says wins. EOS has no say in it."""
    begins = name in {*LLAMA_3.split(), "tekken", "chameleon"} if said is None else said
    for ends in (None, True, False):
        keys = {"pre": name, "add_bos_token": said, "add_eos_token": ends, "bos_token_id": 256, "eos_token_id": 257}
        text = read(byte_level([("<s>", CONTROL), END], **keys))
        assert text.text.prefix_ids == ((256,) if begins else ())
        assert not any("ends each text" in notice for notice in text.notices)


def test_a_begin_token_of_any_spelling() -> None:
    for bos in ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<|a:1|>", "$A", "  "):
        file = byte_level([(bos, CONTROL), END], add_bos_token=True, bos_token_id=256)
        assert tokens(file, "hi", prefix=True) == [bos, "h", "i"]


MARKERS = [
    "<\uff5cUser\uff5c>",
    "<|im_start|>",
    "<think>",
    "    ",
    "\n\n\n",
    "\u2581\u2581",
    "[/INST]",
    "<\xe9t\xe9>",
    "\U0001f642",
]


@pytest.mark.parametrize("kind", [UNKNOWN, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_is_found_as_it_is_written(marker: str, kind: int) -> None:
    file = byte_level([(marker, kind), END])
    assert tokens(file, f"a{marker}b{marker}") == ["a", marker, "b", marker]
    assert tokens(file, marker[:-1] + "x") == tokens(byte_level([END]), marker[:-1] + "x")


@pytest.mark.parametrize("marker", MARKERS)
def test_only_control_tokens_are_without_text(marker: str) -> None:
    file = byte_level([(marker, USER_DEFINED), ("<c>", CONTROL), END])
    assert tokenizer(file).token_bytes(256) == marker.encode()
    assert tokenizer(file).decode([97, 257, 98]) == tokenizer(file).decode([97, 98])


def test_the_longest_marker_is_taken_and_the_first() -> None:
    file = byte_level([("  ", USER_DEFINED), ("    ", USER_DEFINED), ("<a>", CONTROL), ("<a>>", CONTROL), END])
    assert tokens(file, "a     b") == ["a", "    ", "Ġ", "b"]
    assert tokens(file, "<a>>><a>") == ["<a>>", ">", "<a>"]


def test_an_ordinary_token_is_no_marker() -> None:
    file = byte_level([("<\uff5cx\uff5c>", NORMAL), ("</s>", NORMAL), END], padding_token_id=0, unknown_token_id=257)
    assert tokens(file, "</s>") == [*"</s>"]
    assert len(tokens(file, "<\uff5cx\uff5c>")) == 9
    assert tokens(file, "!") == ["!"]
    assert tokenizer(file).decode(tokenizer(file).encode("\x00</s>")) == "\x00</s>"
    assert read(file).text.special_tokens == {}


KEYS = ["bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id", "eot_token_id", "eom_token_id"]


@pytest.mark.parametrize("token_id", [0xFFFFFFFF, -1, 258, 10**6])
@pytest.mark.parametrize("key", KEYS)
def test_an_id_outside_the_vocabulary_is_as_if_it_were_not_there(key: str, token_id: int) -> None:
    ids = {"bos_token_id": 256, "eos_token_id": 257, "add_bos_token": True}
    extra = [("<s>", CONTROL), END]
    assert read(byte_level(extra, **{**ids, key: token_id})) == read(byte_level(extra, **{**ids, key: None}))


@pytest.mark.parametrize("token_id", [0xFFFFFFFF, -1, 10**6, None])
def test_the_special_tokens_of_a_sentencepiece_vocabulary_have_default_ids(token_id: int | None) -> None:
    ids = dict.fromkeys(["bos_token_id", "eos_token_id", "unknown_token_id"], token_id)
    text = read(sentencepiece([("\u2581h", NORMAL)], **ids)).text
    assert (text.bos_token, text.eos_token, text.prefix_ids, text.end_ids) == ("<s>", "</s>", (1,), (2,))
    assert text.special_tokens == {"unk_token": "<unk>"}


@pytest.mark.parametrize("merges", [["x y", "1 2"], ["1 2", "x yz"], ["12 3", "1 2"], ["1", "1 2"], ["", "1 2"]])
def test_a_merge_whose_token_is_missing_is_passed_over(merges: list[str]) -> None:
    keys = {"model": "gpt2", "pre": "gpt-2", "eos_token_id": 256}
    plain = [*((letter, NORMAL) for letter in LETTERS), END, ("12", NORMAL)]
    file = vocabulary(plain, {"tokenizer.ggml.merges": merges}, **keys)
    assert tokens(file, "123xyz") == ["12", "3", "x", "y", "z"]


def test_a_sentencepiece_vocabulary_with_merges() -> None:
    pieces = [(piece, NORMAL) for piece in ("\u2581", "h", "i", "\u2581h", "\u2581hi")]
    file = sentencepiece([*pieces, ("<|x|>", CONTROL), ("<t>", USER_DEFINED)])
    with_merges = vocabulary(
        list(zip(names_of(file), file.metadata["tokenizer.ggml.token_type"], strict=True)),
        {"tokenizer.ggml.merges": ["\u2581 h", "q h", "\u2581h i"]},
        model="llama",
    )
    for read_from in (file, with_merges):
        assert tokens(read_from, "hi<|x|>hi<t>h", prefix=True) == [
            "<s>",
            "\u2581hi",
            "<|x|>",
            "\u2581hi",
            "<t>",
            "\u2581h",
        ]


@pytest.mark.parametrize(
    ("name", "takes"), [("Phi-3 mini", True), ("my-phi3-tune", True), ("Phi 2", False), (None, False)]
)
def test_the_markers_of_phi_3_take_the_blanks_behind_them(name: str | None, takes: bool) -> None:
    file = sentencepiece([("<|end|>", CONTROL), ("▁", NORMAL), ("h", NORMAL)], add_space_prefix=False)
    file = replace(file, metadata=dict(file.metadata) | {"general.name": name})
    blanks = [] if takes else ["▁", "<0x0A>"]
    assert tokens(file, "h<|end|> \n<s> h") == ["h", "<|end|>", *blanks, "<s>", "▁", "h"]


@pytest.mark.parametrize("add", [None, True, False])
def test_what_a_sentencepiece_text_begins_with(add: bool | None) -> None:
    text = read(sentencepiece([("\u2581", NORMAL), ("h", NORMAL)], add_bos_token=add, add_eos_token=True))
    assert text.text.prefix_ids == (() if add is False else (1,))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_rule_that_is_not_supported_is_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.pre = '{name}' is not supported") as caught:
        read(byte_level([END], pre=name))
    assert "use the model's Hugging Face checkpoint" in str(caught.value)


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_a_vocabulary_that_is_missing(key: str) -> None:
    file = byte_level([END])
    del file.string_lists[f"tokenizer.ggml.{key}"]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=rf"no tokenizer\.ggml\.{key}"):
        read_text_files(file.path, 257, {}, file)


@pytest.mark.parametrize(
    ("model", "name", "notice"),
    [
        *(("gpt2", name, None) for name in sorted(PRE_TOKENIZERS)),
        ("gpt2", "unheard-of", "tokenizer.ggml.pre = 'unheard-of' is not known: text is cut by the rule 'default'"),
        ("gpt2", None, "the file names no pre-tokenizer: text is cut by the rule 'default'"),
        ("gpt2", "", "the file names no pre-tokenizer: text is cut by the rule 'default'"),
        ("llama", "default", None),
        ("llama", "anything", None),
        ("llama", None, None),
    ],
)
def test_what_is_said_of_the_rule(model: str, name: str | None, notice: str | None) -> None:
    merges = ["1 2", "3 4"]
    file = byte_level([END], merges, pre=name) if model == "gpt2" else sentencepiece([("\u2581", NORMAL)], pre=name)
    text = read(file, eos_token_id=2)
    assert [said[: len(notice or "")] for said in text.notices] == ([] if notice is None else [notice])
    if model == "gpt2" and name not in PRE_TOKENIZERS:
        probe = "12 34's `x` 1234"
        assert tokens(file, probe) == tokens(byte_level([END], merges, pre="default"), probe)
