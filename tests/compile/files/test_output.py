"""Paths of what is written, checked before anything is computed."""

from pathlib import Path

import pytest
from support.paths import GOLDEN

from pi_compile.files import artifact_path
from pi_runtime.errors import UsageError


def test_an_artifact_is_called_as_its_recipe_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert artifact_path(Path("some/where/mine.toml"), None) == Path("mine.pi")
    assert artifact_path(Path("mine.toml"), tmp_path / "other.pi") == tmp_path / "other.pi"


def test_only_artifacts_are_replaced(tmp_path: Path) -> None:
    text = tmp_path / "notes.pi"
    text.write_text("dear diary")
    with pytest.raises(UsageError, match=r"not an artifact|no artifact"):
        artifact_path(Path("a.toml"), text)
    assert artifact_path(Path("a.toml"), GOLDEN) == GOLDEN
    with pytest.raises(UsageError, match="no folder"):
        artifact_path(Path("a.toml"), tmp_path / "missing" / "a.pi")
    assert text.read_text() == "dear diary"
