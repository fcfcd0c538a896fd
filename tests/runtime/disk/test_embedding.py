"""Rows of an untied embedding are in memory only while their tokens run."""

from pathlib import Path

import numpy as np
import pytest
from support.disk_models import from_disk, rows_of
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import useful_budgets
from pi_runtime.disk.ram_plan import fixed_bytes

VOCABULARY, WIDTH = 4000, 64
PROMPT = np.random.default_rng(0).permutation(VOCABULARY)[: 3 * BLOCK_TOKENS].tolist()


def artifact(folder: Path, fmt: str = "f16", *, tied: bool = False) -> Path:
    decoder = small_decoder(
        d_model=WIDTH, d_ff=900, n_layers=2, vocab_size=VOCABULARY, context_length=256, tied_head=tied
    )
    return random_artifact(folder / f"{fmt}-{tied}.pi", decoder, format=fmt, ranks=[4, None])


def least_budget(path: Path) -> int:
    with Artifact.open(path) as opened:
        return useful_budgets(opened.manifest, fixed_bytes(opened.manifest, 256, "auto", 0))[0]


def test_the_smallest_budget_is_without_it(tmp_path: Path) -> None:
    """A tied model has the matrix once, an untied one its twin for the head, and a block's rows of the embedding."""
    tied, untied = (least_budget(artifact(tmp_path, tied=tied)) for tied in (True, False))
    assert untied - tied == BLOCK_TOKENS * 2 * WIDTH


@pytest.mark.parametrize("fmt", ["f16", "q8"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_text_is_the_same(tmp_path: Path, fmt: str, share: float) -> None:
    path = artifact(tmp_path, fmt)
    with load(path, device="cpu") as model:
        expected = model.logits(PROMPT)
    with from_disk(path, share) as model:
        np.testing.assert_array_equal(model.logits(PROMPT), expected)
        assert rows_of(model).plan.whole_embedding == (share == 1)


def test_a_little_below_all_of_it_the_rows_of_ffns_are_there(tmp_path: Path) -> None:
    path = artifact(tmp_path)
    with load(path, device="cpu") as model:
        expected = model.logits(PROMPT)
    with from_disk(path, 0.99) as model:
        rows = rows_of(model)
        assert not rows.plan.whole_embedding
        assert rows.are_in_memory
        before = rows.reader.bytes_read
        np.testing.assert_array_equal(model.logits(PROMPT), expected)
        assert 0 < rows.reader.bytes_read - before <= len(PROMPT) * 4096
