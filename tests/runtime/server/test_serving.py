"""A server from its start to its answers: states, routes, errors, and that answers are the engine's own."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.serving import Served, events, serving, wait_until

from pi_runtime import Model, Sampling, load
from pi_runtime.engine.events import PromptLogprobs
from pi_runtime.server.api.completions import CompletionWriter

Serve = Callable[..., Served]


def test_while_the_model_is_loaded_only_health_and_metrics_answer(alphabet: Path, serve: Serve) -> None:
    gate = threading.Event()
    served = serve(alphabet, gate=gate)
    health = served.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "loading"})
    refused = served.complete("u")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    assert int(refused.headers["retry-after"]) > 0
    assert served.get("/metrics").status_code == 200
    gate.set()
    wait_until(lambda: served.get("/health").status_code == 200)
    assert served.complete("u", max_tokens=3).json()["choices"][0]["text"] == "vwx"


def test_an_answer_is_the_engines_whole_and_in_parts(random_path: Path, serve: Serve) -> None:
    served = serve(random_path)
    settings = {"max_tokens": 30, "temperature": 1.5, "seed": 7}
    with load(random_path) as model:
        sampling = Sampling.from_generation_config(model.manifest.generation, temperature=1.5, seed=7)
        alone = "".join(model.generate("Once", max_tokens=30, sampling=sampling))
    whole = served.complete("Once", **settings).json()["choices"][0]
    with served.streaming("Once", **settings) as response:
        parts = list(events(response))
    assert whole["text"] == alone
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == alone
    assert whole["finish_reason"] == "length"


def test_what_takes_long_of_an_answer_is_made_beside_the_loop(
    random_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {}
    for name in ("write", "response"):

        def seen(writer: Any, *args: Any, made: Any = getattr(CompletionWriter, name), name: str = name) -> Any:
            what = "scores" if isinstance(args[-1], PromptLogprobs) else name
            threads.setdefault(what, set()).add(threading.get_ident())
            return made(writer, *args)

        monkeypatch.setattr(CompletionWriter, name, seen)
    served = serve(random_path)
    found = served.complete("Once", echo=True, logprobs=2, n=2, max_tokens=2).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in found["choices"]] == [6, 6]
    with served.streaming("Once", echo=True, logprobs=2, max_tokens=2) as response:
        assert "".join(part["choices"][0]["text"] for part in events(response)).startswith("Once")
    (loop,) = threads["write"]
    assert loop not in threads["scores"] | threads["response"]


def test_a_prediction_is_guessed(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, speculate=8)
    body = {
        "model": served.name,
        "messages": [{"role": "user", "content": "a"}],
        "prediction": {"type": "content", "content": "bcdefghijklmnopqrstuvwxyz"},
    }
    found = served.post("/v1/chat/completions", body).json()
    assert found["choices"][0]["message"]["content"] == "bcdefghijklmnopqrstuvwxyz"
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 20


@pytest.mark.parametrize(("speculate", "times"), [("off", 0), (8, 1)])
def test_a_long_prediction_is_cut_and_read_once_and_only_if_guesses_run(
    alphabet: Path, serve: Serve, speculate: str | int, times: int
) -> None:
    read: list[str] = []

    def watched(model: Model) -> None:
        encode = model.tokenizer.encode
        model.tokenizer.encode = lambda text, **options: read.append(text) or encode(text, **options)

    served = serve(alphabet, speculate=speculate, changed=watched)
    model = served.engine.model
    body = {
        "model": served.name,
        "messages": [{"role": "user", "content": "a"}],
        "n": 3,
        "max_tokens": 5,
        "prediction": {"type": "content", "content": "bcdef" * 100_000},
    }
    found = served.post("/v1/chat/completions", body).json()
    assert [choice["message"]["content"] for choice in found["choices"]] == ["bcdef"] * 3
    predicted = [text for text in read if text.startswith("bcdef")]
    assert [len(text) for text in predicted] == [5 * model.tokenizer.longest] * times


def test_several_prompts_and_answers_keep_their_order(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, slots=2)
    found = served.complete(["a", "k", "x"], n=2, max_tokens=2).json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in found] == list(
        enumerate(["bc", "bc", "lm", "lm", "yz", "yz"])
    )


def test_what_is_wrong_is_an_error_in_openais_form(talker: Served) -> None:
    for response, status, param in (
        (talker.get("/nowhere"), 404, None),
        (talker.get("/v1/completions"), 405, None),
        (talker.complete("a", temperature=-1), 400, "temperature"),
        (talker.complete("a" * 5000), 400, "prompt"),
        (talker.complete("a", n=17), 400, "n"),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), error
        assert error["message"]


def test_slots_and_props_and_metrics_say_how_it_is(talker: Served) -> None:
    with talker.streaming(max_tokens=4000) as response:
        coming = events(response)
        next(coming)
        slots = talker.get("/slots").json()
        assert [slot["is_processing"] for slot in slots] == [True, False, False, False]
        assert slots[0]["generated_tokens"] >= 1
        assert "pi_running_answers 1" in talker.get("/metrics").text
    props = talker.get("/props").json()
    assert (props["model"], props["total_slots"]) == ("endless", 4)
    assert props["rungs"] == talker.engine.model.manifest.rungs_in("auto")
    wait_until(talker.is_idle)


def test_every_line_of_the_metrics_is_a_sample_with_a_type(talker: Served) -> None:
    talker.complete(max_tokens=3)
    response = talker.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    typed: set[str] = set()
    for line in response.text.splitlines():
        if line.startswith("# TYPE"):
            typed.add(line.split()[2])
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            base = name.partition("{")[0]
            assert base in typed or base.rpartition("_")[0] in typed, line
            float(value)
    assert 'pi_http_requests_total{route="/v1/completions",status="200"}' in response.text
    assert response.text.endswith("\n")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_says_how_much_of_the_prompt_has_been_read(alphabet: Path, path: str) -> None:
    """First what was stored, last the whole; a second request finds all of it stored but for the last token."""
    text = "abcdefgh" * 5
    fields = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    asked = {**fields, "max_tokens": 2, "stream": True, "return_progress": True}
    with serving(alphabet) as served:
        for stored in (0, 39):
            found = [
                event["prompt_progress"] for event in events(served.post(path, asked)) if "prompt_progress" in event
            ]
            assert all(step["total"] == 40 and step["cache"] == stored for step in found)
            read = [step["processed"] for step in found]
            assert (read[0], read[-1]) == (stored, 40)
            assert read == sorted(set(read))
        for more in ({"return_progress": False}, {"stream": False}):
            assert "prompt_progress" not in served.post(path, {**asked, **more}).text


def test_the_context_is_told_in_everybody_s_words(alphabet: Path) -> None:
    with serving(alphabet, aliases=("coder",)) as served:
        model, props = served.get("/v1/models").json()["data"][0], served.get("/props").json()
        shown = served.post("/api/show", {"model": "coder:latest"}).json()
        assert served.get("/models").json()["data"][0] == served.get("/v1/models/coder").json() == model
        context, engine = served.engine.model.context, served.engine.model
    assert {model["context_length"], model["max_model_len"], model["max_input_tokens"], model["meta"]["n_ctx"]} == {
        context
    }
    assert (model["meta"]["size"], model["meta"]["n_params"]) == (engine.nbytes, engine.parameters)
    assert model["aliases"] == [served.name, "coder"]
    assert props["default_generation_settings"]["n_ctx"] == props["context"] == context
    assert f"num_ctx {context}" in shown["parameters"]
    assert shown["model_info"]["general.parameter_count"] == engine.parameters
