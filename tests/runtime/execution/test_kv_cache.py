"""The cache over the turns of a talk, and models that are closed while they still generate."""

import functools
import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.steps import step

from pi_runtime import Model, load
from pi_runtime.errors import DoesNotFitError, PromptError, UsageError
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import Allowance, PagePool, PagesExhausted


def test_a_talk_with_a_cache_reads_like_one_without(random_path: Path) -> None:
    rng = np.random.default_rng(1)
    with load(random_path, mode="gate") as model:
        cache, talk = model.new_cache(), rng.integers(0, 256, 20).tolist()
        held = 0
        for _ in range(3):
            reused, fresh = model.generate(talk, max_tokens=9, cache=cache), model.generate(talk, max_tokens=9)
            assert "".join(reused) == "".join(fresh)
            assert reused.token_ids == fresh.token_ids
            assert (reused.stats.cached_tokens, fresh.stats.cached_tokens) == (held, 0)
            # The last token of an answer has not run yet.
            held = len(talk) + 8
            assert cache.tokens == (*talk, *reused.token_ids[:-1])
            talk = talk + reused.token_ids + rng.integers(0, 256, 5).tolist()


def test_a_cache_of_another_talk_is_used_as_far_as_it_agrees(model: Model) -> None:
    cache = model.new_cache()
    "".join(model.generate([1, 2, 3, 4, 5, 6], max_tokens=5, cache=cache))
    for prompt, kept in [([1, 2, 3, 9, 9], 3), ([1, 2, 3, 9, 9], 4), ([1, 2], 1), ([7, 7], 0)]:
        answer = model.generate(prompt, max_tokens=6, cache=cache)
        assert "".join(answer) == "".join(model.generate(prompt, max_tokens=6))
        assert answer.stats.cached_tokens == kept


def test_a_cache_of_another_shape_is_refused(model: Model, loop: Model) -> None:
    with pytest.raises(UsageError, match="another model, context or format"):
        model.generate([1], cache=loop.new_cache())
    with pytest.raises(UsageError, match="another model, context or format"):
        model.decode(1, loop.new_cache())


def test_a_fork_shares_its_pages_and_gives_the_bits_of_a_run_alone(random_path: Path) -> None:
    ids = np.random.default_rng(2).integers(0, 256, 45)
    with load(random_path, mode="predicted", cache_format="q8") as model:
        pool = model.executor.new_pool(4 * model.executor.new_pool().page_nbytes)
        cache = model.executor.new_cache(pool)
        step(model.executor, ids.tolist(), cache, select=False)
        forks = [cache.fork() for _ in range(2)]
        assert pool.in_use == 2
        for n, fork in enumerate(forks):
            alone = model.new_cache()
            step(model.executor, ids.tolist(), alone, select=False)
            for token in (n, 7, n):
                np.testing.assert_array_equal(model.decode(token, fork)[0], model.decode(token, alone)[0])
            assert fork.selected == alone.selected == (False,) * 45 + (True,) * 3
        assert [fork.pages[0] for fork in forks] == [cache.pages[0]] * 2
        assert (pool.in_use, len({c.pages[1] for c in (cache, *forks)})) == (4, 3)
        for token in range(19):
            model.decode(token, cache)
        with pytest.raises(PagesExhausted):
            model.decode(0, cache)
        assert cache.length == 64


@pytest.mark.parametrize(("fmt", "most"), [("q8", 0.1), ("q4", 0.3)])
def test_a_packed_cache_is_near_the_usual_one(random_path: Path, fmt: str, most: float) -> None:
    ids = np.random.default_rng(2).integers(0, 256, 50)
    with load(random_path, mode="dense") as usual, load(random_path, mode="dense", cache_format=fmt) as model:
        assert (model.executor.new_pool().page_nbytes < usual.executor.new_pool().page_nbytes) or fmt == "q8"
        wanted = usual.logits(ids)
        error = np.linalg.norm(model.logits(ids) - wanted) / np.linalg.norm(wanted)
        assert 0 < error < most
        with pytest.raises(UsageError, match="another model, context or format"):
            model.decode(1, usual.new_cache())
    with pytest.raises(UsageError, match=r"^cache_format='q5': unknown"):
        load(random_path, cache_format="q5")


