"""Layers with a window give their pages back, and every text is that of masks alone, to the bit."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_models import from_disk
from support.requests import alone, assert_same, follow_ups, found_by, random_requests, together
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import Engine, Model, load
from pi_runtime.artifact.buffers import kv_page
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.layer_classes import LayerClass, sequence_nbytes
from pi_runtime.artifact.schema import Layer, Text
from pi_runtime.errors import UsageError
from pi_runtime.execution import pages
from pi_runtime.execution.kv_cache import pages_of
from pi_runtime.kernels.data import weight_table

CONTEXT = 256


pytestmark = pytest.mark.usefixtures("poisoned")


@contextmanager
def masks_alone() -> Iterator[None]:
    """Within it models are loaded whose layers have all their pages in common, and keep them."""

    def one_class(d: Decoder, fmt: str) -> tuple[LayerClass, ...]:
        return (LayerClass(tuple(range(d.n_layers)), 0, kv_page(d, fmt, d.n_layers)),)

    with pytest.MonkeyPatch.context() as patch:
        for module in (pages, weight_table):
            patch.setattr(module, "layer_classes", one_class)
        yield


def artifact(
    path: Path, window: int, layers: tuple[int, ...] = (0, 1, 3), context: int = CONTEXT, **fields: Any
) -> Path:
    decoder = small_decoder(n_layers=4, context_length=context, window=window, windowed_layers=layers)
    ranks = [4, *[None] * 3]
    rungs = (Layer(rung="predicted", rank=4), *[Layer(rung="gate")] * 3)
    text = Text(prefix_ids=(), end_ids=(3, 77))
    return random_artifact(path, decoder, ranks=ranks, layers=rungs, text=text, scale=2.0, format="f16", **fields)


def opened(path: Path, device: str = "cpu", **options: Any) -> Model:
    return from_disk(path, 0.2, block_tokens=128) if device == "disk" else load(path, device=device, **options)


def smallest(model: Model, context: int = CONTEXT) -> int:
    """Bytes of what one sequence needs at most."""
    return sequence_nbytes(model.executor.new_pool().classes, context, model.executor.block_tokens)


@pytest.mark.parametrize("layers", [(0, 1, 3), (0, 1, 2, 3)], ids=["3 of 4", "all"])
@pytest.mark.parametrize("window", [1, 9, 32, 100])
@pytest.mark.parametrize("cache_format", ["auto", "q8", "q4"])
def test_long_texts_have_the_bits_of_masks_alone(
    tmp_path: Path, window: int, layers: tuple[int, ...], cache_format: str
) -> None:
    path, ids = artifact(tmp_path / "a.pi", window, layers), np.random.default_rng(window).integers(0, 256, CONTEXT)
    with masks_alone(), load(path, cache_format=cache_format) as model:
        wanted = model.logits(ids)
    with load(path, cache_format=cache_format) as model:
        np.testing.assert_array_equal(model.logits(ids), wanted)
        cache, most = model.new_cache(), window // 32 + 3
        for token in ids[:150]:
            model.decode(int(token), cache)
            for table in cache.tables:
                assert len(table.pages) <= (most if table.of.window else pages_of(cache.length))
        # Back to where windows have lost nothing, and to where they have.
        for length in (140, 50, 0):
            for n in range(length, length + 3):
                np.testing.assert_array_equal(model.logits(ids[: n + 1], last=1, cache=cache)[0], wanted[n])


@pytest.mark.parametrize(
    ("device", "window", "options"),
    [
        ("cpu", 9, {"mode": "predicted"}),
        ("cpu", 40, {"mode": "gate", "cache_format": "q8"}),
        ("cpu", 40, {"mode": "dense", "cache_format": "q4"}),
        ("stand-in", 9, {}),
        ("disk", 40, {}),
    ],
    ids=["cpu", "cache in q8", "cache in q4", "stand-in", "disk"],
)
def test_engines_give_the_text_of_masks_alone(
    device: str, window: int, options: dict[str, Any], tmp_path: Path, long: bool
) -> None:
    plan = stored_plan((16, 8, 8, 8), 1 << 20, 20000, context=CONTEXT)
    path = artifact(tmp_path / "a.pi", window, plans=(plan,) if device == "stand-in" else ())
    preempted = cached = 0
    for n in range(8 if long else 2):
        rng = random.Random(f"{device} {window} {n}")
        requests = random_requests(rng, 60 if long else 12, sampled=n % 2 == 1, context=CONTEXT, cancels=True)
        with masks_alone(), opened(path, device, **options) as model:
            wanted = [alone(model, request) for request in requests]
            turns = follow_ups(rng, requests, wanted, CONTEXT)
            wanted += [alone(model, request) for request in turns]
        with opened(path, device, **options) as model:
            budget = smallest(model) + (0, 5)[n % 2] * model.executor.new_pool().page_nbytes
            with Engine(
                model, slots=rng.choice([2, 4, 8]), kv_budget=budget, speculate=rng.choice(["auto", 4])
            ) as engine:
                found = together(engine, requests, rng) + together(engine, turns, rng)
                assert engine.stats.pages_used == engine.stats.pages_kept == len(set(engine._store.tree.pages))
                preempted, cached = preempted + engine.stats.preemptions, cached + engine.stats.cached_tokens
            assert engine.stats.pages_used == 0
            for row in zip([*requests, *turns], wanted, found, strict=True):
                assert_same(*row)
    print(f"{device}: {preempted} preemptions, {cached} tokens of prompts reused")


def test_pages_that_left_a_window_serve_other_sequences(tmp_path: Path) -> None:
    """Two long texts run at once in memory in which masks alone have no room for one."""
    path, rng = artifact(tmp_path / "a.pi", 9, context=1024), random.Random(0)
    prompts = [[rng.randrange(250) for _ in range(1000)] for _ in range(2)]
    with masks_alone(), load(path) as model:
        wanted = [found_by(model.generate(prompt, max_tokens=20)) for prompt in prompts]
        refused = smallest(model, 1020)
    with load(path) as model:
        budget = 2 * smallest(model, 1020)
        assert budget < refused
        with Engine(model, slots=2, kv_budget=budget) as engine:
            streams = [engine.generate(prompt, max_tokens=20) for prompt in prompts]
            assert [found_by(stream) for stream in streams] == wanted
            pool = engine._store.pool
            assert engine.stats.preemptions == 0
            assert sum(array.nbytes for array in pool._arrays if array is not None) <= budget
            with pytest.raises(UsageError, match="keys and values of 1023 positions take"), load(path) as other:
                Engine(other, kv_budget=smallest(model, 1023) - 1).generate(prompts[0], max_tokens=24)


def test_a_prefix_is_offered_where_windows_have_what_they_need(tmp_path: Path) -> None:
    path, rng = artifact(tmp_path / "a.pi", 40), random.Random(1)
    text = [rng.randrange(250) for _ in range(210)]
    with load(path) as model, Engine(model) as engine:
        for prompt, cached in ((text[:200], 0), (text, 200), (text[:100], 0), (text[:120], 119)):
            stream = engine.generate(prompt, max_tokens=1)
            assert found_by(stream) == found_by(model.generate(prompt, max_tokens=1))
            assert stream.stats.cached_tokens == cached, len(prompt)
