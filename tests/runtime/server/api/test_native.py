"""llama-server's `/completion` and `/infill`, suffixes, grammars as fields and `return_tokens`."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support import asking
from support.asking import CHAT, COMPLETIONS, OLLAMA_GENERATE
from support.scripted import saying, scripted_artifact
from support.synthetic import byte_tokenizer

from pi_runtime import Engine, load
from pi_runtime.errors import Setting, UsageError
from pi_runtime.server.api.conversation import GrammarFields
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError, refused
from pi_runtime.server.settings import ServerSettings

Chat = tuple[Served, Engine]
COMPLETION, INFILL = "/completion", "/infill"
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
PRE, SUF, MID, SEP, REPO = range(250, 255)
"""Ids of bytes that no UTF-8 has."""


def with_marks() -> bytes:
    """A tokenizer of bytes with Qwen's tokens for filling in."""
    tokenizer = json.loads(byte_tokenizer())
    vocab = {name: number for name, number in tokenizer["model"]["vocab"].items() if not PRE <= number <= REPO}
    tokenizer["model"]["vocab"] = vocab | {name: PRE + n for n, name in enumerate(MARKS)}
    (end,) = tokenizer["added_tokens"]
    marks = [{**end, "id": PRE + n, "content": name} for n, name in enumerate(MARKS)]
    tokenizer["added_tokens"] += marks
    return json.dumps(tokenizer).encode()


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    """It says "abc" behind the token that asks for the middle, and then begins another file."""
    following = {**saying("abc", then=SEP), MID: ord("a"), SEP: ord("x")}
    files = {"tokenizer.json": with_marks()}
    path = scripted_artifact(tmp_path_factory.mktemp("native") / "fill.pi", following, context=128, files=files)
    with load(path) as model, Engine(model, slots=2) as engine:
        yield Served(model, ServerSettings(model_name="m", sampling={"temperature": 0})), engine


def ids(*parts: str | int) -> list[int]:
    return [token for part in parts for token in (part.encode() if isinstance(part, str) else [part])]


FILLED: list[tuple[str, dict[str, Any], list[int]]] = [
    (INFILL, {"input_prefix": "if ", "input_suffix": ":\n"}, ids(PRE, "if ", SUF, ":\n", MID)),
    (INFILL, {"input_prefix": "if ", "prompt": "x", "input_suffix": ""}, ids(PRE, "if x", SUF, MID)),
    # A marker within code is code.
    (INFILL, {"input_prefix": MARKS[2], "input_suffix": MARKS[0]}, ids(PRE, MARKS[2], SUF, MARKS[0], MID)),
    (
        INFILL,
        {"input_prefix": "p", "input_suffix": "s", "input_extra": [{"filename": "a.h", "text": "A"}, {"text": "B"}]},
        ids(REPO, "project\n", SEP, "a.h\nA", SEP, "tmp\nB", SEP, "file\n", PRE, "p", SUF, "s", MID),
    ),
    (COMPLETIONS, {"prompt": "p", "suffix": "s"}, ids(PRE, "p", SUF, "s", MID)),
    (OLLAMA_GENERATE, {"prompt": "p", "suffix": "s"}, ids(PRE, "p", SUF, "s", MID)),
]


@pytest.mark.parametrize(("path", "fields", "expected"), FILLED)
def test_the_prompt_of_a_gap(filler: Chat, path: str, fields: dict[str, Any], expected: list[int]) -> None:
    (found,) = asking.asked(path, fields, filler[0]).texts
    assert list(found) == expected


def test_other_files_take_what_room_there_is(filler: Chat) -> None:
    extra = [{"filename": "a", "text": "y" * 500}]
    asked = {"input_prefix": "p", "input_suffix": "s", "input_extra": extra, "n_predict": 20}
    (found,) = asking.asked(INFILL, asked, filler[0]).texts
    assert len(found) == 128 - 20 - 1
    for bound in ({}, {"n_predict": -1}):
        (found,) = asking.asked(INFILL, {**asked, "n_predict": None, **bound}, filler[0]).texts
        assert len(found) == 128 - 32 - 1
    assert list(found)[-5:] == ids(PRE, "p", SUF, "s", MID)


def test_likeliest_tokens_come_with_each_token(alphabet_chat: Chat) -> None:
    asked = {"prompt": "abc", "n_predict": 3, "n_probs": 2}
    whole = asking.whole(COMPLETION, asked, alphabet_chat)["completion_probabilities"]
    parts = [event for _, event in asking.streamed(COMPLETION, {**asked, "stream": True}, alphabet_chat)]
    assert [one for part in parts for one in part.get("completion_probabilities", ())] == whole
    assert [(one["id"], one["token"], one["bytes"]) for one in whole] == [(ord(c), c, [ord(c)]) for c in "def"]
    for one in whole:
        assert len(one["top_logprobs"]) == 2
        assert one["top_logprobs"][0]["logprob"] == one["logprob"] <= 0


