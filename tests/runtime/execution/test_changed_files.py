"""An artifact that changes while it is mapped is an error of the next step: never other text, or the process's end."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import Engine, load
from pi_runtime.errors import ArtifactError, UsageError

Change = Callable[[Path], object]


@pytest.fixture
def path(random_path: Path, tmp_path: Path) -> Path:
    """A copy whose latest change was long ago."""
    return long_ago(shutil.copyfile(random_path, tmp_path / "own.pi"))


def long_ago(path: Path) -> Path:
    os.utime(path, (1, 1))
    return path


def cut_off(path: Path) -> None:
    os.truncate(path, 4096)


def written_over(path: Path) -> None:
    """As `cp` and `rsync --inplace` do it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 4)
        file.write(b"\x11" * (path.stat().st_size // 2))


@pytest.mark.parametrize("change", [written_over, cut_off])
def test_a_generation(path: Path, change: Change) -> None:
    with load(path, device="cpu") as model:
        answer = model.generate([97, 98], max_tokens=60, speculate="off")
        next(answer)
        change(path)
        for use in (lambda: "".join(answer), lambda: model.logits([1, 2]), lambda: model.score([1, 2])):
            with pytest.raises(ArtifactError, match="was changed while it was in use") as found:
                use()
        assert found.value.remedy


def test_a_file_that_changes_within_a_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of the step is not handed out."""
    with load(path, device="cpu") as model:
        run = model.executor.ops.run  # type: ignore[attr-defined]

        def changing(sequences: object) -> object:
            written_over(path)
            return run(sequences)

        monkeypatch.setattr(model.executor.ops, "run", changing)  # type: ignore[attr-defined]
        with pytest.raises(ArtifactError, match="was changed"):
            next(model.generate([97, 98], max_tokens=3))


@pytest.mark.parametrize("change", [written_over, cut_off])
def test_an_engine(path: Path, change: Change) -> None:
    # Dense: after a predicted answer the engine's thread reads its tokens again, while the file is cut off.
    with load(path, device="cpu", mode="dense") as model, Engine(model) as engine:
        "".join(engine.generate([97], max_tokens=3))
        change(path)
        with pytest.raises(ArtifactError, match="was changed"):
            "".join(engine.generate([97], max_tokens=3))
        with pytest.raises(UsageError, match="the engine has failed") as found:
            engine.generate([97], max_tokens=3)
        assert isinstance(found.value.__cause__, ArtifactError)


def test_a_placement(tmp_path: Path) -> None:
    plan = stored_plan((16, 8), 1 << 20, 20000, context=96)
    path = random_artifact(tmp_path / "a.pi", small_decoder(context_length=96, d_ff=150), plans=(plan,))
    with load(long_ago(path), device="stand-in") as model:
        "".join(model.generate([97], max_tokens=3))
        cut_off(path)
        with pytest.raises(ArtifactError, match="was changed"):
            "".join(model.generate([97], max_tokens=3))


def test_a_file_that_is_replaced_stays_as_it_was(path: Path, tmp_path: Path) -> None:
    with load(path, device="cpu") as model:
        before = "".join(model.generate([97, 98], max_tokens=20))
        (tmp_path / "new").write_bytes(bytes(path.stat().st_size))
        (tmp_path / "new").rename(path)
        assert "".join(model.generate([97, 98], max_tokens=20)) == before
