"""An answer begins amid a text: its first word keeps the space before it, on every route, as llama.cpp writes it."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.asking import streamed, whole
from support.scripted import scripted_artifact
from support.tokenizer_shapes import KINDS

from pi_runtime import Engine, Grammar, Sampling, load
from pi_runtime.artifact.schema import Text
from pi_runtime.server.api.served import Served
from pi_runtime.server.settings import ServerSettings
from pi_runtime.text.tokenizer import TextStream, Tokenizer

SHAPE_NAMES = ["llama-2", "mistral", "phi-3"]
BEGIN, END = 1, 2
Chat = tuple[Served, Engine]


def ids_of(kind: str, *names: str) -> list[int]:
    tokenizer = Tokenizer(KINDS[kind], Text(prefix_ids=(), end_ids=()), vocab_size=400)
    vocabulary = tokenizer._library.get_vocab()
    return [vocabulary[name] for name in names]


@pytest.fixture(scope="module", params=SHAPE_NAMES)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    """Says " hello.a" after a word, a newline, and `<s>` alone; a chat's text is its last message."""
    kind = request.param
    hello, dot, a, newline, word, *half = ids_of(kind, "▁hello", ".", "a", "<0x0A>", "b", "<0xC3>", "<0xA9>")
    following = {**dict.fromkeys((BEGIN, newline, word), hello), hello: dot, dot: a, a: END}
    following |= {half[0]: half[1], half[1]: END}
    path = scripted_artifact(
        tmp_path_factory.mktemp("space") / f"{kind}.pi",
        following,
        end_ids=(END,),
        prefix_ids=(BEGIN,),
        files={"tokenizer.json": KINDS[kind], "chat_template.jinja": b"{{ messages[-1].content }}"},
    )
    with load(path, device="cpu") as model, Engine(model, slots=2, speculate="off") as engine:
        yield Served(model, ServerSettings(model_name="m")), engine


GREEDY: dict[str, Any] = {"temperature": 0}
SAYS = " hello.a"


def completed(chat: Chat, prompt: Any, **fields: Any) -> Any:
    (choice,) = whole("/v1/completions", {"model": "m", "prompt": prompt, **GREEDY, **fields}, chat)["choices"]
    return choice


@pytest.mark.parametrize("prompt", ["b", "b\n", "", [BEGIN]])
def test_completions(chat: Chat, prompt: Any) -> None:
    text = prompt if isinstance(prompt, str) else ""
    assert completed(chat, prompt)["text"] == SAYS
    echoed = completed(chat, prompt, echo=True, logprobs=0)
    assert echoed["text"] == text + SAYS
    logprobs = echoed["logprobs"]
    at = logprobs["tokens"].index(" hello")
    assert logprobs["text_offset"][at:][:3] == [len(text), len(text) + 6, len(text) + 7]
    assert completed(chat, prompt, stop=" hello")["text"] == ""
    assert completed(chat, prompt, stop=["hello."])["text"] == " "


def test_streams_and_further_answers(chat: Chat) -> None:
    body = {"model": "m", "prompt": "b", "stream": True, "n": 3, **GREEDY}
    texts = ["", "", ""]
    for _, event in streamed("/v1/completions", body, chat):
        if event != "[DONE]":
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [SAYS] * 3


def test_half_a_character_of_the_prompt_is_echoed_once(chat: Chat) -> None:
    prompt = [BEGIN, *ids_of("llama-2", "<0x0A>", "<0xC3>")]
    assert completed(chat, prompt, echo=True)["text"] == "\né"
    assert completed(chat, prompt)["text"] == "é"
    assert completed(chat, prompt, echo=True, max_tokens=0)["text"] == "\ufffd\ufffd"


def test_chats(chat: Chat) -> None:
    messages = {"model": "m", "messages": [{"role": "user", "content": "b"}]}
    asked = messages | GREEDY | {"logprobs": True}
    (choice,) = whole("/v1/chat/completions", asked, chat)["choices"]
    assert choice["message"]["content"] == SAYS
    assert "".join(found["token"] for found in choice["logprobs"]["content"][:3]) == SAYS
    assert (
        whole("/v1/responses", {"model": "m", "input": "b", **GREEDY}, chat)["output"][0]["content"][0]["text"] == SAYS
    )
    options = {"stream": False, "options": GREEDY}
    assert whole("/api/chat", messages | options, chat)["message"]["content"] == SAYS
    for raw in (False, True):
        asked = {"model": "m", "prompt": "b", "raw": raw, **options}
        assert whole("/api/generate", asked, chat)["response"] == SAYS


def test_grammars_see_the_space(chat: Chat) -> None:
    model = chat[0].model
    for pattern, says in ((" hello", " hello"), (" ?hello", " hello")):
        answer = model.generate("b", grammar=Grammar.regex(pattern), sampling=Sampling())
        assert "".join(answer) == says


def test_a_long_run_of_unfinished_characters_is_read_once() -> None:
    """Only the last of them may be finished by what follows."""
    tokenizer = Tokenizer(KINDS["byte-fallback"], Text(prefix_ids=(), end_ids=()), vocab_size=400)
    a, lead = ids_of("byte-fallback", "a", "<0xF0>")
    began = time.thread_time()
    assert TextStream.begun(tokenizer, [a] + [lead] * 2000) == "a" + "\ufffd" * 1999
    assert time.thread_time() - began < 1