@pytest.mark.parametrize("bias", [{"100": -100}, [[100, -100]], [["d", False]], {"d": False}, [["d", -100], ["e", 1]]])
def test_biases_of_ids_and_of_texts(alphabet_chat: Chat, bias: Any) -> None:
    found = asking.whole(COMPLETION, {"prompt": "abc", "n_predict": 3, "logit_bias": bias}, alphabet_chat)
    assert "d" not in found["content"]
    said = {entry["token"]: entry["bias"] for entry in found["generation_settings"]["logit_bias"]}
    assert said[100] == (None if "False" in str(bias) else -100)


WRONG = [
    {"a": 101}, [["a", True]], [["a"]], [["a", 1, 2]], [[999, 1]], [[-5, 1]], [[5.5, 1]], [[False, 1]], {"a": "1"}, "a",
]  # fmt: skip


def test_a_bias_of_digits_is_of_the_text(alphabet_chat: Chat) -> None:
    def biased(bias: Any) -> dict[int, float]:
        sampling = asking.asked(COMPLETION, {"prompt": "a", "logit_bias": bias}, alphabet_chat[0]).settings["sampling"]
        assert sampling is not None
        return dict(sampling.logit_bias)

    assert biased([["5", 1]]) == {ord("5"): 1}
    assert biased([[5, 1]]) == biased({"5": 1}) == {5: 1}
    assert biased({"\u0663": 1}) == dict.fromkeys("\u0663".encode(), 1)


@pytest.mark.parametrize("bias", WRONG, ids=str)
def test_a_wrong_bias_is_named(alphabet_chat: Chat, bias: Any) -> None:
    with pytest.raises(ApiError, match="logit_bias"):
        asking.asked(COMPLETION, {"prompt": "abc", "logit_bias": bias}, alphabet_chat[0])


@pytest.mark.parametrize("path", [COMPLETION, COMPLETIONS])
def test_a_text_goes_on_where_its_end_is_ignored(alphabet_chat: Chat, path: str) -> None:
    asked = {"prompt": "xy", "max_tokens": 5}
    found = {ignored: asking.whole(path, {**asked, "ignore_eos": ignored}, alphabet_chat) for ignored in (False, True)}
    counts = [
        one["usage"]["completion_tokens"] if "usage" in one else one["tokens_predicted"] for one in found.values()
    ]
    assert counts[0] < counts[1] == 5
    if path == COMPLETION:
        assert [bool(one["generation_settings"]["logit_bias"]) for one in found.values()] == [False, True]


@pytest.mark.parametrize("path", [INFILL, COMPLETIONS, OLLAMA_GENERATE])
def test_a_model_that_cannot_fill_in_says_so(alphabet_chat: Chat, path: str) -> None:
    fields = {"input_prefix": "a", "input_suffix": "b"} if path == INFILL else {"prompt": "a", "suffix": "b"}
    asking.refused(path, fields, alphabet_chat[0], [*fields][1], "fill in", 501)


def test_another_file_ends_what_is_filled_in(filler: Chat) -> None:
    found = asking.whole(INFILL, {"input_prefix": "p", "input_suffix": "s"}, filler)
    assert (found["content"], found["stop"], found["stop_type"]) == ("abc", True, "word")
    assert found["stopping_word"] == "<|file_sep|>"


@pytest.mark.parametrize(
    ("fields", "content", "kind", "word"),
    [
        ({"n_predict": 3}, "def", "limit", ""),
        ({}, "defghijklmnopqrstuvwxyz", "eos", ""),
        ({"stop": ["g"]}, "def", "word", "g"),
        ({"n_predict": 3, "return_tokens": True}, "def", "limit", ""),
        ({"n_predict": 3, "prompt": [97, 98, 99]}, "def", "limit", ""),
    ],
)
def test_a_completion_whole_and_streamed(
    alphabet_chat: Chat, fields: dict[str, Any], content: str, kind: str, word: str
) -> None:
    asked = {"prompt": "abc", **fields}
    whole = asking.whole(COMPLETION, asked, alphabet_chat)
    *parts, last = [event for _, event in asking.streamed(COMPLETION, {**asked, "stream": True}, alphabet_chat)]
    assert whole["content"] == "".join(part["content"] for part in (*parts, last)) == content
    assert [part["stop"] for part in parts] == [False] * len(parts)
    tokens = [token for part in parts for token in part["tokens"]]
    assert tokens == [*(content + word).encode()]  # a stop string has tokens, and no text
    assert whole["tokens"] == ([*content.encode()] if "return_tokens" in fields else [])
    for found in (whole, last):
        assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, kind, word)
        assert (found["tokens_evaluated"], found["truncated"], found["has_new_line"]) == (3, False, False)
        assert found["timings"]["predicted_n"] == found["tokens_predicted"]


