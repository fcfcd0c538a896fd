"""Experts narrower than the model give the same bits wherever their rows are: in memory, on disk, on two sides."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_models import from_disk, within
from support.synthetic import FACTS, random_artifact, small_decoder, stored_plan

from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer, Text
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.kernels import reference

NARROW = next(facts for name, facts in FACTS.items() if name.startswith("narrower"))
PROMPT = np.random.default_rng(3).integers(0, 257, 100)
SHAPE = {"d_model": 64, "d_ff": 200, "n_layers": 3, "context_length": 160} | NARROW | {"expert_width": 40}


def artifact(folder: Path, fmt: str, **fields: Any) -> Path:
    text = Text(prefix_ids=(), end_ids=())
    return random_artifact(folder / "a.pi", small_decoder(**SHAPE), format=fmt, seed=5, scale=2.0, text=text, **fields)


def outputs(model: Model) -> list[np.ndarray]:
    """Logits behind a long piece of a prompt, and of tokens one by one."""
    cache, found = model.new_cache(), []
    for first in range(0, len(PROMPT), model.executor.block_tokens):
        tokens = PROMPT[first : first + model.executor.block_tokens]
        (result,) = model.executor.step([SequenceStep(cache=cache, tokens=tokens, select=False)])
        found = [result.logits_TV]
    return found + [array for token in PROMPT[:4].tolist() for array in model.decode(token, cache)]


def assert_same(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", ["dense", "predicted"])
def test_rows_and_whole_experts_from_disk(tmp_path: Path, mode: str) -> None:
    path = artifact(tmp_path, "q4", ranks=[4, None, 6])
    with load(path, mode=mode, device="cpu") as model:
        expected = outputs(model)
    for share, block_tokens in ((0.1, 1024), (0.5, 64)):
        with from_disk(path, share, mode, block_tokens=block_tokens) as model:
            assert_same(outputs(model), expected)


def test_whole_matrices(tmp_path: Path) -> None:
    path = artifact(tmp_path, "f16", ffn_layout="matrices", layers=(Layer(rung="dense"),) * 3)
    with Artifact.open(path) as found:
        wanted = reference.forward(found, PROMPT[:20])
    with within(path, None, context=160) as model:
        np.testing.assert_allclose(model.logits(PROMPT[:20].tolist()), wanted, atol=2e-3 * np.abs(wanted).max())
        expected = outputs(model)
    with within(path, "least", context=160) as model:
        assert_same(outputs(model), expected)


def test_two_sides(tmp_path: Path) -> None:
    plan = stored_plan((96, 0, 200, 32, 64) * 3, 1 << 15, 20000, attention=("cpu",) * 3)
    path = artifact(tmp_path, "f16", ranks=[4, None, 6], plans=(plan,))
    with load(path, device="cpu") as model:
        expected = outputs(model)
    with load(path, device="stand-in") as model:
        for one, other in zip(outputs(model), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())
