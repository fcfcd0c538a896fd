"""Property tests here repeat: same cases every time, and no clock."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("artifact", deadline=None, derandomize=True)
settings.load_profile("artifact")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacks") / "a.pi"