def test_an_answer_that_fills_the_context_is_truncated(random_chat: Chat) -> None:
    found = [asking.whole(COMPLETION, {"prompt": "a" * 180, "n_predict": n}, random_chat) for n in (-1, 5)]
    assert [one["truncated"] for one in found] == [True, False]
    assert found[0]["tokens_predicted"] == 192 - 180 + 1  # the last one takes no place


def test_several_prompts_are_a_list(alphabet_chat: Chat) -> None:
    found = asking.whole(COMPLETION, {"prompt": ["wx", "x"]}, alphabet_chat)
    assert [(one["index"], one["content"]) for one in found] == [(0, "yz"), (1, "yz")]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_tokens_of_an_answer(alphabet_chat: Chat, path: str) -> None:
    fields = {"messages": [{"role": "user", "content": "wx"}]} if path == CHAT else {"prompt": "wx"}
    for wants in (True, False):
        asked = {**fields, "return_tokens": wants}
        (choice,) = asking.whole(path, asked, alphabet_chat)["choices"]
        streamed = asking.streamed(path, {**asked, "stream": True}, alphabet_chat)
        choices = [choice for _, event in streamed if event != "[DONE]" for choice in event["choices"]]
        assert choice.get("tokens", []) == [token for one in choices for token in one.get("tokens", ())]
        assert choice.get("tokens", []) == ([*b"yz"] if wants else [])


GRAMMARS = [
    ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
    ({"lark": 'start: "x" /[01]+/ "y"'}, "x[01]+y"),
    ({"grammar": 'root ::= "x" [01]{2,4} end\nend ::= "y" | "z"'}, "x[01]{2,4}[yz]"),
    ({"grammar": 'root ::= "a"{5,5}'}, "a{5}"),
    ({"json_schema": {"const": 42}}, "42"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, COMPLETION])
@pytest.mark.parametrize(("fields", "pattern"), GRAMMARS)
def test_grammars_as_fields(random_chat: Chat, path: str, fields: dict[str, Any], pattern: str) -> None:
    pytest.importorskip("llguidance")
    text = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    found = asking.whole(path, {**text, **fields, "max_tokens": 30, "seed": 1}, random_chat)
    said = found["content"] if path == COMPLETION else found["choices"][0]
    said = said["message"]["content"] if path == CHAT else said["text"] if path == COMPLETIONS else said
    assert re.fullmatch(f"(?:{pattern})", said) or (len(said) >= 29 and "+" in pattern)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "("}, "regex", "wrong"),
    ({"lark": "start"}, "lark", "wrong"),
    ({"grammar": "root ::= (not closed"}, "grammar", "GBNF"),
    ({"regex": "a", "grammar": 'root ::= "a"'}, "grammar", "one of"),
    ({"json_schema": {"type": "nothing"}}, "json_schema", "json_schema"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG)
def test_grammars_that_are_none(random_chat: Chat, fields: dict[str, Any], param: str, says: str) -> None:
    pytest.importorskip("llguidance")
    chat = {"messages": [{"role": "user", "content": "a"}]}
    asking.refused(COMPLETIONS, {"prompt": "a", **fields}, random_chat[0], param, says)
    asking.refused(CHAT, {**chat, **fields}, random_chat[0], param, says)


@pytest.mark.parametrize("name", GrammarFields.model_fields)
def test_an_error_of_a_grammar_names_the_field_that_gives_it(name: str) -> None:
    """Also where the engine refuses it, under the name of its setting."""
    found = refused(UsageError("wrong", setting=Setting(name, "x")))
    assert (found.param, found.message) == (name, f"{name} x: wrong")


def test_a_grammar_leaves_no_room_for_calls(hermes: Chat) -> None:
    pytest.importorskip("llguidance")
    tool = {"type": "function", "function": {"name": "add"}}
    chat = {"messages": [{"role": "user", "content": "a"}], "regex": "a"}
    asking.refused(CHAT, {**chat, "tools": [tool]}, hermes[0], "tools", "no room")
    form = {"type": "json_object"}
    asking.refused(CHAT, {**chat, "response_format": form}, hermes[0], "response_format", "give one")


def test_a_schema_within_json_object(alphabet_chat: Chat) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_object", "schema": {"const": 42}}
    chat = {"messages": [{"role": "user", "content": "a"}], "response_format": form, "max_tokens": 10}
    assert asking.whole(CHAT, chat, alphabet_chat)["choices"][0]["message"]["content"] == "42"
