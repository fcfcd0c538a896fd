"""Hub models: what fetching one takes is said before, and a GGUF file is chosen by how its name ends."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import huggingface_hub
import typer

from pi_compile.checkpoint.folder import fetch_offer, names_model
from pi_compile.cli import main
from pi_compile.errors import CheckpointError
from pi_runtime.errors import UsageError

FILES = {
    "README.md": 1 << 30,
    "config.json": 1 << 10,
    "tokenizer.json": 1 << 10,
    "model-00001-of-00002.safetensors": 3 << 20,
    "model-00002-of-00002.safetensors": 2 << 20,
    "model.safetensors.index.json": 1 << 10,
    "pytorch_model.bin": 1 << 30,
    "name-Q4_K_M-00001-of-00002.gguf": 1 << 20,
    "name-Q4_K_M-00002-of-00002.gguf": 1 << 20,
    "name-Q4_K_S.gguf": 1 << 20,
    "name-UD-Q4_K_S.gguf": 1 << 20,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub with one model, of which nothing has been fetched."""

    def model_info(_: Any, name: str, **_options: Any) -> Any:
        assert name == "owner/name"
        files = [SimpleNamespace(rfilename=file, size=size) for file, size in FILES.items()]
        return SimpleNamespace(siblings=files, card_data=SimpleNamespace(license="apache-2.0"))

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_there)


def not_there(*_arguments: Any, local_files_only: bool, **_options: Any) -> str:
    assert local_files_only, "nothing may be fetched before the question"
    raise huggingface_hub.errors.LocalEntryNotFoundError("no snapshot here")


@pytest.mark.usefixtures("hub")
def test_size_and_licence_of_what_would_be_fetched() -> None:
    assert fetch_offer("owner/name") == "owner/name: 5.0 MiB, licence apache-2.0"
    assert fetch_offer("owner/name:Q4_K_M") == "owner/name:Q4_K_M: 2.0 MiB, licence apache-2.0"
    with pytest.raises(CheckpointError, match="2 GGUF files of owner/name") as caught:
        fetch_offer("owner/name:q4_k_s")
    assert "name-Q4_K_M, name-Q4_K_S, name-UD-Q4_K_S" in str(caught.value)


@pytest.mark.usefixtures("hub")
def test_offline_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_: pytest.fail("asked"))
    with pytest.raises(CheckpointError, match="the hub cannot be reached"):
        fetch_offer("owner/name")


@pytest.mark.usefixtures("hub")
def test_without_a_network_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question of size and licence meets the HTTP client's own error."""
    client_error = huggingface_hub.errors.HfHubHTTPError.__bases__[0]

    def unreachable(*_arguments: Any, **_options: Any) -> None:
        raise client_error("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(CheckpointError, match="the hub cannot be reached") as caught:
        fetch_offer("owner/name")
    assert "Name or service not known" in str(caught.value)


def test_what_names_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.toml").touch()
    (tmp_path / "b.gguf").touch()
    names = ("owner/name", "owner/name:Q8_0", "folder", "b.gguf", "missing.gguf")
    assert all(map(names_model, names))
    assert not any(map(names_model, ("a.toml", "missing.toml", "folder/name", "owner/recipe.toml")))
    assert fetch_offer("folder") is None


def test_nothing_is_fetched_where_nobody_can_answer_or_somebody_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = "owner/name: 5.0 MiB, licence apache-2.0"
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="nobody can be asked") as caught:
        main._agree(offer)
    assert "`hf download owner/name`" in str(caught.value)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    main._agree(offer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(typer.Abort):
        main._agree(offer)
    main._agree(None)
