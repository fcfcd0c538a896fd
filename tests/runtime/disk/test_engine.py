"""An engine within a budget of memory: each answer is the one that it is alone, and keys and values keep their part."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disk_models import from_disk, rows_of
from support.long_form import marked_long
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.artifact.schema import Text
from pi_runtime.errors import ArtifactError, DoesNotFitError, UsageError
from pi_runtime.execution.pages import Allowance

PROMPTS = [[1 + n] * (17 * n + 2) for n in range(7)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of three is on the gate rung; no text ends by itself."""
    decoder = small_decoder(d_model=64, d_ff=2500, n_layers=3, context_length=160)
    text = Text(prefix_ids=(), end_ids=())
    path = tmp_path_factory.mktemp("disk") / "model.pi"
    return random_artifact(path, decoder, format="q8", ranks=[4, None, 6], seed=5, scale=3.0, text=text)


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[int]]:
    """The answers of the model in memory, one after the other."""
    with load(path, device="cpu") as model:
        return [answer(model, prompt, n) for n, prompt in enumerate(PROMPTS)]


def settings(seed: int) -> dict[str, object]:
    return {"max_tokens": 12, "sampling": Sampling(temperature=1.0, seed=seed)}


def answer(model: Model, prompt: list[int], seed: int) -> list[int]:
    generation = model.generate(prompt, **settings(seed))  # type: ignore[arg-type]
    for _ in generation:
        pass
    return generation.token_ids


def together(model: Model, piece: int | None) -> list[list[int]]:
    with Engine(model, slots=4, piece=piece) as engine:
        streams = [engine.generate(prompt, **settings(n)) for n, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]
        for stream in streams:
            "".join(stream)
        return [stream.token_ids for stream in streams]


CASES = [(share, threads) for share in (0, 0.2, 0.6, 2) for threads in (1, 2)]


@pytest.mark.parametrize("case", marked_long(CASES, [(0, 2), (0.2, 1), (0.6, 2), (2, 1)]))
def test_each_answer_is_the_one_that_it_is_alone(
    path: Path, alone: list[list[int]], case: tuple[float, int], long: bool
) -> None:
    share, threads = case
    with from_disk(path, share, threads=threads, block_tokens=1024) as model:
        for piece in (32, 100, None) if long else (32, None):
            assert together(model, piece) == alone
        assert [answer(model, prompt, n) for n, prompt in enumerate(PROMPTS)] == alone
        assert model.executor.disk is not None
        assert (model.executor.disk.misses == 0) == (share == 2)


def test_a_prompt_is_read_with_as_few_passes_over_the_file_as_alone(path: Path) -> None:
    with from_disk(path, 0.2, block_tokens=1024) as model:
        before = rows_of(model).reader.bytes_read
        "".join(model.generate([97] * 150, max_tokens=1))
        alone = rows_of(model).reader.bytes_read - before
        with Engine(model) as engine:
            "".join(engine.generate([98] * 150, max_tokens=1))
        assert alone <= rows_of(model).reader.bytes_read - before - alone < 1.5 * alone


def smallest(path: Path) -> int:
    with pytest.raises(DoesNotFitError) as found:
        load(path, ram_budget=1)
    return int(str(found.value.expected).split()[2])


@pytest.fixture
def within(path: Path) -> Iterator[Model]:
    """The model within a budget, with room for two pages of keys and values."""
    with load(path, device="cpu") as model:
        page = model.executor.new_pool().page_nbytes
    with load(path, ram_budget=smallest(path) + (4 << 20), kv_budget=2 * page) as model:
        yield model


def test_keys_and_values_of_all_caches_keep_their_part(within: Model) -> None:
    caches = [within.new_cache() for _ in range(3)]
    for cache in caches[:2]:
        within.decode(1, cache)
    with pytest.raises(DoesNotFitError, match="keys and values need"):
        within.decode(1, caches[2])
    del caches[0], cache
    within.decode(1, caches[1])


def test_an_engine_takes_what_is_left_for_keys_and_values(within: Model) -> None:
    room = within.executor.kv_room
    assert room is not None
    with Engine(within, slots=4) as engine:
        assert within.executor.kv_room == 0
        assert "".join(engine.generate([1], max_tokens=3))
        with pytest.raises(UsageError, match="keys and values of"):
            engine.generate([1] * 129, max_tokens=3)
    del engine
    gc.collect()
    assert within.executor.kv_room == room
    with pytest.raises(DoesNotFitError, match="keys and values need") as found:
        Engine(within, kv_budget=2 * room)
    assert "a larger kv_budget" in str(found.value)


def test_an_allowance_is_shared() -> None:
    allowance = Allowance(10)
    allowance.take(7)
    with pytest.raises(DoesNotFitError):
        allowance.take(4)
    allowance.drop(2)
    allowance.take(5)
    assert allowance.left == 0


def test_a_fault_of_the_disk_ends_the_engine_with_a_clear_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with from_disk(path, 0.2) as model, Engine(model) as engine:
        fault = ArtifactError("model.pi: cannot be read at byte 4096", found="Input/output error")

        def wait(_batch: int) -> None:
            raise fault

        monkeypatch.setattr(rows_of(model).reader, "wait", wait)
        with pytest.raises(ArtifactError, match="cannot be read"):
            "".join(engine.generate([1, 2], max_tokens=3))
        with pytest.raises(UsageError, match="the engine has failed") as found:
            engine.generate([1], max_tokens=1)
        assert "cannot be read at byte 4096" in str(found.value.found)
