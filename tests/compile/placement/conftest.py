"""Budgets of these tests are those of models that are tiny beside a process."""

import pytest

from pi_compile.placement import stage


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets of RAM are for the model alone."""
    monkeypatch.setattr(stage, "PROCESS_NBYTES", 0)
