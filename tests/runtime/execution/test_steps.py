"""Steps of several sequences and of several threads: each gets what it would get alone."""

import threading
from pathlib import Path

import numpy as np
import pytest
from support.steps import step
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import Model, Sampling, load
from pi_runtime.errors import UsageError
from pi_runtime.execution.executor import SequenceStep

PROMPTS = [[5, 9, 250, 31], [7, 7, 12], [99, 3, 4, 5, 6, 8], [200]]
DEVICES = ["cpu", "stand-in"]


class Observed:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.inputs: list[tuple[int, np.ndarray]] = []

    def see(self, layer: int, input_TD: np.ndarray, _expert_TK: np.ndarray | None) -> None:
        self.inputs.append((layer, input_TD.copy()))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = stored_plan((64, 128, 0), 1 << 20, 1 << 19)
    decoder = small_decoder(d_ff=150, n_layers=3, context_length=96)
    path = tmp_path_factory.mktemp("steps") / "a.pi"
    return random_artifact(path, decoder, ranks=[4, None, 6], seed=5, scale=3.0, plans=(plan,))


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_of_a_step_get_what_each_gets_alone(path: Path, device: str) -> None:
    with load(path, device=device) as model:
        executor = model.executor

        def sequences() -> list[SequenceStep]:
            observed = {"select": True, "logits": "all", "observer": Observed()}
            kinds = [{"select": False}, observed, {"select": False}]
            steps = [
                SequenceStep(cache=executor.new_cache(), tokens=np.array(ids, np.int64), **kind)  # type: ignore[arg-type]
                for ids, kind in zip(PROMPTS, kinds, strict=False)
            ]
            going_on = executor.new_cache()
            step(executor, [1, 2, 3], going_on, select=False)
            return [*steps, SequenceStep(cache=going_on, tokens=np.array([4]), select=True)]

        steps, others = sequences(), sequences()
        together, alone = executor.step(steps), [executor.step([s])[0] for s in others]
        for found, wanted in zip(together, alone, strict=True):
            np.testing.assert_array_equal(found.logits_TV, wanted.logits_TV)
            np.testing.assert_array_equal(found.rows_L2, wanted.rows_L2)
        for found, wanted in zip(seen(steps), seen(others), strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert [found.rows_L2 is not None for found in together] == [False, False, False, True]


def seen(steps: list[SequenceStep]) -> list[np.ndarray]:
    """What was shown to the observer, which looks on at the second sequence alone: an input for each layer."""
    observers = {id(s.observer): s.observer for s in steps if s.observer is not None}
    (observer,) = observers.values()
    assert isinstance(observer, Observed)
    assert [layer for layer, _ in observer.inputs] == [0, 1, 2]
    assert all(input_TD.shape == (len(PROMPTS[1]), 32) for _, input_TD in observer.inputs)
    return [input_TD for _, input_TD in observer.inputs]


def test_a_result_is_the_callers_own(path: Path) -> None:
    with load(path) as model:
        found = step(model.executor, [1, 2, 3], model.new_cache(), select=True, logits="all")
        kept = found.logits_TV.copy()
        step(model.executor, [9, 8, 7], model.new_cache(), select=True, logits="all")
        np.testing.assert_array_equal(found.logits_TV, kept)


@pytest.mark.parametrize("device", DEVICES)
def test_who_looks_on_changes_nothing(path: Path, device: str) -> None:
    with load(path, device=device) as model:
        wanted = step(model.executor, PROMPTS[0], model.new_cache(), select=True, logits="all")
        found = step(model.executor, PROMPTS[0], model.new_cache(), select=True, logits="all", observer=Observed())
        np.testing.assert_array_equal(found.logits_TV, wanted.logits_TV)


def test_a_cache_rolls_back(path: Path) -> None:
    with load(path) as model:
        cache = model.new_cache()
        step(model.executor, [1, 2], cache, select=False)
        wanted = step(model.executor, [3], cache, select=False).logits_TV
        step(model.executor, [4, 5], cache, select=False)
        cache.truncate(2)
        assert (cache.tokens, cache.length, cache.room) == ((1, 2), 2, cache.context - 2)
        np.testing.assert_array_equal(step(model.executor, [3], cache, select=False).logits_TV, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_threads_of_one_model_and_of_two_take_turns(path: Path, device: str) -> None:
    def answer(model: Model, n: int) -> list[int]:
        generation = model.generate(PROMPTS[n], max_tokens=20, sampling=Sampling(temperature=0.9, seed=n))
        list(generation)
        return generation.token_ids

    with load(path, device=device) as one, load(path) as two:
        wanted = [answer(one, n) for n in range(len(PROMPTS))]
        found: dict[tuple[int, int], list[int]] = {}

        def work(which: int, n: int) -> None:
            found[which, n] = answer((one, two)[which], n)

        threads = [threading.Thread(target=work, args=(which, n)) for which in (0, 1) for n in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert {key: found.get(key) for key in [(w, n) for w in (0, 1) for n in range(len(PROMPTS))]} == {
            (which, n): wanted[n] for which in (0, 1) for n in range(len(PROMPTS))
        }


def test_a_closed_executor_refuses(path: Path) -> None:
    model = load(path)
    cache = model.new_cache()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        step(model.executor, [1], cache, select=False)
