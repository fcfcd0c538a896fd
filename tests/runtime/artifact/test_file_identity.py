"""A file that changes while it is open, and one that is replaced."""

import os
from pathlib import Path

import pytest

from pi_runtime.artifact.reader import FileIdentity
from pi_runtime.errors import ArtifactError


def test_what_happens_to_an_open_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pi"
    path.write_bytes(bytes(100))
    os.utime(path, (1, 1))
    with path.open("r+b", buffering=0) as file:
        identity = FileIdentity(path, file.fileno())
        (tmp_path / "new").write_bytes(bytes(7))
        (tmp_path / "new").rename(path)
        identity.check(file.fileno())
        file.write(b"other")
        with pytest.raises(ArtifactError, match=r"a\.pi: was changed while it was in use"):
            identity.check(file.fileno())
        os.utime(file.fileno(), (1, 1))
        identity.check(file.fileno())
        file.truncate(50)
        os.utime(file.fileno(), (1, 1))
        with pytest.raises(ArtifactError, match="was changed"):
            identity.check(file.fileno())
