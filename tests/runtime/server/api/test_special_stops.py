"""A stop text that names a special token ends an answer on every route, though the token has no text."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.asking import whole
from support.scripted import saying, scripted_artifact
from support.synthetic import END_ID

from pi_runtime import Engine, load
from pi_runtime.server.api.served import Served
from pi_runtime.server.settings import ServerSettings

Run = Callable[..., tuple[int, str, str]]
CASES = [
    (["<|end|>"], "bc"),
    (["c<|end|>"], "b"),
    (["<|end|>d"], "bc"),
    (["c<|end|>d"], "b"),
    (["x<|end|>", "d"], "bc"),
    (["<|end|>x"], "bcde"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says "bc", a special token that ends nothing, "de", and so on."""
    following = {**saying("abc"), END_ID: ord("d"), ord("d"): ord("e"), ord("e"): ord("b")}
    files = {"chat_template.jinja": b"{{ messages[-1].content }}"}
    return scripted_artifact(tmp_path_factory.mktemp("stops") / "special.pi", following, end_ids=(), files=files)


@pytest.fixture(scope="module")
def chat(path: Path) -> Iterator[tuple[Served, Engine]]:
    with load(path, device="cpu") as model, Engine(model, slots=2, speculate="off") as engine:
        yield Served(model, ServerSettings(model_name="m")), engine


@pytest.mark.parametrize(("stop", "says"), CASES, ids=str)
def test_routes(stop: list[str], says: str, path: Path, chat: tuple[Served, Engine], run: Run) -> None:
    asked: dict[str, Any] = {"model": "m", "stop": stop, "max_tokens": 5, "temperature": 0}
    choice = whole("/v1/completions", {**asked, "prompt": "a"}, chat)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (says, "length" if says == "bcde" else "stop")
    messages = [{"role": "user", "content": "a"}]
    assert (
        whole("/v1/chat/completions", {**asked, "messages": messages}, chat)["choices"][0]["message"]["content"] == says
    )
    options = {"model": "m", "stream": False, "options": {"stop": stop, "num_predict": 5, "temperature": 0}}
    assert whole("/api/chat", {**options, "messages": messages}, chat)["message"]["content"] == says
    assert whole("/api/generate", {**options, "prompt": "a", "raw": True}, chat)["response"] == says
    assert "".join(chat[1].model.generate("a", stop=stop, max_tokens=5)) == says
    flags = [flag for text in stop for flag in ("--stop", text)]
    assert run(path, "--prompt", "a", "--max-tokens", 5, *flags)[1].strip() == says


def test_a_stop_before_min_tokens_is_passed_over(chat: tuple[Served, Engine]) -> None:
    asked = {"model": "m", "prompt": "a", "stop": "<|end|>", "min_tokens": 3, "max_tokens": 8, "temperature": 0}
    choice = whole("/v1/completions", asked, chat)["choices"][0]
    assert choice["text"] == "bcdebc"
