"""Hub models: what fetching one takes is said before, and a GGUF file is chosen by how its name ends."""

import io
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import huggingface_hub
import typer

from pi_compile.checkpoint.folder import (
    fetch_offer,
    fetched_config,
    find_checkpoint,
    gguf_sizes,
    hub_commit,
    names_model,
)
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
def test_gguf_files_are_sized_under_the_names_that_fetch_them() -> None:
    """Parts count together."""
    found = gguf_sizes("owner/name")
    names = ("name-Q4_K_M", "name-Q4_K_S", "name-UD-Q4_K_S")
    assert found == dict(zip((f"owner/name:{name}" for name in names), (2 << 20, 1 << 20, 1 << 20), strict=True))
    for name, nbytes in found.items():
        assert f"{nbytes >> 20}.0 MiB" in str(fetch_offer(name))


@pytest.mark.parametrize("base", ["owner/base", ["owner/base", "other/base"], None])
def test_gguf_files_have_the_config_of_what_they_were_made_from(
    base: str | list[str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(name: str, file: str) -> str:
        if name != "owner/base":
            raise no_such_file(name, file)
        return str(tmp_path / file)

    def no_such_file(name: str, file: str) -> Exception:
        error = huggingface_hub.errors.EntryNotFoundError
        made = Exception.__new__(error)
        made.args = (f"{name} has no {file}",)
        return made

    card = SimpleNamespace(base_model=base)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(card_data=card))
    if base:
        assert fetched_config("owner/name") == tmp_path / "config.json"
    else:
        with pytest.raises(huggingface_hub.errors.EntryNotFoundError, match="has no config"):
            fetched_config("owner/name")


@pytest.mark.usefixtures("hub")
def test_size_and_licence_of_what_would_be_fetched() -> None:
    assert fetch_offer("owner/name") == "owner/name: 5.0 MiB, licence apache-2.0"
    assert fetch_offer("owner/name:Q4_K_M") == "owner/name:Q4_K_M: 2.0 MiB, licence apache-2.0"
    with pytest.raises(CheckpointError, match="2 GGUF files of owner/name") as caught:
        fetch_offer("owner/name:q4_k_s")
    assert "name-Q4_K_M, name-Q4_K_S, name-UD-Q4_K_S" in str(caught.value)


NAMED = {
    "Q4_K_M": (["a-Q4_K_M.gguf", "a-Q5_K_M.gguf", "README.md"], ["a-Q4_K_M.gguf"]),
    "q8_0": (["q8/a-Q8_0-00001-of-00002.gguf", "q8/a-Q8_0-00002-of-00002.gguf"], 2),
    "F16": (["mmproj-F16.gguf", "a-BF16.gguf", "a-F16.gguf"], ["a-F16.gguf"]),
    "BF16": (["a-BF16-mmproj.gguf", "BF16/a-BF16.gguf", "a-F16.gguf"], ["BF16/a-BF16.gguf"]),
    "Q4_XS": (["a-IQ4_XS.gguf", "a.Q4_XS.gguf"], ["a.Q4_XS.gguf"]),
    "F32": (["F32.gguf", "imatrix-F32.gguf"], ["F32.gguf"]),
    "Q2/a.gguf": (["Q2/a.gguf", "Q3/a.gguf"], ["Q2/a.gguf"]),
    "a-Q4_0": (["a-Q4_0.gguf", "b-a-Q4_0.gguf"], ["a-Q4_0.gguf"]),
    "": (["only/a-Q6_K.gguf", "mmproj-a-F16.gguf", "config.json"], ["only/a-Q6_K.gguf"]),
}
REFUSED = {
    "F16": (["a-BF16.gguf", "mmproj-F16.gguf"], "no GGUF files", "a-BF16"),
    "Q4_0": (["x/a-Q4_0.gguf", "y/a-Q4_0.gguf"], "2 GGUF files", "x/a-Q4_0, y/a-Q4_0"),
    "a.gguf": (["Q2/a.gguf", "Q3/a.gguf"], "2 GGUF files", "Q2/a, Q3/a"),
    "mmproj-F16": (["mmproj-F16.gguf"], "no GGUF files", "no GGUF file"),
    "": (["a-Q4_0.gguf", "b/a-Q8_0.gguf", "config.json"], "of which one is to be named", "a-Q4_0, b/a-Q8_0"),
}


def of_repository(monkeypatch: pytest.MonkeyPatch, folder: Path, files: list[str]) -> list[str]:
    """A hub with these files, whose snapshot is in a folder; returns the list of what is fetched last."""
    fetched: list[str] = []
    commit = folder / "snapshots" / "c0ffee"

    def snapshot(_name: str, *, allow_patterns: list[str], **_options: Any) -> str:
        fetched[:] = [file for file in files if any(fnmatch(file, pattern) for pattern in allow_patterns)]
        for file in fetched:
            (commit / file).parent.mkdir(parents=True, exist_ok=True)
            (commit / file).write_bytes(b"GGUF" if file.endswith(".gguf") else b"{}")
        return str(commit)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: files)
    return fetched


@pytest.mark.parametrize("ending", NAMED)
def test_a_gguf_file_by_how_its_name_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str) -> None:
    files, wanted = NAMED[ending]
    wanted = files if wanted == 2 else wanted
    fetched = of_repository(monkeypatch, tmp_path, files)
    found = find_checkpoint("owner/name" + f":{ending}" * bool(ending))
    assert found == tmp_path / "snapshots" / "c0ffee" / wanted[0]
    assert fetched == wanted
    assert hub_commit(found) == "c0ffee"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_checkpoint("owner/name" + f":{ending}" * bool(ending)) == found


@pytest.mark.parametrize("ending", REFUSED)
def test_what_a_repository_has_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str) -> None:
    files, what, found = REFUSED[ending]
    of_repository(monkeypatch, tmp_path, files)
    with pytest.raises(CheckpointError, match=what) as caught:
        find_checkpoint("owner/name" + f":{ending}" * bool(ending))
    assert f"found: {found}" in str(caught.value)


def test_a_folder_with_a_projector_beside_its_model(tmp_path: Path) -> None:
    for name in ("mmproj-F16.gguf", "a-Q4_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert find_checkpoint(tmp_path) == tmp_path / "a-Q4_0.gguf"


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