@pytest.mark.parametrize("fmt", ["q8", "q4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_packed_cache_has_the_same_bits_on_any_threads_and_after_tokens_are_taken_back(
    random_path: Path, fmt: str, threads: int
) -> None:
    """The key that a page is packed beside is overwritten where its first token is taken back, and only there."""
    ids = np.random.default_rng(2).integers(0, 256, 80)
    with load(random_path, mode="dense", cache_format=fmt, threads=1) as model:
        wanted_TV = model.logits(ids)
    with load(random_path, mode="dense", cache_format=fmt, threads=threads) as model:
        cache = model.new_cache()
        for kept in (79, 65, 64, 63, 33, 32, 31, 0):
            others = np.concatenate([ids[:kept], (ids[kept:] + 1) % 256])
            model.logits(others, last=1, cache=cache)
            np.testing.assert_array_equal(model.logits(ids, last=1, cache=cache)[0], wanted_TV[-1])
            assert cache.length == 80


def test_a_budget_below_a_page_is_refused(model: Model) -> None:
    with pytest.raises(DoesNotFitError, match=r"^kv_budget=9: no page of 32 positions fits"):
        model.executor.new_pool(9)


def test_decode_is_a_step_of_generation(random_path: Path) -> None:
    with load(random_path, mode="predicted") as model:
        answer, cache = model.generate([1, 2, 3], max_tokens=6), model.new_cache()
        "".join(answer)
        "".join(model.generate([1, 2, 3], max_tokens=1, cache=cache))
        for token, following in itertools.pairwise(answer.token_ids):
            logits_V, rows = model.decode(token, cache)
            assert logits_V.argmax() == following
            assert rows.shape == (3, 2)


def test_decoding_stops_at_the_end_of_the_context(loop: Model) -> None:
    cache = loop.new_cache()
    for _ in range(8):
        loop.decode(1, cache)
    with pytest.raises(PromptError, match="context of 8 tokens is full"):
        loop.decode(1, cache)


def test_two_generations_may_take_turns(model: Model) -> None:
    def texts() -> list[str]:
        return ["".join(model.generate([n], max_tokens=12)) for n in (3, 4)]

    one, two = (model.generate([n], max_tokens=12) for n in (3, 4))
    turns = list(itertools.zip_longest(one, two, fillvalue=""))
    assert ["".join(column) for column in zip(*turns, strict=True)] == texts()


def test_a_generation_outlives_its_models_name(random_path: Path) -> None:
    answer = load(random_path, mode="dense").generate([1, 2], max_tokens=5)
    gc.collect()
    with load(random_path, mode="dense") as model:
        assert "".join(answer) == "".join(model.generate([1, 2], max_tokens=5))


def test_a_closed_model_says_so(random_path: Path) -> None:
    with load(random_path) as model:
        begun, unbegun = model.generate([1, 2]), model.generate([1, 2])
        next(begun)
        decode = functools.partial(model.decode, 1, model.new_cache())
    for use in (lambda: list(begun), lambda: list(unbegun), lambda: model.logits([1]), model.new_cache, decode):
        with pytest.raises(UsageError, match="the model is closed"):
            use()
    model.close()


def in_finalizer(frame: Any) -> bool:
    """Whether a finalizer runs: what interrupts one cannot be raised, whoever wrote it."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("budget", [None, 1 << 20])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_of_a_constructor_leaves_a_finalizer_that_works(
    random_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    """Before each line of it, and of what it calls."""
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with load(random_path) as opened:
        manifest = opened.manifest
    allowance = None if budget is None else Allowance(1 << 30)

    def make() -> None:
        KVCache(PagePool(manifest, budget, allowance=allowance), 64)

    lines = 0
    while True:
        left, lines = lines, lines + 1

        def interrupt(frame: Any, event: str, _arg: object) -> Any:
            nonlocal left
            if "pi_runtime" not in frame.f_code.co_filename or in_finalizer(frame):
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            make()
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(before)
            gc.collect()
        break
    assert lines > 20
    assert not unraisable
