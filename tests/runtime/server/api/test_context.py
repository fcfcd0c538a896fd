"""What cannot fit the context is refused by its length, before it is tokenized or gone through."""

from collections.abc import Callable
from typing import Any

import pytest
from support.asking import CHAT, COMPLETIONS, OLLAMA_GENERATE, asked, computed

from pi_runtime import Engine
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError
from pi_runtime.text.tokenizer import Tokenizer

LONG = "x" * 100_000
IDS = [1] * 100_000


def hello(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


REFUSED: dict[str, tuple[Callable[[str, Any, Served], object], str, dict[str, Any]]] = {
    "prompt": (asked, COMPLETIONS, {"model": "m", "prompt": LONG}),
    "prompt[0]": (asked, COMPLETIONS, {"model": "m", "prompt": [LONG, "a"]}),
    "messages": (asked, CHAT, {"model": "m", "messages": hello(LONG)}),
    "content": (computed, "/tokenize", {"content": LONG}),
    "tokens": (computed, "/detokenize", {"tokens": IDS}),
}


def never(_: object, what: Any, *__: object, **___: object) -> Any:
    assert not what


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is tokenized, and no id looked at."""
    monkeypatch.setattr(Tokenizer, "encode", never)
    monkeypatch.setattr(Tokenizer, "decode", never)
    monkeypatch.setattr(Served, "check_tokens", never)


def told(call: Callable[[], object]) -> tuple[int, str | None, str | None]:
    with pytest.raises(ApiError) as raised:
        call()
    return raised.value.status, raised.value.param, raised.value.code


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize("param", REFUSED)
def test_what_cannot_fit_is_refused_by_its_length(param: str, random_chat: tuple[Served, Engine]) -> None:
    read, path, body = REFUSED[param]
    assert told(lambda: read(path, body, random_chat[0])) == (400, param, "context_length_exceeded")


@pytest.mark.usefixtures("untold")
def test_a_list_of_ids_is_refused_by_its_length(random_chat: tuple[Served, Engine]) -> None:
    body = {"model": "m", "prompt": IDS}
    assert told(lambda: asked(COMPLETIONS, body, random_chat[0])) == (400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize(("prompt", "tokens"), [([1] * 500, 500), (LONG, 100_000 // 7 + 1)])
def test_it_is_told_in_the_words_of_other_servers(random_chat: tuple[Served, Engine], prompt: Any, tokens: int) -> None:
    """Clients look for Anthropic's and llama-server's words, OpenAI's code, and llama-server's figures."""
    with pytest.raises(ApiError, match=r"prompt is too long.* exceeds the available context size") as raised:
        asked(COMPLETIONS, {"model": "m", "prompt": prompt}, random_chat[0])
    found = raised.value.body()["error"]
    assert (found["n_prompt_tokens"], found["n_ctx"], found["code"]) == (tokens, 192, "context_length_exceeded")


@pytest.mark.usefixtures("untold")
def test_a_raw_prompt_of_ollama_is_refused_by_its_length(random_chat: tuple[Served, Engine]) -> None:
    with pytest.raises(ApiError, match="at most 191 fit the context"):
        asked(OLLAMA_GENERATE, {"model": "m", "prompt": LONG, "raw": True}, random_chat[0])


def test_the_tokens_of_a_text_are_told_up_to_its_bound(random_chat: tuple[Served, Engine]) -> None:
    """Pieces take much more than the text does, so these are told of what fits alone."""
    served, _ = random_chat
    context = served.model.context
    longest = served.model.tokenizer.longest
    assert computed("/tokenize", {"content": "é" * (context // 2)}, served)["tokens"]
    text = "x" * (context * longest)
    assert len(computed("/tokenize", {"content": text}, served)["tokens"]) == len(text)
    assert len(computed("/tokenize", {"content": text[:context], "with_pieces": True}, served)["tokens"]) == context
    if longest > 1:
        assert told(lambda: computed("/tokenize", {"content": text, "with_pieces": True}, served))[1] == "content"
    assert told(lambda: computed("/tokenize", {"content": text + "x"}, served))[1] == "content"


def test_ids_of_a_whole_answer_are_decoded(random_chat: tuple[Served, Engine]) -> None:
    served, _ = random_chat
    assert (
        len(computed("/detokenize", {"tokens": [97] * (served.model.context + 1)}, served)["content"])
        == served.model.context + 1
    )
