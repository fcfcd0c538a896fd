"""Tokenizers of every decoder kind: framing, decoding, and streams that join to what `decode` gives."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tokenizer_shapes import KINDS, SHAPES, SIZES, tokenizer_json

from pi_runtime.artifact.schema import Text
from pi_runtime.errors import ArtifactError, PromptError
from pi_runtime.text.tokenizer import REPLACEMENT, TextStream, Tokenizer

BARE = Text(prefix_ids=(), end_ids=())


def make(kind: str, text: Text = BARE, extra: int = 2) -> Tokenizer:
    """With `extra` ids that the model has and the tokenizer does not name."""
    return Tokenizer(KINDS[kind], text, vocab_size=SIZES[kind] + extra)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    stream = TextStream(tokenizer)
    return [stream.push(token_id) for token_id in ids], stream.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_stream_joins_to_decode(kind: str) -> None:
    tokenizer = make(kind)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, SIZES[kind] + 1), max_size=14))
    def check(ids: list[int]) -> None:
        pieces, rest = streamed(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_has_more_bytes_than_the_longest(kind: str) -> None:
    tokenizer = make(kind)
    assert max(len(tokenizer.token_bytes(n)) for n in range(SIZES[kind])) <= tokenizer.longest


def going_on(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """What an answer adds to the text of a prompt, slowly: all of both is decoded after a word."""
    stream = TextStream(tokenizer, after=prompt)
    return "".join([stream.push(token_id) for token_id in answer] + [stream.finish()])


@pytest.mark.parametrize("kind", SHAPES)
def test_an_answer_goes_on_where_its_prompt_ends(kind: str) -> None:
    """With `<s>` shown all is decoded twice, with the answer and without; whatever is half a character is whole."""
    tokenizer, library = (shape := make(kind, extra=2)), make(kind)._library
    decode = lambda ids: library.decode(ids, skip_special_tokens=False)  # noqa: E731
    plain = [n for n in range(3, SIZES[kind]) if not shape._is_byte(n)]
    if shape._byte_letters:
        plain = [n for n in plain if _is_text(shape.token_bytes(n))]

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.sampled_from([1, 2, *plain]), max_size=6), st.lists(st.sampled_from(plain), max_size=8))
    @example([], plain)
    @example([plain[0]], plain)
    def check(prompt: list[int], answer: list[int]) -> None:
        before = [1, *prompt]
        assert going_on(tokenizer, before, answer) == decode(before + answer).removeprefix(decode(before))

    check()


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("kind", ["byte-level", "llama-2", "phi-3", "mistral"])
@settings(max_examples=200, deadline=None)
@given(
    before=st.text("aé ▁.\n😀", max_size=4),
    text=st.text("ab é😀日\n", min_size=1, max_size=5),
    cut=st.integers(1, 3),
    ends=st.sampled_from([(), (1,), (2,)]),
)
def test_a_character_that_a_prompt_leaves_unfinished_is_the_answers(
    kind: str, before: str, text: str, cut: int, ends: tuple[int, ...]
) -> None:
    """Bytes one by one, cut anywhere: prompt and answer make the text, each character once."""
    tokenizer = make(kind)
    names = {tokenizer.token_bytes(n): n for n in tokenizer._library.get_vocab().values()}
    cut = min(cut, len(text[0].encode()) - 1)
    prompt, answer = [1], list[int]()
    for n, byte in enumerate((before + text).encode()):
        (prompt if n < len(before.encode()) + cut else answer).append(names[bytes([byte])])
    prompt += ends if cut == 0 else ()
    shown = going_on(tokenizer, prompt, answer)
    assert shown == text
    begun = TextStream.begun(tokenizer, prompt)
    assert begun + shown in (before + text, (before + text).removeprefix(" "))


@pytest.mark.parametrize("kind", ["llama-2", "mistral", "phi-3", "metaspace"])
@pytest.mark.parametrize("prompt", [[1], [2], [1, 5], [5, 2], [3]], ids=str)
def test_the_first_word_keeps_its_space(kind: str, prompt: list[int]) -> None:
    """As llama.cpp writes it, whatever the prompt is, `<s>` alone too; and the text of a whole has none before it."""
    tokenizer = make(kind)
    hello = tokenizer._library.token_to_id("▁hello")
    assert going_on(tokenizer, prompt, [hello, hello]) == " hello hello"
    assert tokenizer.decode([1, hello]) == "hello"


def test_a_prompt_of_bytes_alone_keeps_the_space_after_it() -> None:
    tokenizer = make("llama-2")
    newline, bad, hello = (tokenizer._library.token_to_id(name) for name in ("<0x0A>", "<0xFF>", "▁hello"))
    assert going_on(tokenizer, [newline], [hello]) == " hello"
    assert going_on(tokenizer, [newline], [bad, hello]) == "\ufffd hello"
    assert going_on(tokenizer, [1, newline], [newline]) == "\n"


@given(st.text(max_size=20))
@example("a\ufffd")
@example("\ufffd\ufffd")
def test_text_survives_byte_level(text: str) -> None:
    tokenizer = make("byte-level")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces, rest = streamed(tokenizer, ids)
    # A replacement character of the text itself looks like half a character until something follows.
    assert rest == ("\ufffd" if text.endswith("\ufffd") else "")
    assert "".join(pieces) + rest == text
    for n in range(len(pieces)):
        assert text.startswith("".join(pieces[: n + 1]))


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_comes_whole(kind: str) -> None:
    tokenizer = make(kind)
    names = {"byte-level": "ðŁĺĢ", "byte-fallback": ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "a"]}[kind]
    ids = [tokenizer._library.token_to_id(name) for name in names]
    pieces, rest = streamed(tokenizer, ids)
    assert pieces[:3] == ["", "", ""]
    assert "".join(pieces[3:]) + rest == ("😀" if kind == "byte-level" else "😀a")
    cut, rest = streamed(tokenizer, ids[:2])
    assert (cut, rest) == (["", ""], tokenizer.decode(ids[:2]))
    assert "�" in rest


def test_endless_garbage_does_not_dam_the_stream() -> None:
    tokenizer = make("byte-level")
    continuation = tokenizer._library.token_to_id("Ģ")
    pieces, rest = streamed(tokenizer, [continuation] * 5)
    assert pieces == ["", "�", "�", "�", "�"]
    assert rest == "�"


@settings(deadline=None)
@given(st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x61]), min_size=8, max_size=40))
def test_long_garbage_joins_to_decode(data: list[int]) -> None:
    tokenizer = make("byte-level")
    letters = {byte: letter for letter, byte in tokenizer._byte_letters.items()}
    ids = [tokenizer._library.token_to_id(letters[byte]) for byte in data]
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "name"), [("byte-level", "Ģ"), ("byte-fallback", "�"), ("byte-fallback", "▁")])
def test_a_token_costs_the_same_however_many_came_before(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make(kind)
    decode, decoded = tokenizer._decode, []
    monkeypatch.setattr(tokenizer, "_decode", lambda ids, **said: decoded.append(len(ids)) or decode(ids, **said))
    ids = [tokenizer._library.token_to_id(name)] * 1000
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == decode(ids)
    assert sum(decoded) < 30 * len(ids)


def test_space_after_a_skipped_token_stays() -> None:
    tokenizer = make("byte-fallback")
    a, end = tokenizer._library.token_to_id("▁a"), 2
    assert streamed(tokenizer, [a, end, end, a, SIZES["byte-fallback"], a])[0] == ["a", "", "", " a", "", " a"]


def test_neither_cut_nor_padded_nor_framed_by_the_tokenizer() -> None:
    tokenizer = make("byte-level")
    assert len(tokenizer.encode("a" * 50)) == 50
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.encode("") == []


def test_prefix_once_and_never_twice() -> None:
    tokenizer = make("byte-level", Text(prefix_ids=(1,), end_ids=(2,)))
    a = tokenizer.encode("a", prefix=False)
    assert len(a) == 1
    assert tokenizer.encode("a") == [1, *a]
    assert tokenizer.encode("<s>a") == [1, *a]
    assert tokenizer.encode("<s>a", prefix=False) == [1, *a]
    assert tokenizer.encode("<s><s>a") == [1, 1, *a]
    assert tokenizer.encode("") == tokenizer.encode("<s>") == [1]


def test_prefix_of_two_is_completed() -> None:
    tokenizer = make("byte-level", Text(prefix_ids=(1, 2), end_ids=()))
    a = tokenizer.encode("a", prefix=False)
    for text in ("a", "<s>a", "<s></s>a"):
        assert tokenizer.encode(text) == [1, 2, *a]


def test_not_unicode() -> None:
    with pytest.raises(PromptError, match="at character 1"):
        make("byte-level").encode("a\udcff")


@pytest.mark.parametrize("token_id", [-1, 2**40, SIZES["none"] + 2])
def test_ids_outside_the_vocabulary(token_id: int) -> None:
    tokenizer = make("none")
    with pytest.raises(PromptError, match=f"{token_id} is not in the vocabulary"):
        tokenizer.decode([1, token_id])
    with pytest.raises(PromptError, match=f"{token_id} is not in the vocabulary"):
        TextStream(tokenizer).push(token_id)


def test_tokenizer_larger_than_the_model() -> None:
    tokenizer = make("none", extra=-1)
    assert tokenizer.encode("a") == [3]
    with pytest.raises(ArtifactError, match="tokens that the model has not"):
        tokenizer.encode("ab")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, KINDS["none"][:-9], b'{"version": "9", "model": {}}'],
    ids=lambda data: repr(data[:12]),
)
def test_not_a_tokenizer(data: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is not usable"):
        Tokenizer(data, BARE, vocab_size=9)


def test_a_panic_of_the_library_is_an_error() -> None:
    """Strip at the end looks before the start of an empty text."""
    decoder = {
        "type": "Sequence",
        "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 9}],
    }
    tokenizer = Tokenizer(tokenizer_json(decoder, [" "]), BARE, vocab_size=4)
    with pytest.raises(ArtifactError, match="cannot decode"):
        tokenizer.decode([3])


def test_text_that_the_tokenizer_cannot_encode() -> None:
    model = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "max_input_chars_per_word": 9}
    data = tokenizer_json(None, [], model={**model, "continuing_subword_prefix": "##"}, added_tokens=[])
    with pytest.raises(ArtifactError, match="cannot encode"):
        Tokenizer(data, BARE, vocab_size=9).encode("z")


@pytest.mark.parametrize("name", ["data/tokenizers/smollm2", "models/stories260K", "models/novels-relu"])
def test_real_tokenizer(shared: Path, name: str) -> None:
    data = (shared / name / "tokenizer.json").read_bytes()
    size = len(json.loads(data)["model"]["vocab"])
    tokenizer = Tokenizer(data, BARE, vocab_size=size)
    text = "Once upon a time, naïve 😀 日本語\n\n  end. " * 20
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(streamed(tokenizer, tokenizer.encode(text))[0]).rstrip() == text.rstrip()

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, size - 1) | st.integers(0, 300), max_size=24))
    def check(ids: list[int]) -> None:
        pieces, rest = streamed(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("name", ["models/stories260K", "models/novels-relu"])
def test_ids_are_those_of_transformers(shared: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(shared / name / "tokenizer.json"))
    data = (shared / name / "tokenizer.json").read_bytes()
    framed = theirs("")["input_ids"]
    tokenizer = Tokenizer(data, Text(prefix_ids=tuple(framed), end_ids=()), vocab_size=len(theirs))
    for text in ("Once upon a time", " two  spaces ", "a\nb\n", "é😀"):
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace"])
def test_shown_special_tokens(kind: str) -> None:
    """They interrupt the text before them, and change nothing of the text after them."""
    tokenizer = make(kind)
    before, after = tokenizer.encode("aé b"), tokenizer.encode("ab")
    text = tokenizer.decode([*before, *after])
    stream = TextStream(tokenizer, shown=[2])
    pieces = [stream.push(token_id) for token_id in [1, *before, 2, *after, 1, 2]] + [stream.finish()]
    assert "".join(pieces).replace("</s>", "") == text
    assert pieces.count("</s>") == 2
    assert "".join(pieces).startswith(tokenizer.decode(before) + "</s>")


def test_a_shown_token_ends_half_a_character() -> None:
    tokenizer = make("byte-level")
    half = tokenizer.encode("é")[:1]
    stream = TextStream(tokenizer, shown=[2])
    assert [stream.push(token_id) for token_id in [*half, 2]] in (["", REPLACEMENT + "</s>"], ["é", "</s>"])


def test_tokens_of_their_own() -> None:
    tokenizer = make("byte-level")
    assert (tokenizer.added_token("</s>"), tokenizer.added_token("a"), tokenizer.added_token("<none>")) == (
        2,
        None,
        None,
    )
