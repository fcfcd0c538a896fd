"""GPU, RAM and disk in one run: the bits of the same plan with all cold rows in memory, within both budgets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_models import rows_of
from support.synthetic import FACTS, random_artifact, small_decoder, stored_plan

from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import all_rows, least_row_buffers, slot_nbytes
from pi_runtime.artifact.schema import RowPlan
from pi_runtime.execution.disk_ahead import FasterWay
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.plan_choice import choose_plan
from pi_runtime.execution.ram_budget import ram_fixed_bytes

MUCH = 1 << 40
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 257, 70)]
ONE, EXPERTS = {"d_ff": 2500}, {"n_experts": 4, "experts_per_token": 2, "d_ff": 700}
CUTS = {"one": (640, 0, 2500), "experts": (128, 0, 700, 64, 0, 0, 0, 0, 700, 700, 700, 700)}


def artifact(folder: Path, cuts: tuple[int, ...], fmt: str = "f16", rows: RowPlan | None = None, **shape: Any) -> Path:
    """Three layers, of which the first and the last have predictors that name about half of the neurons."""
    decoder = small_decoder(**{"d_model": 64, "n_layers": 3, "context_length": 160, **shape})
    plan = stored_plan(cuts, MUCH, 900, attention=("gpu", "cpu", "cpu"), head="gpu", rows=rows)
    kept: dict[str, Any] = {"ranks": [4, None, 6], "seed": 5, "scale": 3.0, "profiled": True}
    return random_artifact(folder / f"{fmt}.pi", decoder, format=fmt, plans=[plan], **kept)


def outputs(model: Model) -> list[np.ndarray]:
    """Logits of a long prompt, of single tokens, of drafts, and of sequences together; and what selection counted."""
    found = [model.logits(PROMPT), *model.examine(PROMPT[:40])]
    cache = model.new_cache()
    for token in PROMPT[:5]:
        found += model.decode(token, cache)
    caches = [model.new_cache() for _ in range(3)]
    lengths, selects = (3, 30, 11), (True, False, True)
    for _ in range(2):
        steps = [
            SequenceStep(cache=cache, tokens=np.array(PROMPT[:n], np.int64), select=select)
            for cache, n, select in zip(caches, lengths, selects, strict=True)
        ]
        found += [result.logits_TV for result in model.executor.step(steps)]
    return found


def within(path: Path, share: float, **options: Any) -> Model:
    """The model with RAM for this share of all rows, and none to spare."""
    with Artifact.open(path) as found:
        taken, m = choose_plan(found, found.manifest.decoder.context_length, MUCH), found.manifest
    both = sum(slot_nbytes(m.decoder, m.formats["ffn"]).values())
    least = ram_fixed_bytes(m, taken, "auto", 64 << 20) + least_row_buffers(m.decoder, both)
    budget = least + int(share * all_rows(m.decoder, both))
    limits = {"ram_budget": budget, "kv_budget": 64 << 20, "vram_budget": taken.total}
    return load(path, device="stand-in", context=m.decoder.context_length, **limits, **options)


def expected(path: Path, **options: Any) -> list[np.ndarray]:
    with load(path, device="stand-in", **options) as model:
        return outputs(model)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mode", ["dense", "gate", "predicted"])
@pytest.mark.parametrize(("kind", "shape"), [("one", ONE), ("experts", EXPERTS)], ids=["one", "experts"])
def test_three_tiers_give_the_bits_of_two(tmp_path: Path, kind: str, shape: dict[str, Any], mode: str) -> None:
    path = artifact(tmp_path, CUTS[kind], **shape)
    wanted = expected(path, mode=mode)
    for share in (0, 0.3, 1.1):
        with within(path, share, mode=mode) as model:
            same(outputs(model), wanted)
            assert (rows_of(model).reader.bytes_read > 0, model.allocation is not None) == (True, True)


@pytest.mark.parametrize("fmt", ["q8", pytest.param("q4", marks=pytest.mark.long)])
def test_block_formats_and_reading_ahead(tmp_path: Path, fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = artifact(tmp_path, CUTS["experts"], fmt, **EXPERTS)
    wanted = expected(path)
    monkeypatch.setattr(FasterWay, "second", True)
    with within(path, 0.2) as model:
        same(outputs(model), wanted)


@pytest.mark.parametrize("facts", [pytest.param(f, id=n, marks=pytest.mark.long) for n, f in FACTS.items()])
def test_whatever_the_decoder(tmp_path: Path, facts: dict[str, Any]) -> None:
    experts = facts.get("n_experts", 1)
    path = artifact(tmp_path, (100, *[0] * (3 * experts - 2), 64), **{"d_ff": 700, **facts})
    with within(path, 0.2) as model:
        same(outputs(model), expected(path))


def division(m: Any, pinned: tuple[int, ...], cached: int) -> RowPlan:
    """A stored division; the second layer, on the gate rung, has its `first` in RAM."""
    nbytes, cold = slot_nbytes(m.decoder, m.formats["ffn"]), 2500
    first = (2 * cached + pinned[0] + pinned[2]) * nbytes["first"] + cold * nbytes["first"]
    slots = first + (3 * cached + sum(pinned)) * nbytes["rest"]
    fields = {"pinned": pinned, "cached": (cached, cached, 0), "first": (False, True, False), "slot_bytes": slots}
    return RowPlan(**fields, ram_bytes=1, context=64, read_bytes=1, predicted_ns=1, digest="0" * 64)


@pytest.mark.parametrize(("last", "cached", "is_shorter"), [(64, 128, False), (0, 800, True)])
def test_the_plan_has_its_own_division(tmp_path: Path, last: int, cached: int, is_shorter: bool) -> None:
    """Where less is left than it was solved for, its caches are shorter."""
    path = artifact(tmp_path, (640, 0, 2436), **ONE)
    wanted = expected(path)
    with Artifact.open(path) as found:
        stored = division(found.manifest, (320, 64, last), cached)
    path = artifact(tmp_path, (640, 0, 2436), rows=stored, **ONE)
    with within(path, 0.4) as model:
        same(outputs(model), wanted)
        plan = rows_of(model).plan
        assert (plan.stored, plan.pinned_LX.tolist()) == (stored, [[320], [64], [last]])
        assert [s.pinned for s in plan.first_L] == [320, 2500, last]
        assert [s.cached < cached for s in plan.rest_L[:2]] == [is_shorter] * 2
    with within(path, 0) as model:
        assert rows_of(model).plan.stored is None
