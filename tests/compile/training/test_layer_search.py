"""A layer's search that is split into tasks, against one that is a task."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("zarr")

from support.planted import DENSE_LAYER, LAYERS, planted, trained_on

from pi_compile.files import read_arrays
from pi_compile.results.predictor_set import PredictorSet
from pi_compile.training import candidates, work_estimate
from pi_compile.training.candidates import MORE_RANKS
from pi_compile.workers import WorkFolder

RUNGS = ("dense", "gate", "threshold", "predicted")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return planted(tmp_path_factory.mktemp("sparse"), tmp_path_factory.mktemp("counts"))


@pytest.fixture
def run(sparse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PredictorSet]:
    def train(folder: str, longest: float, **changes: Any) -> PredictorSet:
        monkeypatch.setattr(work_estimate, "LONGEST", longest)
        return trained_on(sparse, tmp_path / folder, **changes)

    return train


def found(folder: Path, layer: int) -> list[Any]:
    """What the tasks of a layer found, in their order."""
    order = {"begun": 0, "rank": 1, "round": 3}
    files = folder.glob(f"layer-{layer}*.npz")

    def place(path: Path) -> tuple[int, int]:
        _, _, kind, number = f"{path.stem}-round-{MORE_RANKS}-0".split("-")[:4]
        return order[kind], int(number) if number.isdecimal() else 0

    stored = [str(read_arrays(path, "candidates")["candidates"]) for path in sorted(files, key=place)]
    return [candidate for part in stored for candidate in json.loads(part)]


@pytest.mark.parametrize("formats", [("f16",), ("q8", "q4")], ids="-".join)
def test_both_ways_find_the_same_bytes(run: Callable[..., PredictorSet], tmp_path: Path, formats: Any) -> None:
    whole = run("whole", float("inf"), rungs=RUNGS, predictor_formats=formats)
    split = run("split", 0.0, rungs=RUNGS, predictor_formats=formats)
    assert split.digest() == whole.digest()
    for layer in range(LAYERS):
        assert found(tmp_path / "split", layer) == found(tmp_path / "whole", layer)
    assert len(list((tmp_path / "whole").glob("layer-*.npz"))) == LAYERS
    assert len(list((tmp_path / "split").glob("layer-0-rank-*.npz"))) > 1
    assert not list((tmp_path / "split").glob("warm-*"))
    assert not list((tmp_path / "split").glob("inputs-*"))


def test_a_rank_further_out_is_tried_after_the_others(
    run: Callable[..., PredictorSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "RANK_FACTORS", (0.5,))
    assert run("split", 0.0).digest() == run("whole", float("inf")).digest()
    tried = [
        set(read_arrays(tmp_path / "split" / f"layer-{DENSE_LAYER}{part}.npz", "tried")["tried"].tolist())
        for part in ("-begun", "-rank-64", "-round-1", "")
    ]
    assert tried == [set(), {64}, {32, 64}, {32, 64}]


@pytest.mark.parametrize("tasks", [1, 2, 4, 6])
def test_a_killed_search_goes_on_from_its_last_task(
    run: Callable[..., PredictorSet], monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    done, do = [], WorkFolder._do

    def dies(self: WorkFolder, taken: Any, make: Any) -> None:
        name = next(iter(taken))
        if name.startswith("layer-"):
            if len(done) == tasks:
                raise KeyboardInterrupt
            done.append(name)
        do(self, taken, make)

    with monkeypatch.context() as m:
        m.setattr(WorkFolder, "_do", dies)
        with pytest.raises(KeyboardInterrupt):
            run("killed", 0.0)
    again = []
    monkeypatch.setattr(WorkFolder, "_do", lambda s, taken, make: again.extend(taken) or do(s, taken, make))
    killed = run("killed", 0.0)
    assert not set(done) & set(again)
    assert killed.digest() == run("whole", float("inf")).digest()


def test_the_number_of_workers_has_no_say(sparse: Any) -> None:
    """A search is split by the operations that it takes."""
    from pi_compile.training import TrainingWork, TrainSpec

    small, large = (
        TrainingWork.of(sparse[0].decoder, TrainSpec(steps=steps), 0.1, 65_536, 16_384, 16_384) for steps in (1, 10**7)
    )
    assert not small.splits
    assert large.splits
    assert large.search().operations > work_estimate.LONGEST > small.search().operations
