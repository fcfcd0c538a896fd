"""A GGUF file is known by its first bytes and by its contents: its name, and the way to it, do not matter."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.gguf_files import rounded_checkpoint, write_byte_tokenizer, write_gguf
from support.small_project import no_progress

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.evaluation.reference import check_origin
from pi_compile.files import json_digest
from pi_compile.pipeline.packed import pack_plain
from pi_compile.pipeline.recipe_checkpoint import create_recipe, recipe_checkpoint
from pi_compile.planning import find_planned
from pi_compile.recipe import read_recipe
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Manifest

QUIET: dict[str, Any] = {"progress": no_progress, "notice": lambda _line: None}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    rounded_checkpoint(folder / "hf", "llama", "q8")
    write_byte_tokenizer(folder / "hf")
    write_gguf(folder / "hf", folder / "model.gguf", "q8")
    return folder / "model.gguf"


@pytest.fixture
def cached(made: Path, tmp_path: Path) -> Path:
    """The file as the hub's cache has it: a name that is a link to a blob without a suffix."""
    blob, snapshot = tmp_path / "models--a--b" / "blobs" / "5e1f", tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    shutil.copy(made, blob)
    (snapshot / "model.gguf").symlink_to("../../blobs/5e1f")
    return snapshot / "model.gguf"


def manifest(path: Path) -> Manifest:
    with Artifact.open(path) as artifact:
        return artifact.manifest


def test_other_files_of_a_folder_do_not_matter(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that begins with the same letters, and a file that is not for everybody."""
    shutil.copy(made, tmp_path / "model.gguf")
    (tmp_path / "README").write_text("GGUF files of a model")
    secret = tmp_path / "secret"
    secret.write_text("x")
    as_usual = Path.open

    def refused(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == secret:
            raise PermissionError(13, "Permission denied", str(path))
        return as_usual(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    assert open_checkpoint(tmp_path).location == tmp_path / "model.gguf"


def test_a_file_of_the_hubs_cache_is_packed(cached: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    create_recipe(str(cached), recipe)
    assert read_recipe(recipe).model.path == "models--a--b/snapshots/c0ffee/model.gguf"
    pack_plain(recipe, tmp_path / "a.pi", **QUIET)
    assert list(manifest(tmp_path / "a.pi").provenance["checkpoint"]["files"]) == ["model.gguf"]


def test_a_file_without_its_suffix_is_read(cached: Path) -> None:
    blob = cached.resolve()
    found, whole = open_checkpoint(blob), open_checkpoint(cached)
    assert found.decoder == whole.decoder
    assert found.text_files == whole.text_files
    assert open_checkpoint(blob.parent).location == blob


def test_no_config_is_sought_in_a_file_without_its_suffix(cached: Path) -> None:
    with pytest.raises(CheckpointError, match="a GGUF file is not planned for"):
        find_planned(cached.resolve().name, cached.resolve().parent)


@pytest.mark.parametrize("link", ["folder", "file"])
def test_links_stay_in_the_recipe(made: Path, tmp_path: Path, link: str) -> None:
    """What is beside the recipe is named so, also where it is a link or where the way to both is one."""
    (tmp_path / "real").mkdir()
    (tmp_path / "way").symlink_to("real")
    if link == "folder":
        (tmp_path / "real" / "models").symlink_to(made.parent)
        model, written = tmp_path / "way" / "models" / "model.gguf", "models/model.gguf"
    else:
        (tmp_path / "real" / "mine.gguf").symlink_to(made)
        model, written = tmp_path / "way" / "mine.gguf", "mine.gguf"
    recipe = create_recipe(str(model), tmp_path / "way" / "r.toml")
    assert recipe.model.path == written
    assert recipe_checkpoint(recipe, tmp_path / "real").location == tmp_path / "real" / written


def test_a_way_up_from_a_linked_folder_is_the_systems(made: Path, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "way").symlink_to("deep/er")
    shutil.copy(made, tmp_path / "deep" / "model.gguf")
    recipe = create_recipe(str(tmp_path / "way" / ".." / "model.gguf"), tmp_path / "way" / "r.toml")
    assert recipe.model.path == "../model.gguf"
    assert recipe_checkpoint(recipe, tmp_path / "deep" / "er").location.samefile(tmp_path / "deep" / "model.gguf")


def test_the_digest_is_that_of_the_contents(made: Path, tmp_path: Path) -> None:
    other = shutil.copy(made, tmp_path / "another name")
    assert open_checkpoint(other).digest() == open_checkpoint(made).digest()
    assert open_checkpoint(other, activation="relu").digest() != open_checkpoint(made).digest()
    write_gguf(made.parent / "hf", tmp_path / "model.gguf", "f16")
    assert open_checkpoint(tmp_path / "model.gguf").digest() != open_checkpoint(made).digest()


@pytest.mark.parametrize("by_name", [False, True], ids=["now", "as it was: name and contents"])
def test_an_artifact_is_compared_with_its_file_by_any_name(made: Path, tmp_path: Path, by_name: bool) -> None:
    create_recipe(str(made), tmp_path / "r.toml")
    pack_plain(tmp_path / "r.toml", tmp_path / "a.pi", **QUIET)
    found = manifest(tmp_path / "a.pi")
    if by_name:
        made_from = found.provenance["checkpoint"]
        made_from["digest"] = json_digest(made_from["files"])
    moved = Path(shutil.copy(made, tmp_path / "moved.gguf"))
    assert check_origin(found, moved).location == moved
    write_gguf(made.parent / "hf", moved, "f16")
    with pytest.raises(CheckpointError, match="not packed from this checkpoint"):
        check_origin(found, moved)


def test_another_file_is_refused_by_what_it_is(tmp_path: Path) -> None:
    for name, content in (("notes", b"GGU"), ("model.safetensors", json.dumps({}).encode()), ("empty", b"")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is a file"):
            open_checkpoint(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "pipe")
