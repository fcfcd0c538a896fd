"""Files in parts: found by the first or the folder, held to be whole and of one model."""

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.gguf_files import rounded_checkpoint, write_byte_tokenizer, write_gguf, write_parts
from support.refused_checkpoints import refusal

from pi_compile.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole file, and a folder `parts` with the same in three parts; another model in `others`."""
    folder = tmp_path_factory.mktemp("made")
    for name, layers in (("parts", 2), ("others", 3)):
        rounded_checkpoint(folder / "hf", "llama", "q8", num_hidden_layers=layers)
        write_byte_tokenizer(folder / "hf")
        write_gguf(folder / "hf", folder / "m.gguf", "q8")
        (folder / name).mkdir()
        write_parts(folder / "m.gguf", folder / name, 8 if layers == 2 else 11)
        (folder / "m.gguf").rename(folder / f"whole-{name}.gguf")
    return folder


@pytest.fixture
def parts(made: Path, tmp_path: Path) -> list[Path]:
    shutil.copytree(made / "parts", tmp_path / "parts")
    return sorted((tmp_path / "parts").iterdir())


def test_all_is_as_in_the_whole_file(made: Path, parts: list[Path]) -> None:
    whole, found = open_checkpoint(made / "whole-parts.gguf"), open_checkpoint(parts[0])
    assert len(parts) == 3
    assert (found.decoder, found.formats()) == (whole.decoder, whole.formats())
    for array in whole.array_shapes:
        np.testing.assert_array_equal(found.values(array), whole.values(array), err_msg=array)
    assert found.text_files == whole.text_files
    assert list(found.file_digests) == [path.name for path in parts]
    assert found.source.path("blk.1.ffn_up.weight") in parts[1:]


def test_the_folder_stands_for_its_first_part(parts: list[Path]) -> None:
    assert open_checkpoint(parts[0].parent).location == parts[0]


def test_another_part_is_named(parts: list[Path]) -> None:
    message = refusal(parts[1])
    assert "one of 3 parts of a model" in message
    assert "…-00001-of-00003.gguf, with the others beside it" in message


def test_a_part_is_missing(parts: list[Path]) -> None:
    parts[1].unlink()
    for path in (parts[0], parts[0].parent):
        assert "1 of its 3 parts are missing" in refusal(path)
        assert "no m-00002-of-00003.gguf" in refusal(path)


def test_the_first_part_is_missing(parts: list[Path]) -> None:
    parts[0].unlink()
    assert "the first part, by its own name" in refusal(parts[0].parent)


def test_a_part_is_cut_short(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    assert f"{parts[2]}: not a whole GGUF file" in refusal(parts[0])


def test_parts_in_the_wrong_order(parts: list[Path]) -> None:
    shutil.copy(parts[2], parts[1])
    message = refusal(parts[0])
    assert f"{parts[1]}: not part 2 of the model that {parts[0].name} begins" in message
    assert "expected: split.no = 1" in message


def test_a_part_of_another_model(made: Path, parts: list[Path]) -> None:
    shutil.copy(made / "others" / parts[2].name, parts[2])
    message = refusal(parts[0])
    assert "its parts do not make one model" in message
    assert "fetch all parts of one version of the model" in message


def test_a_part_under_another_name(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    assert "one of 3 parts of a model" in refusal(renamed)
