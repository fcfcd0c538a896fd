"""What the benchmark measures, and what it leaves out. No times are tested."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.commands.bench import measurement
from pi_runtime.commands.bench.measurement import Bench, BenchSpec, Row, modes_of
from pi_runtime.commands.bench.rendering import slower_than_dense
from pi_runtime.commands.bench.sequences import Sequences
from pi_runtime.errors import UsageError


def spec(batches: str = "1,2,6", prompts: str = "5,70", repetitions: int = 2, limit_s: float = 0) -> BenchSpec:
    return BenchSpec.parse(batches, prompts, repetitions, limit_s, threads=2)


def measured(path: Path, wanted: BenchSpec, mode: str = "auto", **options: int) -> Bench:
    bench = Bench(path, wanted, lambda mode: load(path, mode=mode, device="cpu", threads=2, **options))
    bench.run(mode, lambda _done, _total: None)
    return bench


def kinds_of(bench: Bench) -> list[tuple[str, str, int, int]]:
    return [(row.mode, row.phase, row.batch, row.tokens) for row in bench.rows]


def test_every_mode_batch_and_prompt_is_a_row(random_path: Path) -> None:
    bench = measured(random_path, spec())
    each = [("decode", 1, 1), ("decode", 2, 1), ("decode", 6, 1), ("prompt", 1, 5), ("prompt", 1, 70)]
    assert kinds_of(bench) == [(mode, *test) for test in each for mode in ("auto", "dense")]
    assert bench.left_out == []
    assert all(len(row.seconds) == 2 and min(row.seconds) > 0 for row in bench.rows)


@pytest.mark.parametrize(
    ("rungs", "wanted", "modes"),
    [
        (("gate", "dense"), "auto", ("auto", "dense")),
        (("dense", "dense"), "auto", ("dense",)),
        (("dense", "dense"), "gate", ("gate", "dense")),
        (("gate", "dense"), "dense", ("dense",)),
    ],
)
def test_modes(rungs: tuple[str, ...], wanted: str, modes: tuple[str, ...], tmp_path: Path) -> None:
    layers = tuple(Layer(rung=rung) for rung in rungs)  # type: ignore[arg-type]
    path = random_artifact(tmp_path / "a.pi", small_decoder(), layers=layers)
    with Artifact.open(path) as artifact:
        assert modes_of(artifact.manifest, wanted) == modes


def test_what_there_is_no_time_for(random_path: Path) -> None:
    bench = measured(random_path, spec(limit_s=1e-9, repetitions=9))
    assert kinds_of(bench) == [("auto", "decode", 1, 1), ("dense", "decode", 1, 1)]
    assert len(bench.rows[0].seconds) == 1
    assert bench.rows[0].deviation is None
    assert len(bench.left_out) == 4
    assert bench.left_out[0].startswith("batch 2: would take about")


def test_what_there_is_no_context_for(random_path: Path) -> None:
    bench = measured(random_path, spec("1", "12,13"), mode="dense", context=12)
    assert kinds_of(bench) == [("dense", "decode", 1, 1), ("dense", "prompt", 1, 12)]
    assert bench.left_out == ["prompt of 13: the context has 12 tokens"]
    with pytest.raises(UsageError, match="needs a context of 12 tokens"):
        measured(random_path, spec(), context=11)


def test_what_there_is_no_memory_for(random_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(random_path) as model:
        page = model.executor.new_pool().page_nbytes
    monkeypatch.setattr(measurement, "available_memory", lambda: 2 * page)
    bench = measured(random_path, spec("1,2,3", "5"), mode="dense")
    assert [row.batch for row in bench.rows if row.phase == "decode"] == [1, 2]
    assert [reason.partition(" for ")[0] for reason in bench.left_out] == [f"batch 3: needs {3 * page / 1024:.1f} KiB"]


def test_rates() -> None:
    row = Row(mode="dense", phase="decode", batch=4, tokens=1, seconds=(0.5, 1.0))
    assert (row.rates, row.tokens_per_s) == ((8.0, 4.0), 6.0)
    assert row.deviation == pytest.approx(8**0.5)


def test_ratios_are_of_turns() -> None:
    fields = {"phase": "decode", "batch": 1, "tokens": 1}
    own, dense = (Row(mode=mode, seconds=s, **fields) for mode, s in (("auto", (1, 2, 4)), ("dense", (2, 2, 4.4))))  # type: ignore[arg-type]
    assert own.times(dense) == pytest.approx((1.1, 1, 2))
    slow, peer = (Row(mode, "decode", 1, 1, (3, 3, 4.5)) for mode in ("auto", "llama.cpp"))
    assert slower_than_dense([slow, peer, dense]) == ["auto"]
    assert slower_than_dense([own, dense, dense]) == []


def test_models_are_closed_where_a_test_fails(random_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Model] = []

    def open_model(mode: str) -> Model:
        opened.append(load(random_path, mode=mode, device="cpu"))
        return opened[-1]

    def fail(*_: object) -> float:
        raise RuntimeError

    monkeypatch.setattr(Sequences, "read_prompt", fail)
    with pytest.raises(RuntimeError):
        Bench(random_path, spec(), open_model).run("auto", lambda _done, _total: None)
    with pytest.raises(UsageError, match="closed"):
        opened[0].new_cache()


Parse = Callable[[], BenchSpec]


@pytest.mark.parametrize("value", ["", "0", "1,,2", "-1", "1;2", "²", "two"])
def test_lists_that_are_none(value: str) -> None:
    with pytest.raises(UsageError, match=r"^batches="):
        spec(batches=value)
    with pytest.raises(UsageError, match=r"^prompt_tokens="):
        spec(prompts=value)


def test_lists_are_sorted_and_have_nothing_twice() -> None:
    assert spec(batches=" 8, 2,8").batches == (2, 8)
