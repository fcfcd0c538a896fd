"""Layers with a state: the same bits however a prompt is cut, in any company, after pauses and from snapshots."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_models import from_disk
from support.requests import alone, assert_same, follow_ups, oracle, random_requests, together
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import Engine, Model, load
from pi_runtime.artifact.footprint import KEPT
from pi_runtime.artifact.layer_classes import layer_classes, sequence_nbytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer, Text
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.kernels import reference
from pi_runtime.sequence.sequence import snapshot_places

CONTEXT = 256
_STATES: dict[str, Any] = {
    "recurrent_layers": (0, 1, 3),
    "state_heads": 6,
    "state_key_heads": 3,
    "state_key_dim": 5,
    "state_value_dim": 37,
    "state_columns": 4,
}
FACTS: dict[str, dict[str, Any]] = {
    "gated_delta": {**_STATES, "n_layers": 4, "output_gate": True, "qk_norm": True},
    "mamba2": {
        **_STATES,
        "n_layers": 6,
        "state_least_step": 0.3,
        "mixer_only_layers": (1, 2),
        "ffn_only_layers": (4, 5),
        "positions": "none",
        "ffn": "plain",
        "activation": "relu2",
        "n_experts": 3,
        "experts_per_token": 2,
    },
    "short_conv": {
        "recurrent_layers": (0, 1, 3),
        "n_layers": 4,
        "state_heads": 6,
        "state_value_dim": 37,
        "state_columns": 3,
        "qk_norm": True,
    },
}
every_recurrence = pytest.mark.parametrize("kind", FACTS)


pytestmark = pytest.mark.usefixtures("poisoned")


def artifact(
    path: Path, kind: str = "gated_delta", *, rung: str = "predicted", context: int = CONTEXT, **fields: Any
) -> Path:
    decoder = small_decoder(recurrence=kind, context_length=context, **FACTS[kind])
    ranks = [4, *[None] * (decoder.n_layers - 1)]
    rungs = (Layer(rung=rung, rank=4), *[Layer(rung="gate")] * (decoder.n_layers - 1))
    text = Text(prefix_ids=(), end_ids=(3, 77))
    usual: dict[str, Any] = {"ranks": ranks, "layers": rungs, "text": text, "scale": 2.0, "format": "f16"}
    return random_artifact(path, decoder, **usual | fields)


def opened(path: Path, device: str = "cpu", **options: Any) -> Model:
    return from_disk(path, 0.2, block_tokens=128) if device == "disk" else load(path, device=device, **options)


@every_recurrence
def test_logits_are_those_of_the_definition(kind: str, tmp_path: Path) -> None:
    path, ids = artifact(tmp_path / "a.pi", kind, format="f32"), np.random.default_rng(0).integers(0, 256, 90)
    with Artifact.open(path) as stored, load(path, mode="dense") as model:
        wanted = reference.forward(stored, ids)
        assert np.abs(model.logits(ids) - wanted).max() <= 5e-5 * np.abs(wanted).max()


@every_recurrence
@pytest.mark.parametrize(("fmt", "threads"), [("f32", 1), ("q8", 2)])
def test_any_cut_gives_the_same_bits(kind: str, tmp_path: Path, fmt: str, threads: int, long: bool) -> None:
    path, rng = artifact(tmp_path / "a.pi", kind, format=fmt), np.random.default_rng(0)
    ids = rng.integers(0, 256, CONTEXT)
    with load(path, threads=threads) as model:
        wanted = model.logits(ids)
        for _ in range(250 if long else 10):
            cache, ends = model.new_cache(), np.unique([*rng.integers(1, CONTEXT, rng.integers(1, 40)), CONTEXT])
            for end in ends.tolist():
                count = end - cache.length
                np.testing.assert_array_equal(
                    model.logits(ids[:end], last=count, cache=cache), wanted[end - count : end]
                )
            cache.close()


@every_recurrence
def test_tokens_that_are_taken_back_leave_no_trace(kind: str, tmp_path: Path, long: bool) -> None:
    """Any tokens may be tried, and any number of them may stay."""
    path, rng = artifact(tmp_path / "a.pi", kind), np.random.default_rng(1)
    ids = rng.integers(0, 256, CONTEXT)
    with load(path) as model:
        wanted = model.logits(ids)
        for _ in range(100 if long else 5):
            cache, fork = model.new_cache(), None
            while cache.length < CONTEXT - KEPT:
                at, count, stay = cache.length, int(rng.integers(1, KEPT + 1)), int(rng.integers(1, KEPT + 1))
                tried = ids[at : at + count].copy()
                tried[stay:] = rng.integers(0, 256, len(tried[stay:]))
                step = SequenceStep(cache=cache, tokens=tried, select=True, logits="all", is_tried=True)
                found = model.executor.step([step])[0].logits_TV
                stay = min(stay, count)
                np.testing.assert_array_equal(found[:stay], wanted[at : at + stay])
                cache.truncate(at + stay)
                assert cache.length == at + stay
                if rng.random() < 0.1:  # others may go on from here as well
                    fork = cache.fork()
                    count = min(5, CONTEXT - fork.length)
                    np.testing.assert_array_equal(
                        model.logits(ids[: fork.length + count], last=count, cache=fork),
                        wanted[cache.length : cache.length + count],
                    )
            cache.truncate(cache.length - KEPT - 1)
            assert cache.length == 0


@pytest.mark.parametrize(
    ("kind", "device", "options"),
    [
        ("gated_delta", "cpu", {"mode": "predicted"}),
        ("mamba2", "cpu", {"mode": "gate", "cache_format": "q8"}),
        ("gated_delta", "stand-in", {}),
        ("mamba2", "stand-in", {}),
        ("gated_delta", "disk", {}),
        ("mamba2", "disk", {}),
        ("short_conv", "cpu", {}),
        ("short_conv", "disk", {}),
    ],
)
def test_engines_give_the_text_that_a_sequence_has_alone(
    kind: str, device: str, options: dict[str, Any], tmp_path: Path, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, experts = FACTS[kind]["n_layers"], FACTS[kind].get("n_experts", 1)
    cuts = tuple(16 if n < experts else 8 for n in range(layers * experts))
    plan = stored_plan(cuts, 1 << 20, 20000, attention=("cpu",) * layers, context=CONTEXT)
    path = artifact(tmp_path / "a.pi", kind, plans=(plan,) if device == "stand-in" else ())
    preempted = cached = drafted = 0
    for n in range(8 if long else 2):
        rng = random.Random(f"{device} {n}")
        requests = random_requests(rng, 60 if long else 12, sampled=n % 2 == 1, context=CONTEXT, cancels=True)
        with opened(path, device, **options) as model:
            wanted = [alone(model, request) for request in requests]
            turns = follow_ups(rng, requests, wanted, CONTEXT)
            wanted += [alone(model, request) for request in turns]
        oracle(monkeypatch, [*requests, *turns], wanted, 0.2)
        with opened(path, device, **options) as model:
            pool = model.executor.new_pool()
            smallest = sequence_nbytes(pool.classes, CONTEXT, model.executor.block_tokens)
            budget = smallest + (2, 7)[n % 2] * pool.page_nbytes
            folder = tmp_path / f"pages {n}" if device == "cpu" else None
            for part, answers in ((requests, wanted[: len(requests)]), (turns, wanted[len(requests) :])):
                # Between the two the engine is closed: what it stored on disk is found again.
                slots, speculate = rng.choice([2, 4, 8]), rng.choice(["auto", 4])
                with Engine(model, slots=slots, kv_budget=budget, speculate=speculate, kv_disk=folder) as engine:
                    for row in zip(part, answers, together(engine, part, rng), strict=True):
                        assert_same(*row)
                    stats = engine.stats
                    assert stats.pages_used == stats.pages_kept == len(set(engine._store.tree.pages))
                    preempted, cached = preempted + stats.preemptions, cached + stats.cached_tokens
                    drafted += stats.guessed_tokens
                assert engine.stats.pages_used == 0
    print(f"{device}: {preempted} preemptions, {cached} tokens of prompts reused, {drafted} drafted")
    assert cached or device != "cpu"
    assert drafted or device == "disk"


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine", "a cache of the caller's"])
def test_a_conversation_is_not_read_again(tmp_path: Path, by_engine: bool) -> None:
    """Each turn reads again at most 64 tokens beyond what is new or was changed; here a thought is dropped."""
    path, rng = artifact(tmp_path / "a.pi", context=4096), random.Random(2)
    header, end = [90, 91, 92, 93, 94], 77

    def message(least: int) -> list[int]:
        return [*(rng.randrange(100, 250) for _ in range(rng.randrange(least, 90))), end]

    with load(path, context=4096) as model, Engine(model) as engine:
        talk, kept, cache = [1, *message(40)], 0, model.new_cache()
        for turn in range(20):
            prompt, count = [*talk, *header], rng.randrange(1, 40)
            alone = partial(model.generate, cache=cache)
            stream = (engine.generate if by_engine else alone)(prompt, max_tokens=count)
            text = "".join(stream)
            assert by_engine or text == "".join(model.generate(prompt, max_tokens=count)), turn
            assert stream.stats.cached_tokens >= kept - 64, turn
            kept = len(talk)  # behind it the next prompt has no thought
            talk += [*header, *message(10), *message(10)]


@pytest.mark.parametrize("length", [70, 100, 200])
@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_place_that_is_kept_takes_no_memory_that_a_sequence_needs(device: str, length: int, tmp_path: Path) -> None:
    path, ids = artifact(tmp_path / "a.pi"), np.random.default_rng(length).integers(100, 250, length)
    with opened(path, device) as model:
        wanted = "".join(model.generate(ids, max_tokens=CONTEXT))
        budget = sequence_nbytes(model.executor.new_pool().classes, CONTEXT, model.executor.block_tokens)
        cache = model.executor.new_cache(model.executor.new_pool(budget))
        for _ in range(2):
            answer = model.generate(ids, max_tokens=CONTEXT, cache=cache)
            assert "".join(answer) == wanted
            assert answer.finish_reason == "context" or cache.length > length
        cache.close()
        assert cache.pool.in_use == 0


@pytest.mark.parametrize("length", [1, 31, 32, 63, 64, 65, 100, 200, 1000, 5000])
def test_places_of_snapshots(length: int) -> None:
    places = snapshot_places([7] * length, (), 32)
    assert places == sorted({*places})
    assert all(place % 32 == 0 and 0 < place <= length - 32 for place in places)
    assert (not places) == (length < 64)
    if places:
        assert length - places[-1] < 64
        assert len(places) <= 2 + (length // 32).bit_length()
    ended = [7] * length
    ended[length // 2] = 77
    assert {*snapshot_places(ended, (77,), 32)} - {*places} <= {(length // 2 + 1) // 32 * 32}


def test_states_are_counted_and_are_a_class_of_their_own() -> None:
    decoder = small_decoder(recurrence="gated_delta", **FACTS["gated_delta"])
    keys, states = layer_classes(decoder, "f16")
    assert (keys.layers, states.layers, states.is_state, states.page.dtype) == ((2,), (0, 1, 3), True, "float32")
    short, long = (sequence_nbytes((keys, states), positions, 64) for positions in (32, 3200))
    assert long - short == 99 * keys.page.nbytes
