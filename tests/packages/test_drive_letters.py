"""Paths as Windows has them, where a model, a recipe or an artifact is named: drives, backslashes, and hub names."""

import ntpath
import os
import tomllib
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("huggingface_hub")

from pi_compile.checkpoint import folder
from pi_compile.cli import main
from pi_compile.files import parse_toml
from pi_compile.pipeline import recipe_checkpoint
from pi_compile.recipe import default_recipe
from pi_runtime import console
from pi_runtime.commands import model_cache

HUB_NAMES = ("owner/name", "Qwen/Qwen2.5-0.5B", "owner/name:Q4_K_M")
PATHS = (r"C:\models\x", "C:/models/x", "D:x", r"C:\x", r"..\models\x", r".\x", "x", r"\\server\x", r"C:\a b\x.gguf")


class Absent(PureWindowsPath):
    """A path of Windows where nothing is."""

    def is_dir(self) -> bool:
        return False

    is_file = exists = is_dir

    def resolve(self) -> "Absent":
        return self

    def expanduser(self) -> "Absent":
        return self


@pytest.mark.parametrize("name", HUB_NAMES)
def test_a_hub_name_is_one_with_either_slash(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Any = Absent(name)
    assert str(path) == name.replace("/", "\\")
    assert model_cache._key_parts(path) == [name]
    asked = []
    monkeypatch.setattr(folder, "Path", Absent)
    monkeypatch.setattr(folder, "is_gguf", lambda _: False)
    monkeypatch.setattr(folder, "_fetch", lambda named, _: asked.append(named[0]))
    assert folder.names_model(path.as_posix())
    folder.find_checkpoint(path)
    folder.find_checkpoint(name)
    assert asked == [name, name]


@pytest.mark.parametrize("text", PATHS)
def test_a_path_is_no_hub_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Any = Absent(text)
    assert model_cache._key_parts(path) is None
    monkeypatch.setattr(folder, "Path", Absent)
    monkeypatch.setattr(folder, "is_gguf", lambda _: False)
    assert folder.names_model(path.as_posix()) == text.endswith(".gguf")
    with pytest.raises(folder.CheckpointError, match="no such folder"):
        folder.find_checkpoint(path)


def test_packing_is_told_hub_names_with_slashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> Any:
        given.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(model_cache.subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        model_cache._pack(Absent("owner/name"), tmp_path / "x.pi")  # type: ignore[arg-type]
    assert "owner/name" in given[0]


@pytest.mark.parametrize(
    ("model", "artifact"),
    [("owner/Qwen2.5-0.5B", "Qwen2.5-0.5B.pi"), ("owner/a.b:Q4_K_M", "a.b-Q4_K_M.pi"), ("x/c-1.5.gguf", "c-1.5.pi")],
)
def test_the_artifact_of_a_model_is_called_like_it(
    model: str, artifact: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A colon would name a stream of the file on Windows, and a dot ends no name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "_agree", lambda _: None)
    monkeypatch.setattr(folder, "fetch_offer", lambda _: None)
    packed: list[Path] = []
    monkeypatch.setattr("pi_compile.pipeline.packed.pack_model", lambda _, path, **__: packed.append(path))
    monkeypatch.setattr(main, "show_artifact", lambda *_: None)
    assert console.run(main.app, ["pack", "--plain", model]) == 0
    assert packed == [Path(artifact)]


def test_what_is_on_another_drive_has_its_whole_path_in_a_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def on_windows(path: Path, start: Path) -> str:
        return ntpath.relpath(f"D:{path}", f"C:{start}")

    monkeypatch.setattr(os.path, "relpath", on_windows)
    found = recipe_checkpoint._relative(tmp_path / "model", tmp_path / "recipes" / "r.toml")
    assert found == (tmp_path / "model").as_posix()


@pytest.mark.parametrize("text", [*PATHS, *HUB_NAMES])
def test_a_recipe_gives_every_path_back(text: str) -> None:
    assert tomllib.loads(default_recipe(text).to_toml())["model"]["path"] == text
    assert parse_toml(f"path = '{text}'") == {"path": text}


@pytest.mark.parametrize("text", [r"C:\models\x", r"C:\users\x", r"C:\Users\x", r"\\server\x"])
def test_a_backslash_between_double_quotes_is_told_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="write a path with /, or in single quotes"):
        parse_toml(f'[model]\npath = "{text}"')
