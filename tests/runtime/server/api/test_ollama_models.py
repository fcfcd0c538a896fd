"""What Ollama's routes say of the model: its manifest, and nothing else."""

from typing import Any

import pytest
from support.asking import computed

from pi_runtime import Engine
from pi_runtime.server.api.ollama_models import ollama_version, running, tags
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError

Chat = tuple[Served, Engine]


def test_the_model_is_listed(random_chat: Chat) -> None:
    served, _ = random_chat
    (model,) = tags(served)["models"]
    assert (model["name"], model["digest"]) == ("m:latest", served.model.digest)
    assert model["size"] > 0
    assert model["details"]["family"] == "llama"


def test_the_model_is_loaded(random_chat: Chat) -> None:
    served, _ = random_chat
    (listed,), (loaded,) = tags(served)["models"], running(served)["models"]
    assert {name: loaded[name] for name in listed.keys() & loaded.keys()} == {  # type: ignore[literal-required]
        name: value for name, value in listed.items() if name != "modified_at"
    }
    assert (loaded["context_length"], loaded["size_vram"]) == (192, 0)


def test_the_version_is_a_version() -> None:
    assert [part.isdigit() for part in ollama_version()["version"].split(".")] == [True] * 3


@pytest.mark.parametrize(
    "body", [{"model": "m"}, {"name": "m:latest"}, {"model": "m:latest", "verbose": True}], ids=str
)
def test_the_model_is_described(random_chat: Chat, body: dict[str, Any]) -> None:
    served, _ = random_chat
    found, decoder = computed("/api/show", body, served), served.model.manifest.decoder
    info = found["model_info"]
    assert info["general.architecture"] == decoder.family
    assert info[f"{decoder.family}.context_length"] == served.model.context == 192
    assert info[f"{decoder.family}.embedding_length"] == decoder.d_model
    assert f"{decoder.family}.expert_count" not in info
    assert found["details"] == tags(served)["models"][0]["details"]
    assert found["template"] == served.template
    assert found["capabilities"] == ["completion", "tools"]
    assert "num_ctx 192\ntemperature 0.0\n" in found["parameters"]


def test_what_the_template_knows_is_a_capability(hermes: Chat) -> None:
    assert computed("/api/show", {"model": "m"}, hermes[0])["capabilities"] == ["completion", "tools", "thinking"]


def test_a_model_without_template_is_described(endless_served: Served) -> None:
    found = computed("/api/show", {"model": "m"}, endless_served)
    assert (found["template"], found["capabilities"]) == ("", ["completion"])


@pytest.mark.parametrize(
    ("body", "status"), [({"model": "other"}, 404), ({}, 400), ([], 400), ({"model": 1}, 400)], ids=str
)
def test_what_is_wrong_is_told(random_chat: Chat, body: Any, status: int) -> None:
    with pytest.raises(ApiError) as error:
        computed("/api/show", body, random_chat[0])
    assert error.value.status == status
