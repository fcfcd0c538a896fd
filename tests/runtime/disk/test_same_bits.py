"""A run that reads rows from disk gives the bits of a run in memory: any mode, format, budget, and company."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_models import from_disk, rows_of
from support.synthetic import FACTS, random_artifact, small_decoder

from pi_runtime import Model, load
from pi_runtime.artifact.formats import ROW_FORMATS
from pi_runtime.artifact.schema import Text
from pi_runtime.disk.whole_experts import ExpertStore
from pi_runtime.execution import disk_ahead, disk_rows
from pi_runtime.execution.disk_rows import DiskRows
from pi_runtime.execution.executor import SequenceStep

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 257, 70)]


def artifact(folder: Path, fmt: str = "f16", matrices: dict[str, str] | None = None, **shape: Any) -> Path:
    """Three layers, of which the first and the last have predictors that name about half of the neurons."""
    decoder = small_decoder(**{"d_model": 64, "d_ff": 2500, "n_layers": 3, "context_length": 160, **shape})
    text = Text(prefix_ids=(), end_ids=())
    path = folder / f"{fmt}.pi"
    ranks = [4, None, 6]
    return random_artifact(path, decoder, format=fmt, ranks=ranks, seed=5, scale=3.0, text=text, matrices=matrices)


def outputs(model: Model) -> list[np.ndarray]:
    """Logits of a long prompt, of its tokens one by one, and of two sequences together; and what selection counted."""
    found = [model.logits(PROMPT), *model.examine(PROMPT[:12])]
    cache = model.new_cache()
    for token in PROMPT[:4]:
        found += model.decode(token, cache)
    caches = [model.new_cache() for _ in range(2)]
    for _ in range(2):
        steps = [
            SequenceStep(cache=cache, tokens=np.array(PROMPT[:n], np.int64), select=select)
            for cache, n, select in zip(caches, (3, 30), (True, False), strict=True)
        ]
        found += [result.logits_TV for result in model.executor.step(steps)]
    return found


def bytes_read(model: Model) -> int:
    return rows_of(model).reader.bytes_read


def same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_every_format(tmp_path: Path, fmt: str) -> None:
    path = artifact(tmp_path, fmt)
    with load(path, device="cpu") as model:
        expected = outputs(model)
    with from_disk(path, 0.3) as model:
        same(outputs(model), expected)


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_layers_with_rows_of_different_lengths(tmp_path: Path, share: float) -> None:
    path = artifact(tmp_path, "q8", {"layers/0/ffn/first": "q4", "layers/1/ffn/rest": "q4", "layers/2/ffn/rest": "q4"})
    with load(path, device="cpu") as model:
        expected = outputs(model)
    with from_disk(path, share) as model:
        same(outputs(model), expected)


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
def test_every_fact_of_a_decoder(tmp_path: Path, facts: dict[str, Any]) -> None:
    path = artifact(tmp_path, "q4", **facts)
    with load(path, device="cpu") as model:
        expected = outputs(model)
    with from_disk(path, 0.2) as model:
        same(outputs(model), expected)
        assert bytes_read(model) > 0


@pytest.mark.parametrize("mode", ["dense", "gate", "predicted"])
def test_every_mode_and_budget(tmp_path: Path, mode: str) -> None:
    path = artifact(tmp_path)
    with load(path, mode=mode, device="cpu") as model:
        expected = outputs(model)
    for share in (0, 0.1, 0.5, 2):
        with from_disk(path, share, mode) as model:
            same(outputs(model), expected)
            read = bytes_read(model)
            same(outputs(model), expected)
            assert (bytes_read(model) == read) == (share == 2)


def test_experts(tmp_path: Path) -> None:
    path = artifact(tmp_path, "q8", n_experts=4, experts_per_token=2, d_ff=1100)
    with load(path, device="cpu") as model:
        expected = outputs(model)
    with from_disk(path, 0.3) as model:
        same(outputs(model), expected)


@pytest.mark.parametrize("early", [False, True])
def test_experts_that_come_and_go_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    path = artifact(tmp_path, "f16", n_experts=6, experts_per_token=2, d_ff=200, router_early=early)
    with load(path, mode="dense", device="cpu") as model:
        expected = outputs(model)
    for share, ahead in ((0.02, True), (0.2, True), (0.5, True), (0.5, False)):
        monkeypatch.setattr(disk_ahead.FasterWay, "second", ahead)
        with from_disk(path, share, "dense") as model:
            for _ in range(2):
                same(outputs(model), expected)


def test_experts_that_are_there_are_computed_while_others_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = artifact(tmp_path, "q4", n_experts=8, experts_per_token=4, d_ff=200)
    with load(path, mode="dense", device="cpu") as model:
        cache = model.new_cache()
        expected = [model.decode(token, cache) for token in PROMPT[:20]]
    arriving, orders = ExpertStore.arriving, list[tuple[list[int], list[int]]]()

    def spied(self: ExpertStore, layer: int, expert_X: np.ndarray) -> Iterator[list[int]] | None:
        there = expert_X[self.are_there(layer, expert_X)].tolist()
        groups = arriving(self, layer, expert_X)
        if groups is None:
            return None
        found = list(groups)
        orders.append((there, [expert for group in found for expert in group]))
        return iter(found)

    monkeypatch.setattr(ExpertStore, "arriving", spied)
    monkeypatch.setattr(disk_ahead.FasterWay, "second", False)
    with from_disk(path, 0.4, "dense") as model:
        cache = model.new_cache()
        for token, logits in zip(PROMPT[:20], expected, strict=True):
            same(model.decode(token, cache), logits)
    assert all(order[: len(there)] == there and len(set(order)) == 4 for there, order in orders)
    assert any(order != sorted(order) for _, order in orders)


def test_a_router_before_attention_names_what_is_read_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows and experts fill whole sectors and pages, so bytes that are read are those of rows.
    shape = {"d_model": 256, "d_ff": 200, "n_experts": 8, "experts_per_token": 2, "router_early": True}
    path = artifact(tmp_path, "f16", **shape, tied_head=True)
    before_attention, grouped = DiskRows.before_attention, disk_rows.tokens_by_expert
    before, during, routed = list[np.ndarray](), list[np.ndarray](), list[list[int]]()

    def held(layer: int) -> np.ndarray:
        slot_2N = [arena.rows_L[layer].slot_N for arena in rows_of(model).store.arenas.values()]
        return np.all(np.array(slot_2N).reshape(2, 8, 200) > 0, axis=(0, 2))

    def spied_before(self: DiskRows, layer: int) -> None:
        before.append(held(layer))
        before_attention(self, layer)
        during.append(held(layer))

    def spied_grouping(expert_TK: np.ndarray, *others: Any) -> Any:
        routed.append(expert_TK[0].tolist())
        return grouped(expert_TK, *others)

    with from_disk(path, 0.6, "dense") as model:
        cache, read = model.new_cache(), bytes_read(model)
        monkeypatch.setattr(DiskRows, "before_attention", spied_before)
        monkeypatch.setattr(disk_rows, "tokens_by_expert", spied_grouping)
        for token in PROMPT[:12]:
            model.decode(token, cache)
        read = bytes_read(model) - read
    assert len(routed) == len(during) == 12 * 3
    assert all(held_X[expert_K].all() for held_X, expert_K in zip(during, routed, strict=True))
    missed = sum(int((~held_X[expert_K]).sum()) for held_X, expert_K in zip(before, routed, strict=True))
    assert missed > 0
    assert read == missed * 200 * 3 * 256 * 2


def test_experts_move_while_the_text_stays_the_same(tmp_path: Path) -> None:
    path = artifact(tmp_path, "q4", n_experts=12, experts_per_token=2, d_ff=200)
    with load(path, mode="dense", device="cpu") as model:
        cache = model.new_cache()
        expected = [model.decode(token, cache) for token in PROMPT[:30]]
    with from_disk(path, 0.4, "dense") as model:
        rows_L, cache = rows_of(model).store.arenas["rest"].rows_L, model.new_cache()
        held = []
        for token, logits in zip(PROMPT[:30], expected, strict=True):
            same(model.decode(token, cache), logits)
            held.append(np.array([rows.slot_N[::200] > 0 for rows in rows_L]))
    assert (held[0] != held[-1]).any()
    assert {int(some.sum()) for some in held} == {held[0].sum()}


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("two_phases_from", [-1.0, 9.0])
def test_reading_ahead_and_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool, two_phases_from: float
) -> None:
    monkeypatch.setattr(disk_ahead.FasterWay, "second", ahead)
    monkeypatch.setattr(disk_ahead, "TWO_PHASES_FROM", two_phases_from)
    path = random_artifact(
        tmp_path / "model.pi", small_decoder(d_model=64, d_ff=2500, n_layers=4, context_length=160), format="q4",
        ranks=[4, 4, None, 6], seed=5, scale=3.0, text=Text(prefix_ids=(), end_ids=()),
    )  # fmt: skip
    with load(path, device="cpu") as model:
        expected = outputs(model)
    for share in (0.1, 0.4):
        with from_disk(path, share) as model:
            for _ in range(2):
                same(outputs(model), expected)


def test_long_prompts_go_through_a_layer_together(tmp_path: Path) -> None:
    path = artifact(tmp_path, "q8", context_length=400)
    prompt = np.random.default_rng(4).integers(0, 257, 300)

    def last(model: Model) -> list[np.ndarray]:
        cache, found = model.new_cache(), []
        for first in range(0, 300, model.executor.block_tokens):
            tokens = prompt[first : first + model.executor.block_tokens]
            step = SequenceStep(cache=cache, tokens=tokens, select=False)
            found = [model.executor.step([step])[0].logits_TV]
        return [*found, *model.decode(5, cache)]

    with load(path, device="cpu") as model:
        expected = last(model)
    for share in (0.2, 0.5):
        read = []
        for tokens in (64, 256):
            with from_disk(path, share, block_tokens=tokens) as model:
                before = bytes_read(model)
                same(last(model), expected)
                read.append(bytes_read(model) - before)
        assert read[1] < 0.6 * read[0]  # two passes, not five


def test_threads(tmp_path: Path) -> None:
    path, found = artifact(tmp_path), []
    for threads in (1, 2):
        with from_disk(path, 0.2, threads=threads) as model:
            found.append(outputs(model))
    same(*found)
