"""`/v1/completions` on an engine: texts, echoes with log-probabilities, streams, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion
from support import asking
from support.asking import COMPLETIONS

from pi_runtime import Engine
from pi_runtime.server.api import completions
from pi_runtime.server.api.answer import EventReader, GatheredAnswer
from pi_runtime.server.api.openai_forms import CompletionLogprobsWriter
from pi_runtime.server.api.served import Served

Chat = tuple[Served, Engine]


def ask(chat: Chat, **fields: Any) -> dict[str, Any]:
    """The whole answer, checked by OpenAI's own type."""
    found: dict[str, Any] = asking.whole(COMPLETIONS, {"model": "m", **fields}, chat)
    assert_typed(found)
    return found


def stream(chat: Chat, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, each checked by OpenAI's own type."""
    *chunks, last = asking.streamed(COMPLETIONS, {"model": "m", "stream": True, **fields}, chat)
    assert last == (None, "[DONE]")
    assert all(event is None for event, _ in chunks)
    found: list[Any] = [data for _, data in chunks]
    for chunk in found:
        # OpenAI's type of a chunk is that of an answer, whose reason is never null.
        choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
        assert_typed({**chunk, "choices": choices})
    return found


def assert_typed(found: dict[str, Any]) -> None:
    """Checks by OpenAI's type; it has no null for what no token precedes, OpenAI's answers do."""
    choices = []
    for choice in found["choices"]:
        logprobs = choice["logprobs"]
        if logprobs is not None:
            assert len({len(values) for values in logprobs.values()}) == 1
            some = {"token_logprobs": [x or 0.0 for x in logprobs["token_logprobs"]]}
            logprobs = {**logprobs, **some, "top_logprobs": [x or {} for x in logprobs["top_logprobs"]]}
        choices.append({**choice, "logprobs": logprobs})
    Completion.model_validate({**found, "choices": choices}, strict=True)


def test_a_text_is_continued(alphabet_chat: Chat) -> None:
    found = ask(alphabet_chat, prompt="abc", max_tokens=4)
    (choice,) = found["choices"]
    assert choice == {"index": 0, "text": "defg", "logprobs": None, "finish_reason": "length"}
    assert found["object"] == "text_completion"
    assert found["id"].startswith("cmpl-")
    assert found["model"] == "m"
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)
    assert usage["timings"]["predicted_n"] == 4
    assert usage["timings"]["predicted_per_second"] > 0


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "ij"}, "defgh", "stop"),
        ({"stop": ["x", "gh"]}, "def", "stop"),
        ({"max_tokens": 60}, "defghijklmnopqrstuvwxyz", "stop"),
        ({}, "defghijklmnopqrs", "length"),
        ({"logit_bias": {"120": 100}, "max_tokens": 2}, "xx", "length"),
        ({"max_tokens": 60, "min_tokens": 30, "temperature": 0}, None, "stop"),
    ],
)
def test_how_a_text_ends(alphabet_chat: Chat, fields: dict[str, Any], text: str | None, reason: str) -> None:
    (choice,) = ask(alphabet_chat, prompt="abc", **fields)["choices"]
    assert choice["finish_reason"] == reason
    assert text is None or choice["text"] == text


def test_prompts_in_all_forms(alphabet_chat: Chat) -> None:
    for prompt, texts in (
        ([97, 98], ["cd"]),
        (["ab", "x"], ["cd", "yz"]),
        ([[97, 98], [120]], ["cd", "yz"]),
    ):
        found = ask(alphabet_chat, prompt=prompt, max_tokens=2)
        assert [choice["text"] for choice in found["choices"]] == texts
        assert [choice["index"] for choice in found["choices"]] == [*range(len(texts))]


def test_several_answers_have_draws_of_their_own(random_chat: Chat) -> None:
    fields = {"temperature": 1.5, "seed": 7, "max_tokens": 6}
    found = ask(random_chat, prompt=["ab", "cd"], n=2, **fields)
    texts = [choice["text"] for choice in found["choices"]]
    assert len(set(texts)) == 4
    assert [choice["text"] for choice in ask(random_chat, prompt="cd", n=2, **fields)["choices"]] == texts[2:]
    assert found["usage"]["prompt_tokens"] == 4
    assert found["usage"]["completion_tokens"] == 24
    assert ask(random_chat, prompt="ab", **{**fields, "seed": -3})["choices"][0]["text"] != texts[0]


