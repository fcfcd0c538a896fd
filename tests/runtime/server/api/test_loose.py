"""Values that clients of other servers send by default are taken where their meaning is plain; and how tokens are drawn
where nobody says how."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.asking import read, whole
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Engine, load
from pi_runtime.artifact.schema import Text
from pi_runtime.sequence.sampling import Sampling
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError
from pi_runtime.server.settings import ServerSettings

Chat = tuple[Served, Engine]
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
OLLAMA_CHAT, OLLAMA = "/api/chat", "/api/generate"
MESSAGES = [{"role": "user", "content": "a"}]
PLAIN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "a"},
    CHATS: {"model": "m", "messages": MESSAGES},
    RESPONSES: {"model": "m", "input": "a"},
    OLLAMA_CHAT: {"model": "m", "messages": MESSAGES, "stream": False},
    OLLAMA: {"model": "m", "prompt": "a", "stream": False},
}
# What every form of OpenAI's has, with the values that SDKs and other servers' pages send when nobody chose any.
EVERYWHERE: list[dict[str, Any]] = [
    *({name: None} for name in ("seed", "stop", "user", "n", "logit_bias", "temperature", "top_p", "stream_options")),
    {"stop": ""},
    {"stop": []},
    {"stop": [""]},
    {"stop": ["", "x"]},
    {"logit_bias": {}},
    {"seed": -1},
    {"seed": 7.0},
    {"n": 1.0},
    {"user": ""},
    {"temperature": 0, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 40.0},
    {"min_p": 0, "typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
    {"repeat_last_n": 64},
    {"repeat_last_n": 64.0, "repeat_penalty": 1.0},
    {"repeat_last_n": 0, "frequency_penalty": 0},
    {"repetition_penalty": 1, "repeat_penalty": 1.0},
    {"dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1},
    {"xtc_probability": 0, "xtc_threshold": 0.1, "dynatemp_range": 0, "dynatemp_exponent": 1, "top_n_sigma": -1},
    {"top_n_sigma": 0},
    {"samplers": []},
    {"samplers": "edkypmxt"},
    {"cache_prompt": True, "id_slot": -1, "n_probs": 0, "min_keep": 0, "t_max_predict_ms": 0, "ignore_eos": False},
    {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "echo": False},
    {"stop_token_ids": [], "bad_words": [], "min_tokens": 0},
    {"stream": False, "stream_options": None},
]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((path, fields) for path in (COMPLETIONS, CHATS, RESPONSES) for fields in EVERYWHERE),
    *((path, {"max_tokens": most}) for path in (COMPLETIONS, CHATS) for most in (-1, 5.0, None)),
    *((path, {"n_predict": most}) for path in (COMPLETIONS, CHATS) for most in (-1, 5.0, -1.0)),
    *((path, {"stream_options": {"include_usage": True}}) for path in (COMPLETIONS, CHATS)),
    (COMPLETIONS, {"suffix": "", "logprobs": None, "best_of": None}),
    (COMPLETIONS, {"max_tokens": 0.0, "echo": True}),
    (CHATS, {"max_completion_tokens": -1}),
    (CHATS, {"top_logprobs": 0}),
    (CHATS, {"logprobs": False, "top_logprobs": 0}),
    (CHATS, {"logprobs": None, "top_logprobs": None}),
    (CHATS, {"store": True, "metadata": {}, "service_tier": "auto"}),
    (CHATS, {"store": False, "metadata": None, "service_tier": None}),
    (CHATS, {"tools": []}),
    (CHATS, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}),
    (CHATS, {"tools": None, "tool_choice": None, "parallel_tool_calls": None}),
    (CHATS, {"tool_choice": "none", "parallel_tool_calls": False}),
    (CHATS, {"functions": [], "function_call": "none"}),
    (CHATS, {"response_format": {"type": "text"}}),
    (CHATS, {"response_format": None, "prediction": None, "audio": None, "modalities": ["text"]}),
    (CHATS, {"prompt_cache_retention": "in-memory", "prompt_cache_key": "k", "safety_identifier": "s"}),
    (RESPONSES, {"store": True, "max_output_tokens": -1, "top_logprobs": 0}),
    (RESPONSES, {"store": True, "max_output_tokens": 5.0, "truncation": "disabled", "include": []}),
    (RESPONSES, {"tools": [], "tool_choice": "auto", "metadata": {}, "background": False}),
    *(
        (path, {"options": options})
        for path in (OLLAMA_CHAT, OLLAMA)
        for options in (
            None,
            {},
            {"num_predict": -1, "num_ctx": 2048.0, "seed": 0, "stop": None},
            {"num_predict": -2.0, "num_keep": 24.0, "num_gpu": -1, "num_thread": 8.0, "num_batch": 512},
            {"num_predict": 5.0, "seed": -1, "stop": [""], "num_ctx": 0},
            {"stop": "", "repeat_last_n": 64, "repeat_penalty": 1.0, "top_k": 40.0, "top_p": 0.9, "temperature": 0.0},
            {"typical_p": 1.0, "tfs_z": 1.0, "mirostat": 0.0, "mirostat_tau": 5.0, "penalize_newline": True},
        )
    ),
    *((path, {"keep_alive": alive}) for path in (OLLAMA_CHAT, OLLAMA) for alive in (-1, 0, "5m", 300.0, None)),
    *((path, {"format": form, "think": None}) for path in (OLLAMA_CHAT, OLLAMA) for form in ("", None)),
    (OLLAMA_CHAT, {"tools": [], "logprobs": False, "top_logprobs": 0}),
    (OLLAMA, {"suffix": "", "system": "", "template": "", "context": [], "images": [], "raw": False}),
]


@pytest.mark.parametrize(("path", "fields"), CASES, ids=str)
def test_what_clients_send_by_default_is_taken(alphabet_chat: Chat, path: str, fields: dict[str, Any]) -> None:
    whole(path, {**PLAIN[path], **fields}, alphabet_chat)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("most", [-1, -1.0])
def test_no_bound_is_until_the_end(alphabet_chat: Chat, path: str, most: float) -> None:
    (choice,) = whole(path, {**PLAIN[path], "max_tokens": most}, alphabet_chat)["choices"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHATS, {"max_tokens": 1.5}, "max_tokens"),
        (CHATS, {"max_tokens": "5"}, "max_tokens"),
        (CHATS, {"max_tokens": 1e300}, "max_tokens"),
        (CHATS, {"top_logprobs": 1}, "top_logprobs"),
        (CHATS, {"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n"),
        (COMPLETIONS, {"seed": True}, "seed"),
        (COMPLETIONS, {"stop": [None]}, "stop[0]"),
        (OLLAMA, {"options": {"num_predict": 1.5}}, "options.num_predict"),
    ],
    ids=str,
)
def test_what_is_not_plain_is_refused(alphabet_chat: Chat, path: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        whole(path, {**PLAIN[path], **fields}, alphabet_chat)
    assert raised.value.param == param


FILE_SAYS = {"do_sample": True, "temperature": 0.6, "top_k": 20}
LLAMA_SERVER = Sampling(temperature=0.8, top_p=0.95, min_p=0.05)
DRAWN: list[tuple[dict[str, Any], dict[str, float], dict[str, Any], Sampling]] = [
    # What the file says, the flags, the request → how tokens are drawn.
    ({}, {}, {}, LLAMA_SERVER),
    ({"do_sample": None}, {}, {}, LLAMA_SERVER),
    ({}, {}, {"temperature": 0}, replace(LLAMA_SERVER, temperature=0.0)),
    ({}, {}, {"top_p": 0.5, "top_k": 40}, replace(LLAMA_SERVER, top_p=0.5, top_k=40)),
    ({}, {"temperature": 0.1}, {}, replace(LLAMA_SERVER, temperature=0.1)),
    ({}, {"temperature": 0.1}, {"temperature": 0.2}, replace(LLAMA_SERVER, temperature=0.2)),
    (FILE_SAYS, {}, {}, Sampling(temperature=0.6, top_k=20)),
    (FILE_SAYS, {"top_k": 5, "top_p": 0.7}, {}, Sampling(temperature=0.6, top_k=5, top_p=0.7)),
    (FILE_SAYS, {"top_k": 5}, {"top_k": -1}, Sampling(temperature=0.6)),
    ({"temperature": 0.3}, {}, {}, replace(LLAMA_SERVER, temperature=0.3)),
    ({"do_sample": False}, {}, {}, Sampling(temperature=0, top_k=50)),
]


@pytest.mark.parametrize(("file_says", "flags", "asked", "drawn"), DRAWN, ids=str)
@pytest.mark.parametrize("path", PLAIN)
def test_how_tokens_are_drawn(
    alphabet: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    file_says: dict[str, Any],
    flags: dict[str, float],
    asked: dict[str, Any],
    drawn: Sampling,
) -> None:
    with load(alphabet, device="cpu") as model:
        monkeypatch.setattr(type(model), "manifest", replace(model.manifest, generation=file_says))
        served = Served(model, ServerSettings(model_name="m", sampling=flags))
        fields = {"options": asked} if path.startswith("/api/") else asked
        prompt, _ = read(path, {**PLAIN[path], **fields}, served)
    assert prompt.settings["sampling"] == drawn


def test_how_long_answers_are(alphabet: Path) -> None:
    with load(alphabet, device="cpu") as model:
        served = Served(model, ServerSettings(model_name="m", max_tokens=7))
        for path, plain in PLAIN.items():
            assert read(path, plain, served)[0].settings["max_tokens"] == 7
        for path, name in ((COMPLETIONS, "max_tokens"), (CHATS, "max_tokens"), (RESPONSES, "max_output_tokens")):
            assert read(path, PLAIN[path] | {name: 3}, served)[0].settings["max_tokens"] == 3
            assert read(path, PLAIN[path] | {name: -1}, served)[0].settings["max_tokens"] is None
        for most in (-1, -2, 3):
            asked = PLAIN[OLLAMA] | {"options": {"num_predict": most}}
            assert read(OLLAMA, asked, served)[0].settings["max_tokens"] == (3 if most == 3 else None)


@pytest.mark.parametrize("path", PLAIN)
def test_seeds(random_chat: Chat, path: str) -> None:
    """−1 is drawn anew; every other one repeats, on each form of API."""

    def said(seed: int | None) -> str:
        asked: dict[str, Any] = {"seed": seed, "temperature": 1.9}
        long = {RESPONSES: {"max_output_tokens": 12}}.get(path, {"max_tokens": 12})
        fields = {"options": {**asked, "num_predict": 12}} if path.startswith("/api/") else asked | long
        found = whole(path, {**PLAIN[path], **fields}, random_chat)
        return str(
            found.get("choices") or found.get("message") or found.get("response") or found["output"][0]["content"]
        )

    for seed in (0, 1, -2, 2**32 - 1):
        assert said(seed) == said(seed)
    assert said(-1) != said(-1)
    assert said(None) != said(None)


def test_four_answers_are_four_texts(tmp_path: Path) -> None:
    """Where nobody says how to draw."""
    text = Text(prefix_ids=(), end_ids=())
    path = random_artifact(tmp_path / "random.pi", small_decoder(context_length=96), text=text, generation={})
    with load(path, device="cpu") as model, Engine(model) as engine:
        served = Served(model, ServerSettings(model_name="m"))
        found = whole(COMPLETIONS, PLAIN[COMPLETIONS] | {"n": 4, "max_tokens": 20}, (served, engine))
        assert len({choice["text"] for choice in found["choices"]}) == 4