@pytest.mark.parametrize("limit", [0, 2])
def test_the_log_probabilities_of_a_prompt_are_written_once(
    random_chat: Chat, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    first = CompletionLogprobsWriter.first
    monkeypatch.setattr(
        CompletionLogprobsWriter, "first", lambda writer, token: begun.append(token) or first(writer, token)
    )
    found = ask(random_chat, prompt=["Hello", "you"], max_tokens=limit, echo=True, logprobs=1, n=3, seed=1)
    assert begun == [*b"Hy"]
    tokens = [choice["logprobs"]["tokens"] for choice in found["choices"]]
    assert ["".join(each[: 5 if n < 3 else 3]) for n, each in enumerate(tokens)] == ["Hello"] * 3 + ["you"] * 3


def test_an_echo_has_the_log_probabilities_of_its_prompt(random_chat: Chat) -> None:
    served, _ = random_chat
    ids = [*b"Hello"]
    for limit in (0, 1):
        found = ask(random_chat, prompt=ids, max_tokens=limit, echo=True, logprobs=1, temperature=0, seed=1234)
        (choice,) = found["choices"]
        own = choice["logprobs"]
        assert choice["text"].startswith("Hello")
        assert choice["finish_reason"] == "length"
        assert len(own["tokens"]) == 5 + limit
        assert own["tokens"][:5] == [*"Hello"]
        assert own["text_offset"][:5] == [0, 1, 2, 3, 4]
        assert own["token_logprobs"][0] is own["top_logprobs"][0] is None
        scores = served.model.score(ids, top=1)
        assert own["token_logprobs"][1:5] == [score.logprob for score in scores]
        for token, top, score in zip(own["token_logprobs"][1:5], own["top_logprobs"][1:5], scores, strict=True):
            assert (token == max(top.values())) == (score.token == score.top[0][0])
        assert found["usage"]["completion_tokens"] == limit
        assert found["usage"]["prompt_tokens"] == 5


def test_the_end_of_a_text_has_an_entry_too(alphabet_chat: Chat) -> None:
    """lm-eval drops the last entry, which is that of the one token that it has to ask for."""
    (choice,) = ask(alphabet_chat, prompt="yz", max_tokens=1, echo=True, logprobs=1)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("yz", "stop")
    assert choice["logprobs"]["tokens"] == ["y", "z", "<|end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_stop_string_are_not_shown(alphabet_chat: Chat, stream: bool) -> None:
    """However the answer is cut into parts."""
    served, engine = alphabet_chat
    answer = engine.generate("abc", stop=["gh"], logprobs=0)
    text = "".join(answer)
    assert (text, answer.finish_reason, len(answer.token_ids)) == ("def", "stop", 5)
    for cuts in ([5], [1, 5], [3, 5], [1, 2, 3, 4, 5]):
        body = {"model": "m", "prompt": "abc", "stop": "gh", "logprobs": 0, "stream": stream}
        request, writer = asking.read(COMPLETIONS, body, served)
        reader, gathered = EventReader(request, served.model.tokenizer), GatheredAnswer(0, 0)
        events = []
        for start, end in zip([0, *cuts], cuts, strict=False):
            events += reader.read(text[start:end], answer.token_ids[start:end], answer.logprobs[start:end])
        events += reader.end("stop", answer.stats)
        if stream:
            written = asking.parsed(b"".join(asking.write(writer, gathered, event) for event in events))
            choices = [data["choices"][0] for _, data in written]
        else:
            gathered.events += events
            choices = writer.response([gathered])["choices"]
        assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["d", "e", "f"], cuts


def test_tokens_that_are_no_text_have_their_bytes(random_chat: Chat) -> None:
    (choice,) = ask(random_chat, prompt="aé€", max_tokens=0, echo=True, logprobs=0)["choices"]
    names = ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2]
    assert choice["text"] == "aé€"


def test_a_stream_says_what_the_whole_says(random_chat: Chat) -> None:
    fields = {"prompt": ["ab", "cd"], "n": 2, "seed": 5, "temperature": 1.0, "echo": True, "logprobs": 2}
    expected = ask(random_chat, **fields)
    *chunks, last = stream(random_chat, **fields, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    for choice in expected["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        for key, values in choice["logprobs"].items():
            assert [x for c in own for x in c["logprobs"][key]] == values


def test_a_stream_of_an_echo_alone(random_chat: Chat) -> None:
    (chunk,) = stream(random_chat, prompt="ab", max_tokens=0, echo=True)
    assert chunk["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}]


def test_timings_come_with_the_end_or_with_each_token(random_chat: Chat) -> None:
    chunks = stream(random_chat, prompt="ab", max_tokens=3)
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    chunks = stream(random_chat, prompt="ab", max_tokens=3, timings_per_token=True)
    assert all("timings" in chunk for chunk in chunks)
    assert chunks[-1]["timings"]["rows_read_share"] == 1


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": "\ud800"}, "prompt", "not Unicode"),
        ({"prompt": [1, 300]}, "prompt[1]", "found 300"),
        ({"prompt": [[1], [2, 10**30]]}, "prompt[1][1]", "below 257"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [[]]}, "prompt[0]", "at least 1"),
        ({"prompt": ["a", 1.5]}, "prompt[0]", "integer"),
        ({"prompt": [[1, []]]}, "prompt[0][1]", "integer"),
        ({"prompt": ["a", 300]}, "prompt[1]", "found 300"),
        ({"prompt": ["a" * 100, 1, "a" * 100]}, "prompt", "at most 191 fit"),
        ({"prompt": {}}, None, "prompt_string or content"),
        ({"prompt": {"prompt_string": "a", "content": [{"type": "text", "text": "a"}]}}, None, "either"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data", "reads text"),
        ({"prompt": {"content": [{"type": "image_url"}]}}, "prompt.content[0].type", "text"),
        ({"prompt": 5}, "prompt", "found 5"),
        ({"prompt": "a" * 192}, "prompt", "at most 191 fit"),
        ({"prompt": "a" * 193, "max_tokens": 0, "echo": True, "logprobs": 1}, "prompt", "at most 192 fit"),
        ({"prompt": "a", "temperature": 3}, "temperature", "less than or equal to 2"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "number"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens", "greater"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "integer"),
        ({"prompt": "a", "logprobs": 6}, "logprobs", "5"),
        ({"prompt": "a", "n": 17}, "n", "16"),
        ({"prompt": ["a"] * 9, "n": 2}, "prompt", "16"),
        ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        ({"prompt": [97], "suffix": "x"}, "suffix", "one text"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop", "16"),
        ({"prompt": "a", "stop": [1]}, "stop[0]", "string"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x", "token ids"),
        ({"prompt": "a", "logit_bias": {"257": 1}}, "logit_bias.257", "0 to 256"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1", "100"),
        ({"prompt": "a", "nonsense": 1}, "nonsense", "unknown field"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        ({"prompt": "a", "min_tokens": 20}, "min_tokens", "at most the 16"),
    ],
)
def test_what_is_wrong_is_named(random_chat: Chat, fields: dict[str, Any], param: str, says: str) -> None:
    asking.refused(COMPLETIONS, {"model": "m", **fields}, random_chat[0], param, says)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"prompt": "a"},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_model_goes_by_its_names_or_none(random_chat: Chat, path: str) -> None:
    served = replace(random_chat[0], settings=replace(random_chat[0].settings, aliases=("gpt-5", "coder")))
    for named in ({}, {"model": None}, {"model": "m"}, {"model": "gpt-5"}, {"model": "coder"}):
        assert asking.asked(path, {**BODIES[path], **named}, served).texts
    for other in ("", "gpt-6"):
        asking.refused(path, {**BODIES[path], "model": other}, served, "model", status=404)


@pytest.mark.parametrize("body", [None, [], "text", 3, float("nan")])
def test_a_body_that_is_no_object(random_chat: Chat, body: object) -> None:
    asking.refused(COMPLETIONS, body, random_chat[0], None, "not a JSON object")


OBJECT: dict[str, Any] = {"content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["a", "b"], ["a", "b"]),
        ([98, "c", 100], [[98, "c", 100]]),
        (["b", 99], [["b", 99]]),
        ([[98, "c"], "d", [99]], [[98, "c"], "d", [99]]),
        ({"prompt_string": "ab"}, ["ab"]),
        ({"prompt_string": "", "multimodal_data": []}, [""]),
        (OBJECT, ["bc"]),
        (["a", OBJECT, {"prompt_string": "x"}, [97]], ["a", "bc", "x", [97]]),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/completion", "/v1/embeddings"])
def test_text_and_ids_in_one_prompt(prefixed_chat: Chat, path: str, prompt: Any, texts: list[Any]) -> None:
    """As llama-server takes them: a text begins a prompt as prompts do only where it comes first."""
    served = prefixed_chat[0]
    encode = served.model.tokenizer.encode
    assert encode("a") == [256, *encode("a", prefix=False)]
    expected = [
        encode(text)
        if isinstance(text, str)
        else [
            id_
            for n, part in enumerate(text)
            for id_ in (encode(part, prefix=n == 0) if isinstance(part, str) else [part])
        ]
        for text in texts
    ]
    name = "input" if path == "/v1/embeddings" else "prompt"
    served = replace(served, settings=replace(served.settings, embeddings="mean"))
    assert [*asking.asked(path, {name: prompt}, served).texts] == expected


def test_an_echo_of_text_and_ids(prefixed_chat: Chat) -> None:
    (choice,) = ask(prefixed_chat, prompt=["ab", 99], echo=True, max_tokens=1)["choices"]
    assert choice["text"].startswith("abc")


@pytest.mark.parametrize(
    "prompt", [["a"] * 17, [""] * (1 << 20), [[97]] * 17, ["a"] * ((1 << 20) + 1)], ids=lambda p: f"{len(p)}"
)
def test_many_prompts_are_counted_before_they_are_looked_at(
    random_chat: Chat, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "prompts_of", lambda _: pytest.fail("they are looked at"))
    asking.refused(COMPLETIONS, {"model": random_chat[0].name, "prompt": prompt}, random_chat[0], "prompt")
